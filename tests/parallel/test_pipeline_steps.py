"""Steps of a pipeline of stages: every gradient is that of a single process, with each schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from small_steps import Array, Variant, check_mesh, make_examples, make_model, make_settings, whole

from starling.common.errors import ConfigError
from starling.policy.plan.stages import balance_blocks, rank_of_stage, stages_of_rank
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.model.layout import attention_plan
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.pipeline.stages import check_stages, observe_stages

DOUBLE_TOLERANCE = 1e-6
"""In double precision; log-probabilities are normalised in single precision even there."""
TP_TOLERANCE = 6e-6
"""With tensor parallelism, through four blocks where its own steps have two."""
ALL = [
    ("deep qwen3", "rl"),
    ("deep qwen3-tied", "sft"),
    ("deep qwen3", "dpo"),
    ("deep qwen3_moe", "rl"),
    ("deep llama", "reward_model"),
]
OTHERS = [("deep gemma3", "rl"), ("deep granite", "rl"), ("deep deepseek_v3", "rl")]
"""With rotary embeddings by kind of layer, embeddings that are scaled, and shared experts."""
SOME = [("deep qwen3-tied", "rl"), ("deep qwen3_moe", "rl")]


def campaign(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> Any:
    """Return parameters of a test that is part of a campaign."""
    return pytest.param(mesh, steps, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"pp": 2}, ALL),
        ({"pp": 2, "dp_shard": 2, "schedule": "zbv"}, SOME),
        campaign({"pp": 2}, OTHERS[:2]),
        campaign({"pp": 2, "dp_shard": 2, "schedule": "interleaved"}, OTHERS),
        campaign({"pp": 4, "schedule": "1f1b"}, OTHERS),
        campaign({"pp": 2, "dp_shard": 2, "ep": 2}, [("deep deepseek_v3", "rl")]),
        campaign({"pp": 2, "schedule": "gpipe"}, ALL),
        campaign({"pp": 2, "schedule": "interleaved"}, ALL),
        campaign({"pp": 2, "schedule": "zbv"}, ALL),
        campaign({"pp": 4}, ALL),
        campaign({"pp": 2, "dp_replicate": 2}, SOME),
        campaign({"pp": 2, "dp_shard": 2}, ALL),
        campaign({"pp": 2, "dp_shard": 2, "schedule": "interleaved"}, SOME),
        campaign({"pp": 2, "dp_shard": 2, "ep": 2}, [("deep qwen3_moe", "rl")]),
        campaign({"pp": 2, "dp_shard": 2, "ep": 2, "schedule": "zbv"}, [("deep qwen3_moe", "rl")]),
        campaign({"pp": 2, "tp": 2}, ALL),
        campaign({"pp": 2, "tp": 2, "schedule": "zbv"}, SOME),
        campaign({"pp": 2, "dp_shard": 2, "tp": 2}, ALL),
        campaign({"pp": 2, "dp_shard": 2, "tp": 2, "schedule": "zbv"}, SOME),
        campaign({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}, [("deep qwen3_moe", "rl")]),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> None:
    """With microbatches of different lengths, passes of the reference, and an embedding that two stages have."""
    check_mesh(mesh, steps, TP_TOLERANCE if mesh.get("tp") else 2e-6)


@pytest.mark.campaign
def test_every_gradient_in_double_precision_is_that_of_a_single_process() -> None:
    """In single precision, that of a norm of queries through four blocks is 8e-6 from it."""
    check_mesh({"pp": 2, "tp": 2}, OTHERS, DOUBLE_TOLERANCE, torch.float64)


def tied_weights(_: int) -> tuple[Array, Array] | None:
    """Make a supervised step with another rate of the embedding. Returns embedding and output layer of the first rank.

    Its first and its last stage have them.
    """
    settings = make_settings(pp=2, schedule="zbv")
    optimizer = settings.sft.optimizer.model_copy(update={"rates": {"embed_tokens": 0.1}, "weight_decay": 0.1})
    settings = settings.model_copy(update={"sft": settings.sft.model_copy(update={"optimizer": optimizer})})
    mesh = Mesh(settings.parallel)
    learner = Learner(lambda: Variant.of("deep qwen3-tied").load(), settings, mesh=mesh)
    learner.supervise(make_examples(), num_steps=4)
    if mesh.place("pp"):
        return None
    model = learner.model
    return whole(model.get_input_embeddings().weight), whole(model.get_output_embeddings().weight)


def test_tied_weights_of_two_stages_stay_equal_with_a_rate_of_their_own() -> None:
    """A pattern of names means both, although only one of them has the name."""
    make_model("qwen3", True)  # imports what the forked ranks then have
    first, _ = run_ranks(2, tied_weights)
    assert np.array_equal(*first)


def test_blocks_are_balanced_with_the_embedding_and_the_output_layer() -> None:
    """No stage is empty, and the largest is as small as possible."""
    assert balance_blocks([1.0] * 4, 0.0, 0.0, 2) == [range(2), range(2, 4)]
    assert balance_blocks([1.0] * 6, 2.0, 2.0, 2) == [range(3), range(3, 6)]
    assert balance_blocks([1.0] * 6, 0.0, 2.0, 2) == [range(4), range(4, 6)]
    assert balance_blocks([1.0] * 8, 2.0, 3.0, 4) == [range(1), range(1, 4), range(4, 7), range(7, 8)]
    assert balance_blocks([1.0, 1.0], 9.0, 9.0, 2) == [range(1), range(1, 2)]
    assert balance_blocks([5.0, 1.0, 1.0, 1.0], 0.0, 0.0, 2) == [range(1), range(1, 4)]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1f1b", [[0], [1], [2]]),
        ("interleaved", [[0, 3], [1, 4], [2, 5]]),
        ("zbv", [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_of_ranks(schedule: str, ranks: list[list[int]]) -> None:
    """In rounds, or there and back."""
    settings = ParallelSettings.model_validate({"pp": 3, "schedule": schedule})
    assert [stages_of_rank(settings, rank) for rank in range(3)] == ranks
    for rank, stages in enumerate(ranks):
        assert [rank_of_stage(settings, stage) for stage in stages] == [rank] * len(stages)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pp": 3}, "pp = 3 makes 3 stages, and Qwen3ForCausalLM has 2 blocks: use at most 2"),
        ({"pp": 2, "schedule": "zbv"}, "pp = 2 makes 4 stages, 2 on each rank, and .* 2 blocks: set it to 1"),
    ],
)
def test_more_stages_than_blocks_are_refused(settings: dict[str, Any], text: str) -> None:
    """With the sizes that would fit."""
    with pytest.raises(ConfigError, match=text):
        check_stages(make_model("qwen3", False), ParallelSettings.model_validate(settings))


def test_body_that_computes_something_after_its_blocks_is_refused() -> None:
    """Each stage would do so."""
    model = make_model("qwen3", False)
    plan = attention_plan(model)
    observe_stages(model, ParallelSettings(pp=2), plan)

    def add(_: torch.nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + 1.0
        return output

    model.model.register_forward_hook(add)
    with pytest.raises(ConfigError, match="pp = 2 is not available for Qwen3ForCausalLM, whose code does not run in"):
        observe_stages(model, ParallelSettings(pp=2), plan)


def test_models_that_do_not_run_in_stages_are_refused() -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match=r'"zbv" would sum gradients of torch\.bfloat16 in that type where nothing'):
        check_stages(make_model("qwen3", False, dtype=torch.bfloat16), ParallelSettings(pp=2, schedule="zbv"))
    with pytest.raises(ConfigError, match="pp = 2 is not available for Qwen3Model, only for language and reward"):
        check_stages(make_model("qwen3", False).model, ParallelSettings(pp=2))

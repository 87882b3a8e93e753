"""Steps of models with low-rank adapters on a mesh: every gradient of an adapter is that of a single process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from small_steps import Variant, check_mesh, make_model, make_settings

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.pipeline.stages import check_stages
from starling.policy.train.parallel.weights.adapters import check_mergeable
from starling.weightsync.tensors.adapters import add_adapters, base_digest, digest_of_base

TP_TOLERANCE = 6e-6
"""As in the steps with tensor parallelism, of four blocks."""
MOST = [("adapted qwen2", "rl"), ("adapted qwen3-tied", "dpo"), ("adapted qwen3_moe", "rl"), ("adapted llama", "sft")]
DEEP = [("adapted deep qwen3", "rl"), ("adapted deep qwen3-tied", "dpo"), ("adapted deep qwen3_moe", "sft")]


def campaign(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> Any:
    """Return parameters of a test that is part of a campaign."""
    return pytest.param(mesh, steps, marks=pytest.mark.campaign)


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"dp_shard": 2, "tp": 2}, [("adapted qwen2", "rl"), ("adapted qwen3-tied", "dpo")]),
        ({"cp": 2}, [("adapted qwen3_moe", "rl"), ("adapted llama", "reward_model")]),
        ({"pp": 2}, [("adapted deep qwen3", "rl")]),
        campaign({"dp_shard": 2}, [*MOST, ("adapted llama", "reward_model")]),
        campaign({"dp_shard": 2, "reshard": "always"}, MOST),
        campaign({"dp_replicate": 2}, MOST),
        campaign({"dp_replicate": 2, "dp_shard": 2}, MOST),
        campaign({"tp": 2}, [*MOST, ("adapted llama", "reward_model")]),
        campaign({"tp": 4}, MOST),
        campaign({"dp_shard": 2, "tp": 2}, MOST),
        campaign({"cp": 2, "tp": 2}, MOST[:2]),
        campaign({"cp": 2, "context": "ring"}, MOST[:2]),
        campaign({"dp_shard": 2, "ep": 2}, [("attention-adapted qwen3_moe", "rl")]),
        campaign({"dp_shard": 2, "tp": 2, "ep": 4}, [("attention-adapted qwen3_moe", "rl")]),
        campaign({"pp": 2}, DEEP),
        campaign({"pp": 2, "schedule": "interleaved"}, DEEP),
        campaign({"pp": 2, "dp_shard": 2}, DEEP),
        campaign({"pp": 2, "tp": 2}, DEEP),
        campaign({"pp": 2, "cp": 2}, DEEP[:2]),
        campaign({"pp": 2, "dp_shard": 2, "tp": 2}, [*DEEP, ("adapted deep qwen3", "reward_model")]),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, Any], steps: list[tuple[str, str]]) -> None:
    """With a reference that is the same model with other adapters, between two passes of the trained ones."""
    check_mesh(mesh, steps, TP_TOLERANCE if mesh.get("tp") else 2e-6)


def forms_of_adapters(_: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank says of adapters that it cannot divide, or the gradient norm of a step with them."""
    found: dict[str, Any] = {}
    for name, (kind, settings) in FORMS.items():
        found[name] = outcome_of(kind, settings, parallel)
    return found


FORMS = {
    "dora": ("qwen3", LoraSettings(rank=4, dora=True)),
    "head": ("qwen3", LoraSettings(rank=4, targets=("q_proj",), modules_to_save=("lm_head",))),
    "norms": ("qwen3", LoraSettings(rank=4, targets=("v_proj",), modules_to_save=("q_norm",))),
    "experts": ("qwen3_moe", LoraSettings(rank=4, targets=("q_proj",), parameters=("mlp.experts.down_proj",))),
}
"""Adapters of other forms, by what is special about them: DoRA, modules in full, and experts."""


def outcome_of(kind: str, settings: LoraSettings, parallel: dict[str, Any]) -> str | float:
    """Return the norm of the gradient of a supervised step, or why there is none."""
    from small_steps import make_examples

    def load() -> Any:
        model = make_model(kind, False)
        add_adapters(model, settings, seed=0)
        return model

    mesh = Mesh(ParallelSettings(**parallel)) if parallel else None
    try:
        learner = Learner(load, make_settings(**parallel), mesh=mesh)
        return learner.supervise(make_examples(), num_steps=1)["grad_norm"]
    except ConfigError as error:
        return str(error)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("parallel", "refused"),
    [
        ({"dp_shard": 2}, {}),
        (
            {"tp": 2},
            {
                "dora": "tp = 2 divides rows whose lengths model.lora.dora = true needs: set tp to 1",
                "head": "tp = 2 with [model.lora] is available for layers of the blocks, and lm_head is none",
                "norms": "tp = 2 divides model.layers.0.self_attn.q_norm, which model.lora.modules_to_save trains",
            },
        ),
        ({"dp_shard": 2, "ep": 2}, {"experts": "ep = 2 divides experts whose adapters are one tensor for all"}),
    ],
)
def test_other_forms_of_adapters_are_trained_or_refused(parallel: dict[str, Any], refused: dict[str, str]) -> None:
    """With the axis, the layer and the remedy; what is trained has the gradient of a single process."""
    forms = {name: form for name, form in FORMS.items() if "ep" not in parallel or form[0] == "qwen3_moe"}
    expected = {name: outcome_of(*form, {}) for name, form in forms.items()}
    for found in run_ranks(2, forms_of_adapters, parallel):
        for name, norm in expected.items():
            if name in refused:
                assert refused[name] in found[name]
            else:
                assert found[name] == pytest.approx(norm, rel=2e-6)


def base_of_rank(_: int) -> str:
    """Return the digest of the base weights that a rank knows."""
    mesh, variant = Mesh(ParallelSettings(tp=2)), Variant.of("adapted qwen3")
    settings = LoraSettings(rank=4)
    return Learner(variant.load, make_settings(tp=2), mesh=mesh, base_of=partial(digest_of_base, spec=settings)).base


def test_every_rank_has_the_digest_of_whole_base_weights() -> None:
    """Which rollouts compare with theirs."""
    expected = base_digest(Variant.of("adapted qwen3").load(), LoraSettings(rank=4))
    assert run_ranks(2, base_of_rank) == [expected, expected]


@pytest.mark.parametrize(
    ("targets", "parallel", "text"),
    [
        ("all-linear", {"pp": 2, "schedule": "zbv"}, '"zbv" splits backward passes by the parameters of a stage'),
        (r".*layers\.0\..*q_proj", {"pp": 2}, "pp = 2 leaves place 1 without a trained parameter"),
    ],
)
def test_stages_that_train_too_little_are_refused(targets: str, parallel: dict[str, Any], text: str) -> None:
    """With the setting to change."""
    model = make_model("qwen3", False, num_hidden_layers=4)
    add_adapters(model, LoraSettings(targets=targets), seed=0)
    with pytest.raises(ConfigError, match=text):
        check_stages(model, ParallelSettings.model_validate(parallel))


def test_adapters_that_several_ranks_cannot_merge_are_refused() -> None:
    """Before the first step, not at the export."""
    model = make_model("qwen3", False)
    add_adapters(model, LoraSettings(rank=4, dora=True), seed=0)
    with pytest.raises(ConfigError, match=r"merged = true with several ranks .* that of model\.layers\.0\.self_attn"):
        check_mergeable(model)
    check_mergeable(Variant.of("adapted qwen3").load(dtype=torch.bfloat16))

"""Adapters on vLLM: only adapters are transferred, and log-probabilities equal those of transformers with peft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adoptions import ATTENTION, NUM_CHECKPOINTS, adopt_under_load, check, largest_difference
from engines import (
    DEADLINE_S,
    EngineDriver,
    PublisherProcess,
    adapted_model,
    checkpoint,
    engine_driver,
    forward_logprobs,
    publisher_process,
    random_prompt,
    read_model,
    request,
    spec_of,
)
from system_runs import Command
from test_engine import adopt, spanning, until_sampled
from test_media import sized, write_model
from tiny_vision import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError, WeightsError
from starling.common.settings import LoraSettings
from starling.rollout.engine.vllm import adapters, launch
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.engine.vllm.processes import engine_processes
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.tensors.adapters import published_tensors

RECIPES = Path(__file__).parents[2] / "recipes"
VARIED = LoraSettings(
    rank=4,
    alpha=6.0,
    targets=r".*\.(q_proj|v_proj|o_proj|up_proj|down_proj)",
    exclude=r".*layers\.1\..*down_proj",
    rank_pattern={"v_proj": 12, r"layers\.0\.mlp\.up_proj": 2},
    alpha_pattern={"down_proj": 3.0},
    rslora=True,
    modules_to_save=("lm_head",),
)
"""Adapters on parts of fused projections, several ranks and scales, and a fully trained module."""

REWARD = """\
def reward(completion, reference, prompt_text, metadata):
    return float(sum(map(ord, completion)) % 2)
"""
"""Reward that differs within groups, so that advantages are not zero."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the base checkpoint, once for every version."""
    return [checkpoint(tmp_path_factory.mktemp("checkpoints") / "base", "llama", 0)] * NUM_CHECKPOINTS


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [adapted_model(folder, VARIED, seed) for seed, folder in enumerate(folders)]


@pytest.fixture(scope="module")
def publisher(folders: list[Path]) -> Iterator[PublisherProcess]:
    with publisher_process(folders, lora=VARIED) as made:
        yield made


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[EngineDriver]:
    with engine_driver(folders[0], lora=VARIED, load_weights=True) as made:
        yield made


@pytest.fixture
def running(engine: EngineDriver, publisher: PublisherProcess) -> EngineDriver:
    """Return the engine after at least one adoption."""
    if engine.engine.version < 1:
        adopt(engine, publisher)
    return engine


def largest_of(result: Any, model: Any) -> float:
    """Return the largest difference of a group's log-probabilities from a forward pass over `model`."""
    prompt = result.prompt_ids.tolist()
    return max(
        float(np.abs(c.logprobs - forward_logprobs(model, prompt, c.token_ids.tolist())).max())
        for c in result.completions
    )


def test_engine_starts_with_the_base_weights(engine: EngineDriver, folders: list[Path]) -> None:
    assert engine.engine.version == 0
    assert largest_of(engine.generate([1, 2, 3], 2), read_model(folders[0])) < 1e-4


def test_plan_transfers_only_adapters(engine: EngineDriver, publisher: PublisherProcess, models: list[Any]) -> None:
    sizes = [
        t.numel() * t.element_size() for t in published_tensors(models[0], dict(models[0].named_parameters())).values()
    ]
    plan = publisher.plan(engine.engine)
    assert plan.total_bytes == sum(sizes)
    assert {name.partition(".lora_")[0] for name in (spec.name for spec in engine.engine.layout().tensors)} >= {
        "model.layers.1.self_attn.q_proj",
        "lm_head.modules_to_save.default.weight",
    }


@pytest.mark.parametrize("num_adoptions", [8, pytest.param(40, marks=pytest.mark.campaign)])
def test_adoptions_under_load(
    running: EngineDriver, publisher: PublisherProcess, models: list[Any], folders: list[Path], num_adoptions: int
) -> None:
    first = running.engine.version + 1
    outcome = adopt_under_load(running, publisher, num_adoptions, "recompute", first=first)
    check(outcome, first + num_adoptions - 1)
    assert largest_difference(outcome.results, models) < 1e-4
    assert largest_difference(outcome.results[:1], [read_model(folders[0])]) > 0.1, (
        "the adapters must change the log-probabilities"
    )
    versions = np.concatenate([c.versions for result in outcome.results for c in result.completions])
    assert set(range(first, first + num_adoptions)) <= {*versions.tolist()}


@pytest.mark.parametrize(
    ("mode", "old_is_exact", "new_is_exact"),
    [("recompute", True, True), ("salt", False, True), ("keep", False, False)],
)
def test_cache_mode_determines_what_is_exact(
    running: EngineDriver,
    publisher: PublisherProcess,
    models: list[Any],
    mode: Any,
    old_is_exact: bool,
    new_is_exact: bool,
) -> None:
    prompt = random_prompt(140, 9)  # longer than a block of the cache, so that the block is shared
    before = running.engine.version
    after = before + 1
    old, new = spanning(running, publisher, mode, prompt)
    for result, version, exact in ((old, before, True), (old, after, old_is_exact), (new, after, new_is_exact)):
        worst = 0.0
        for completion in result.completions:
            wanted = forward_logprobs(models[version % NUM_CHECKPOINTS], prompt, completion.token_ids.tolist())
            here = completion.versions == version
            assert here.any()
            worst = max(worst, float(np.abs(completion.logprobs - wanted)[here].max()))
        assert (worst < 1e-4) == exact
    adopt(running, publisher)  # recompute: later tokens share no cache computed by older adapters


def test_versions_pulled_in_place_are_exact(
    running: EngineDriver, publisher: PublisherProcess, models: list[Any]
) -> None:
    first = running.engine.version + 1
    outcome = adopt_under_load(running, publisher, 3, "recompute", first=first, in_place=True)
    check(outcome, first + 2)
    assert largest_difference(outcome.results, models) < 1e-4


def test_adapters_for_another_base_are_rejected(engine: EngineDriver, tmp_path: Path) -> None:
    with (
        publisher_process([checkpoint(tmp_path / "other", "llama", 1)], lora=VARIED) as other,
        pytest.raises(WeightsError, match="rollout-0 has its adapters on other weights than policy-0"),
    ):
        make_plan(other.layout, engine.engine.layout())


def test_new_engine_adopts_the_newest_adapters(
    engine: EngineDriver, publisher: PublisherProcess, models: list[Any], folders: list[Path]
) -> None:
    """The last test of this engine: a new engine starts from the base and adopts the newest version directly."""
    newest = engine.engine.version + 1
    engine.engine.close()
    with engine_driver(folders[0], lora=VARIED) as again:
        assert again.engine.version == -1
        publisher.pull(again.engine, publisher.plan(again.engine), newest)
        assert again.engine.adopt("recompute").proven
        result = again.generate(random_prompt(20, 3), 3)
        assert all((completion.versions == newest).all() for completion in result.completions)
        assert largest_of(result, models[newest % NUM_CHECKPOINTS]) < 1e-4


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("family", "tp", "pp", "lora"),
    [
        ("llama", 2, 1, LoraSettings(rank=4, targets=(*ATTENTION, "down_proj", "lm_head"), modules_to_save=("norm",))),
        ("qwen3_moe", 1, 2, LoraSettings(rank=2, targets=ATTENTION, exclude=r".*layers\.1\..*")),
    ],
)
def test_adapters_on_several_workers(family: str, tp: int, pp: int, lora: LoraSettings, tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / "base", family, 0)] * NUM_CHECKPOINTS
    vllm = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with publisher_process(folders, lora=lora) as publisher, engine_driver(folders[0], lora=lora, vllm=vllm) as engine:
        assert len(engine.engine.layout().ranks) == tp * pp
        outcome = adopt_under_load(engine, publisher, 8, "recompute")
    check(outcome, 7)
    models = [adapted_model(folder, lora, seed) for seed, folder in enumerate(folders)]
    assert largest_difference(outcome.results, models) < 1e-4


@pytest.mark.campaign
def test_adapters_on_the_language_model_of_a_vision_model(tmp_path: Path) -> None:
    write_model(tmp_path, sized("qwen2_5_vl"), 0)
    with pytest.raises(ConfigError, match=r"adapts model.visual\S+, where vllm has no adapters; leave it out by"):
        VllmEngine(spec_of(tmp_path, lora=LoraSettings(rank=4)))
    lora, vocabulary = LoraSettings(rank=4, exclude=r".*visual.*"), len(make_tokenizer())
    with publisher_process([tmp_path] * 2, lora=lora) as publisher, engine_driver(tmp_path, lora=lora) as engine:
        plan = publisher.plan(engine.engine)
        publisher.pull(engine.engine, plan, 0)
        assert engine.engine.adopt("recompute").proven
        prompt = [token % vocabulary for token in range(8, 20)]
        engine.engine.add(request("one", prompt, 2, max_tokens=60))
        until_sampled(engine, 20)
        publisher.pull(engine.engine, plan, 1)
        assert engine.engine.adopt("recompute").proven
        (result,) = engine.finish("one")
    assert largest_difference([result], [adapted_model(tmp_path, lora, seed) for seed in (0, 1)]) < 1e-4


@pytest.mark.parametrize(
    ("family", "lora", "sentence"),
    [
        ("llama", {"dora": True}, "model.lora.dora needs rollout.engine = 'transformers': vllm has no DoRA"),
        ("qwen3_moe", {"parameters": ("mlp.experts.down_proj",)}, "model.lora.parameters needs"),
        ("qwen3_moe", {}, r"adapts model.layers.0.mlp.\S+, which is not a layer"),
        ("llama", {"rank": 600, "targets": ["q_proj"]}, "adapters of rank 600, and vllm computes with ranks up to 512"),
        (
            "llama",
            {"targets": r".*layers\.0\..*q_proj", "modules_to_save": ("layers.1.self_attn.q_proj",)},
            "names model.layers.1.self_attn.q_proj, and other layers of that ending have adapters",
        ),
    ],
)
def test_unsupported_adapters_are_rejected_before_the_start(
    family: str, lora: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    before, folder = engine_processes(), checkpoint(tmp_path, family, 0)
    with pytest.raises(ConfigError, match=sentence):
        VllmEngine(spec_of(folder, lora=LoraSettings(**lora)))
    assert engine_processes() == before


def test_layer_without_adapters_in_any_worker_is_rejected() -> None:
    adapters.check_computed([["a"], ["b"]])
    with pytest.raises(ConfigError, match=r"adapts visual.b, where vllm has no adapters; leave it out by"):
        adapters.check_computed([["a", "visual.b"], ["visual.b"]])


def test_arguments_list_the_adapted_layers(tmp_path: Path) -> None:
    spec = spec_of(checkpoint(tmp_path, "llama", 0), lora=VARIED)
    made = launch.arguments(spec, adapters.read(spec), on_cpu=True)
    assert (made["load_format"], made["enable_lora"], made["max_loras"]) == ("hf", True, 1)
    assert made["max_lora_rank"] == 16  # the least rank that vLLM supports, for 12
    assert made["lora_target_modules"] == ["down_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    spec = spec_of(tmp_path, lora=VARIED, vllm={"engine_args": {"max_loras": 2}})
    with pytest.raises(ConfigError, match="'max_loras', which other settings decide"):
        launch.arguments(spec, adapters.read(spec), on_cpu=True)


@pytest.mark.campaign
def test_lora_recipe_runs_on_vllm(tmp_path: Path) -> None:
    """The recipe for adapters with a random model and few steps."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    model = tmp_path / "model"
    make_model_folder(ScratchSettings(config=config, alphabet="abcdefghijklmnopqrstuvwxyz>", max_length=64), model)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = {
        "model.path": str(model),
        "launch.num-rollouts": "1",
        "sft.num-steps": "1",
        "rl.num-steps": "3",
        "rl.prompts-per-step": "2",
        "rl.group-size": "4",
        "rl.max-staleness": "0",  # so that trainer and rollout are compared in each step
        "evaluation.at-start": "false",
        "evaluation.at-end": "false",
        "reward.scorers": '[{name = "reward.py:reward"}]',
        "rollout.engine": "vllm",
        "rollout.vllm.kv-cache-mb": "16",
        "rollout.vllm.enforce-eager": "true",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    command = Command(tmp_path, "run", str(RECIPES / "lora.toml"), *flags, name="lora", fresh=True)
    try:
        assert command.wait(2 * DEADLINE_S) == 0, command.transcript()
    finally:
        command.kill_leftovers()
    lines = [json.loads(line) for line in (tmp_path / "runs/lora/attempt-1/metrics.jsonl").read_text().splitlines()]
    adopted = [line for line in lines if line["kind"] == "adopted"]
    assert adopted
    assert all(line["attested"] for line in adopted)
    mismatches = [line["mismatch_max"] for line in lines if line["kind"] == "step" and "mismatch_max" in line]
    assert len(mismatches) == 3
    assert max(mismatches) < 1e-4

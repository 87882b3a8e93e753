"""Architectures without a table of ours: published from transformers, pulled into vLLM by recorded layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BFLOAT16_ONLY, COMPUTED, ON_TWO_WORKERS, OTHER_NUMERICS, QUICK, UNRECORDED
from engines import DEADLINE_S, EngineDriver, engine_driver, forward_logprobs, random_prompt, spec_of
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from starling.algo.architecture import auto_class
from starling.common.errors import WeightsError
from starling.policy.train.model.load import load_model, version_tensors
from starling.rollout.engine.vllm import launch
from starling.weightsync.layouts.families import FAMILIES
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

SERVED: dict[str, Any] = {"load_weights": True, "has_own_weights": True, "max_rows": 4}
"""Settings of an engine that serves a fixed model."""
CONFIGS = {**ARCHITECTURES, **OTHER_NUMERICS, **BFLOAT16_ONLY, **UNRECORDED}


def write_folder(folder: Path, kind: str, dtype: str = "float32") -> Path:
    """Write the configuration of a tiny model."""
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.device("meta"):
        config.architectures = [type(auto_class(config).from_config(config)).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    return folder


def random_model(folder: Path, seed: int) -> Any:
    """Return a model whose every tensor is random."""
    model = load_model(folder, init="random", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in version_tensors(model).values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # norms, biases and gates begin as ones and zeros
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.requires_grad_(False)


@contextmanager
def adopted(folder: Path, models: list[Any], tp: int = 1, dtype: str = "float32") -> Iterator[Iterator[EngineDriver]]:
    """Start an engine; yield an iterator that publishes and adopts the models, one after the other."""
    with (
        Publisher(layout_of(version_tensors(models[0]), "policy-0"), transport="tcp") as publisher,
        engine_driver(folder, vllm={"tensor_parallel_size": tp}, max_rows=4, dtype=dtype) as driver,
    ):
        yield adopt_each(publisher, driver, models)


def adopt_each(publisher: Publisher, driver: EngineDriver, models: list[Any]) -> Iterator[EngineDriver]:
    """Adopt versions: the first one through the staging area, the others in place where the engine can."""
    engine = driver.engine
    plan = make_plan(publisher.layout, engine.layout())
    for version, model in enumerate(models):
        snapshot = publisher.snapshot(version, version_tensors(model), {"": plan})
        in_place = version > 0
        if in_place:
            engine.pause()
        options: Any = {"deadline_s": DEADLINE_S, "cancelled": lambda: False, "progress": lambda _: None}
        engine.pull(snapshot.offer(), plan, in_place=in_place, **options)
        report = engine.adopt("recompute")
        if in_place:
            engine.resume()
        assert report.proven
        assert report.layout_root == snapshot.layout_roots()[""]
        yield driver


def sampled(driver: EngineDriver, seed: int, rows: int = 2) -> list[tuple[list[int], list[int], Any]]:
    """Return prompts, sampled tokens and their log-probabilities."""
    prompt = random_prompt(20, seed)
    result = driver.generate(prompt, rows, lease=f"at {seed}", max_tokens=12, seed=seed)
    return [(prompt, completion.token_ids.tolist(), completion.logprobs) for completion in result.completions]


def one_by_one(driver: EngineDriver) -> list[tuple[list[int], list[int], Any]]:
    """Sample one row after another: in bfloat16, a row's values depend on the rows that share its batch."""
    return [row for seed in (1, 2) for row in sampled(driver, seed, rows=1)]


def check_logprobs(driver: EngineDriver, model: Any, seed: int) -> None:
    """Compare the log-probabilities of sampled tokens with a forward pass of transformers."""
    for prompt, token_ids, logprobs in sampled(driver, seed):
        np.testing.assert_allclose(logprobs, forward_logprobs(model, prompt, token_ids), atol=1e-4)


def whole_tensors(layout: Layout) -> set[str]:
    """Return the tensors that workers receive whole."""
    storages = {shard.storage for rank in layout.ranks for shard in rank.shards}
    return {storage.removeprefix("whole:") for storage in storages if storage.startswith("whole:")}


def check_architecture(kind: str, tp: int, folder: Path) -> None:
    """Adopt two versions of a model, and compare log-probabilities of both with transformers."""
    write_folder(folder, kind)
    models = [random_model(folder, seed) for seed in range(2)]
    with adopted(folder, models, tp) as drivers:
        for seed, (driver, model) in enumerate(zip(drivers, models, strict=True)):
            assert bool(whole_tensors(driver.engine.layout())) == (kind in COMPUTED)
            check_logprobs(driver, model, seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", QUICK)
def test_logprobs_after_pulls_equal_transformers(kind: str, tmp_path: Path) -> None:
    check_architecture(kind, 1, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", sorted(ARCHITECTURES.keys() - set(QUICK)))
def test_logprobs_of_further_architectures_equal_transformers(kind: str, tmp_path: Path) -> None:
    check_architecture(kind, 1, tmp_path)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "gemma3_text" else pytest.param(kind, marks=pytest.mark.campaign)
        for kind in ON_TWO_WORKERS
        if kind != "persimmon"  # vLLM computes it on one worker only
    ],
)
def test_logprobs_of_two_workers_equal_transformers(kind: str, tmp_path: Path) -> None:
    check_architecture(kind, 2, tmp_path)


def saved(model: Any, folder: Path, dtype: str = "float32") -> Path:
    """Write a checkpoint."""
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"dtype": dtype}))
    return folder


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("glm4_moe", "bfloat16"),  # with weights that vLLM keeps in float32
        *(
            pytest.param(kind, "bfloat16", marks=pytest.mark.campaign)
            for kind in (*BFLOAT16_ONLY, "deepseek_v2", "ernie4_5_moe", "granitemoehybrid")
        ),
        *(pytest.param(kind, "float32", marks=pytest.mark.campaign) for kind in OTHER_NUMERICS),
    ],
)
def test_pulled_weights_compute_what_loaded_ones_compute(kind: str, dtype: str, tmp_path: Path) -> None:
    empty = write_folder(tmp_path / "empty", kind, dtype)
    full = [saved(random_model(empty, seed), tmp_path / str(seed)) for seed in range(2)]
    models = [load_model(folder, dtype=dtype).requires_grad_(False) for folder in full]  # some weights stay in float32
    with adopted(empty, models, dtype=dtype) as drivers:
        whole = whole_tensors(next(drivers).engine.layout())
        assert bool(whole) == (kind in COMPUTED or (kind, dtype) == ("glm4_moe", "bfloat16"))
        pulled = one_by_one(next(drivers))
    with engine_driver(saved(models[1], tmp_path / "saved", dtype), dtype=dtype, **SERVED) as driver:
        for (_, ids, logprobs), (_, expected_ids, expected) in zip(pulled, one_by_one(driver), strict=True):
            assert ids == expected_ids
            np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_the_page_of_architectures_lists_those_that_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/architectures.md").read_text()
    tested = page.partition("## Tested")[2].partition("##")[0]
    rows = [row.partition("|")[0] for row in tested.split("\n| ") if "`" in row.partition("|")[0]]
    listed = [set(re.findall(r"`(\w+)`", row)) for row in rows[1:]]
    whole = [kinds.keys() & COMPUTED for kinds in (ARCHITECTURES, OTHER_NUMERICS)]
    direct = [kinds.keys() - COMPUTED for kinds in (ARCHITECTURES, OTHER_NUMERICS)]
    assert listed == [set(FAMILIES), direct[0], whole[0], direct[1], whole[1], set(BFLOAT16_ONLY)]


def test_an_engine_with_its_own_weights_needs_no_layout(tmp_path: Path) -> None:
    """vLLM makes a parameter of this architecture only when it loads it, so no layout is known before."""
    model = random_model(write_folder(tmp_path / "empty", "phi"), 0)
    with engine_driver(saved(model, tmp_path / "saved"), **SERVED) as driver:
        assert driver.engine.layout() == Layout(replica="rollout-0", tensors=(), ranks=())
        assert driver.engine.version == 0
        check_logprobs(driver, model, 0)
    with pytest.raises(WeightsError, match=r"fills lm_head.bias \(1 such\) with no tensor of the transformers class"):
        EngineDriver(tmp_path / "saved", max_rows=4)


def test_latent_attention_keeps_its_weights_on_processors_with_amx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's implementation with AMX frees the weights that the next version is copied into."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    spec = spec_of(write_folder(tmp_path / "model", "deepseek_v2", "bfloat16"))
    config = AsyncEngineArgs(**launch.arguments(spec, on_cpu=True)).create_engine_config()
    selected = AttentionSelectorConfig(
        head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=config.model_config.use_mla
    )
    backend = CpuPlatform.get_attn_backend_cls(config.attention_config.backend, selected)
    assert backend == AttentionBackendEnum.CPU_MLA.get_path()
    assert config.cache_config.block_size == 16  # the only one of that implementation

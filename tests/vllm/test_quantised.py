"""Engines with quantised weights, with an FP8 KV cache, and with both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adoptions import NUM_CHECKPOINTS, adopt_under_load, check, largest_difference
from engines import (
    DEADLINE_S,
    checkpoint,
    engine_driver,
    forward_logprobs,
    has_avx512,
    publisher_process,
    read_model,
    read_weights,
)
from quantised_checkpoints import dequantised
from test_architectures import random_model, sampled, write_folder

from starling.policy.train.metrics.tokens import mismatch
from starling.policy.train.model.load import version_tensors
from starling.rollout.engine.base import CacheMode, GroupResult
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, linear_weights
from starling.weightsync.tensors.modules import layout_of


def models_in(form: str, folders: list[Path], dtype: str) -> list[Any]:
    """Read checkpoints with their dequantised weights."""
    models = [read_model(folder) for folder in folders]
    for model, folder in zip(models, folders, strict=True):
        model.load_state_dict(dequantised(form, read_weights(folder, dtype)), strict=False)
    return models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    here = tmp_path_factory.mktemp("checkpoints")
    return [checkpoint(here / str(seed), "qwen3", seed) for seed in range(NUM_CHECKPOINTS)]


@pytest.mark.parametrize(
    ("form", "dtype", "tp", "in_place", "within"),
    [
        pytest.param("fp8_row", "float32", 2, False, 1e-4, marks=pytest.mark.campaign),
        ("mxfp4", "float32", 1, True, 1e-4),
        pytest.param("nvfp4", "bfloat16", 1, False, 0.25, marks=pytest.mark.campaign),
    ],
)
def test_adoptions_of_quantised_weights_under_load(
    form: str, dtype: str, tp: int, in_place: bool, within: float, folders: list[Path]
) -> None:
    options: dict[str, Any] = {"quantise": form, "dtype": dtype}
    with (
        publisher_process(folders, **options) as publisher,
        engine_driver(folders[0], **options, vllm={"tensor_parallel_size": tp}) as engine,
    ):
        outcome = adopt_under_load(engine, publisher, 7, "recompute", in_place=in_place)
    check(outcome, 6)
    right = largest_difference(outcome.results, models_in(form, folders, dtype))
    wrong = largest_difference(outcome.results, [read_model(folder) for folder in folders])
    assert right < within < wrong


@pytest.mark.parametrize(
    ("kind", "form", "tp"),
    [
        ("phi3", "fp8_row", 1),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("phi3", "mxfp4", 1),
                ("phi3", "fp8_row", 2),
                ("mistral", "mxfp8", 1),
                ("mistral", "fp8_row", 2),
                ("gemma3_text", "fp8_row", 2),
                ("olmo2", "fp8_row", 2),
                ("gpt_neox", "mxfp8", 1),
            )
        ),
    ],
)
def test_logprobs_of_quantised_architectures_equal_dequantised_weights(
    kind: str, form: str, tp: int, tmp_path: Path
) -> None:
    """Architectures without a table: of two versions in a row, against transformers with torchao's numbers."""
    folder = write_folder(tmp_path, kind)
    models = [random_model(folder, seed) for seed in range(2)]
    full = [dict(version_tensors(model)) for model in models]
    recipe = linear_weights(form, FUSED_BY_VLLM)
    with (
        Publisher(layout_of(full[0], "policy-0"), transport="tcp", quantise=recipe) as publisher,
        engine_driver(folder, quantise=form, vllm={"tensor_parallel_size": tp}, max_rows=4) as driver,
    ):
        plan = make_plan(publisher.layout, driver.engine.layout())
        for version, (model, weights) in enumerate(zip(models, full, strict=True)):
            snapshot = publisher.snapshot(version, weights, {"": plan})
            options: Any = {"deadline_s": DEADLINE_S, "cancelled": lambda: False, "progress": lambda _: None}
            driver.engine.pull(snapshot.offer(), plan, in_place=False, **options)
            report = driver.engine.adopt("recompute")
            assert report.proven
            assert report.layout_root == snapshot.layout_roots()[""]
            rows = sampled(driver, version)
            wrong = [np.abs(logprobs - forward_logprobs(model, prompt, ids)).max() for prompt, ids, logprobs in rows]
            model.load_state_dict(dequantised(form, weights), strict=False)
            right = [np.abs(logprobs - forward_logprobs(model, prompt, ids)).max() for prompt, ids, logprobs in rows]
            assert max(right) < 1e-4 < max(wrong)


@pytest.mark.skipif(
    not torch.cuda.is_available() and not has_avx512(),
    reason="this CPU has no AVX-512, which vLLM's cache in fp8 needs",
)
@pytest.mark.parametrize("form", [pytest.param("", marks=pytest.mark.campaign), "mxfp8"])
def test_fp8_cache_mismatch_is_bounded(form: str, folders: list[Path]) -> None:
    """The precision lost in the cache shows as a bounded mismatch, with quantised weights as without."""
    models = models_in(form, folders, "float32") if form else [read_model(folder) for folder in folders]
    found: dict[str, dict[str, float]] = {}
    with (
        publisher_process(folders, quantise=form) as publisher,
        engine_driver(folders[0], quantise=form, vllm={"kv_cache_dtype": "fp8"}) as engine,
    ):
        modes: tuple[tuple[int, CacheMode], ...] = ((0, "recompute"), (4, "keep"))
        for first, mode in modes:
            outcome = adopt_under_load(engine, publisher, 4, mode, first=first)
            check(outcome, first + 3)
            found[mode] = mismatch_of(outcome.results, models)
    assert all(np.isfinite(list(metrics.values())).all() for metrics in found.values())
    assert 1e-4 < found["recompute"]["mismatch_kl"] < 0.02 < found["keep"]["mismatch_kl"]


def mismatch_of(results: list[GroupResult], models: list[Any]) -> dict[str, float]:
    """Return the mismatch metrics that a policy would report for these tokens."""
    sampled_logprobs, expected = [], []
    for result in results:
        for completion in result.completions:
            sampled, kinds = completion.token_ids.tolist(), completion.versions % len(models)
            for kind in set(kinds.tolist()):
                logprobs = forward_logprobs(models[kind], result.prompt_ids.tolist(), sampled)
                expected.append(logprobs[kinds == kind])
                sampled_logprobs.append(completion.logprobs[kinds == kind])
    trainer = np.concatenate(expected)
    return mismatch(trainer, np.concatenate(sampled_logprobs), np.ones_like(trainer))

"""Steps in FP8 on a mesh, against a single process that computes in FP8, too."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from mesh_traffic import CountTraffic
from rank_processes import run_ranks
from small_steps import (
    MODELS,
    Array,
    Outcome,
    assert_close,
    make_examples,
    make_model,
    make_settings,
    make_steps,
    prepare,
)

from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import Mesh

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
"""Multiples of 16 on two ranks."""
TENSORWISE: dict[str, Any] = {"kind": "fp8_tensorwise"}
ROWWISE: dict[str, Any] = {"kind": "fp8_rowwise"}
WEIGHTS_HIGH: dict[str, Any] = {"kind": "fp8_rowwise_gw_hp"}
CODES: dict[str, Any] = TENSORWISE | {"fsdp_all_gather": True}
CHANGED = 0.1, 0.5
"""Bounds of the median relative difference of gradients in FP8 from those in float32."""
NEAR = 0.02
"""Most relative difference where products are divided: a tenth of that of FP8 from float32."""


@cache
def alone(name: str, step: str, kind: str) -> Outcome:
    """Return the outcome of a single process."""
    return make_steps(name, step, precision={"kind": kind}, **SIZES)


def outcomes_of_rank(
    _: int, name: str, step: str, parallel: dict[str, Any], precisions: list[dict[str, Any]]
) -> list[Outcome]:
    """Make steps in each precision, on one rank of a mesh."""
    return [make_steps(name, step, parallel, precision=precision, **SIZES) for precision in precisions]


def check(
    name: str,
    step: str,
    parallel: dict[str, Any],
    precisions: list[dict[str, Any]],
    tolerance: float,
    of_weights: float = 2e-6,
) -> None:
    """Compare every gradient and weight on every rank with those of a single process in the same precision."""
    for precision in precisions:
        alone(name, step, precision["kind"])  # imports what the forked ranks then have
    num_ranks = ParallelSettings(**parallel).num_ranks
    for found in run_ranks(num_ranks, outcomes_of_rank, name, step, parallel, precisions):
        for outcome, precision in zip(found, precisions, strict=True):
            expected = alone(name, step, precision["kind"])
            for values, correct, most in (
                (outcome.gradients, expected.gradients, tolerance),
                (outcome.weights, expected.weights, of_weights),
            ):
                assert_close(values, {one: correct[one] for one in values}, most)
            assert outcome.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=10 * tolerance, abs=1e-6)


def difference(found: dict[str, Array], exact: dict[str, Array]) -> float:
    """Return the median over the parameters of the relative difference of gradients."""
    return float(np.median([np.linalg.norm(found[name] - one) / np.linalg.norm(one) for name, one in exact.items()]))


def test_ranks_that_share_weights_compute_the_gradients_of_one_process() -> None:
    """To the rounding of float32: a microbatch is computed by one rank, so its scales are those of one process.

    Weights that are gathered as codes have the same codes, by the largest number on all ranks.
    """
    check("qwen3", "rl", {"dp_shard": 2}, [TENSORWISE, ROWWISE, CODES], 2e-6)
    for kind in ("fp8_tensorwise", "fp8_rowwise"):
        found = difference(alone("qwen3", "rl", kind).gradients, make_steps("qwen3", "rl", **SIZES).gradients)
        assert CHANGED[0] < found < CHANGED[1], kind


@pytest.mark.campaign
def test_ranks_that_divide_products_compute_gradients_near_those_of_one_process() -> None:
    """A sum in another order moves a few numbers to the next code."""
    check("qwen2", "rl", {"tp": 2}, [TENSORWISE, ROWWISE], NEAR, NEAR)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "step", "parallel", "precisions"),
    [
        ("qwen3_moe", "rl", {"tp": 2}, [TENSORWISE, ROWWISE]),
        ("qwen3-tied", "rl", {"dp_shard": 2, "tp": 2}, [CODES, ROWWISE]),
        ("qwen3", "rl", {"cp": 2}, [ROWWISE, WEIGHTS_HIGH]),
    ],
    ids=str,
)
def test_other_ranks_that_divide_products_compute_gradients_near_those_of_one_process(
    name: str, step: str, parallel: dict[str, Any], precisions: list[dict[str, Any]]
) -> None:
    """Ranks of cp have scales of their own tokens; powers of two are as exact, but for numbers near 0."""
    check(name, step, parallel, precisions, NEAR, NEAR)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "step", "parallel", "precisions"),
    [
        ("qwen3-tied", "rl", {"dp_replicate": 2, "dp_shard": 2}, [ROWWISE, CODES]),
        ("deep qwen3", "rl", {"pp": 2}, [TENSORWISE, ROWWISE]),
        ("deep qwen3", "dpo", {"pp": 2, "dp_shard": 2, "schedule": "zbv"}, [ROWWISE, CODES]),
        ("qwen3_moe", "rl", {"dp_shard": 2, "ep": 2}, [ROWWISE, CODES]),
        ("llama", "sft", {"dp_shard": 2, "reshard": "always"}, [WEIGHTS_HIGH, CODES]),
        ("qwen2", "rl", {"dp_shard": 2}, [{"kind": "mxfp8"}, {"kind": "mxfp4"}]),
    ],
    ids=str,
)
def test_meshes_that_divide_no_product_compute_the_gradients_of_one_process(
    name: str, step: str, parallel: dict[str, Any], precisions: list[dict[str, Any]]
) -> None:
    check(name, step, parallel, precisions, 6e-6)


@pytest.mark.campaign
def test_ranks_that_divide_tokens_are_as_exact_with_scales_of_tensors() -> None:
    """Their scales are those of their own tokens, so their codes are others."""
    exact, expected = make_steps("qwen3", "rl", **SIZES).gradients, alone("qwen3", "rl", "fp8_tensorwise").gradients
    for (found,) in run_ranks(2, outcomes_of_rank, "qwen3", "rl", {"cp": 2}, [CODES]):
        assert difference(found.gradients, exact) < 1.2 * difference(expected, exact)


def sent_of_rank(_: int, precision: dict[str, Any]) -> float:
    """Return the bytes that a rank sends along dp_shard in the second of two steps."""
    mesh, settings = Mesh(ParallelSettings(dp_shard=2)), make_settings(dp_shard=2, precision=precision)

    def load() -> Any:
        model = make_model(*MODELS["qwen3"], **SIZES)
        prepare(model, settings)
        return model

    learner = Learner(load, settings, mesh=mesh)
    learner.supervise(make_examples(seed=1), num_steps=2)
    with CountTraffic(mesh) as count:
        learner.supervise(make_examples(seed=2), num_steps=2)
    return float(count.sent["dp_shard"])


def test_codes_are_a_quarter_of_the_bytes_that_are_gathered() -> None:
    """In float32 a weight's two gathers and its gradient's reduction have equal bytes; codes are a quarter."""
    make_steps("qwen3", "sft", precision=TENSORWISE, **SIZES)
    whole, codes = (run_ranks(2, sent_of_rank, precision)[1] for precision in (TENSORWISE, CODES))
    assert 0.5 < codes / whole < 0.62  # other parameters are gathered in float32

"""Token metrics against their definitions and invariants."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starling.policy.train.metrics.step import WeightProbe, throughput
from starling.policy.train.metrics.tokens import OLDEST_BIN, effective_sample_size, mismatch, staleness_shares

LOGPROBS = st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0), st.booleans()), max_size=40)


@given(LOGPROBS)
def test_mismatch_equals_definition(rows: list[tuple[float, float, bool]]) -> None:
    """Over the fresh tokens only; k3 is never negative; the mean is at most the greatest."""
    trainer, rollout, fresh = (
        np.array(column, dtype=np.float64) for column in (zip(*rows, strict=True) if rows else [()] * 3)
    )
    found = mismatch(trainer, rollout, fresh)
    pairs = [(t, r) for t, r, chosen in rows if chosen]
    if not pairs:
        assert found == {}
        return
    assert math.isclose(found["mismatch_k1"], sum(r - t for t, r in pairs) / len(pairs), abs_tol=1e-9)
    k3 = sum(math.exp(t - r) - 1 - (t - r) for t, r in pairs) / len(pairs)
    assert math.isclose(found["mismatch_kl"], k3, rel_tol=1e-9, abs_tol=1e-9)
    assert found["mismatch_kl"] >= 0.0
    assert 0.0 <= found["mismatch_mean"] <= found["mismatch_max"] * (1 + 1e-12)


def test_mismatch_k3_estimates_divergence() -> None:
    """In expectation over the rollout's samples both estimators are KL(rollout || trainer), here exactly."""
    rollout, trainer = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    exact = float((rollout * np.log(rollout / trainer)).sum())
    drawn = np.repeat(np.arange(3), [7000, 2000, 1000])  # in exact proportion
    found = mismatch(np.log(trainer)[drawn], np.log(rollout)[drawn], np.ones(len(drawn)))
    assert math.isclose(found["mismatch_k1"], exact, rel_tol=1e-9)
    assert math.isclose(found["mismatch_kl"], exact, rel_tol=1e-9)


@given(st.lists(st.integers(0, 40), max_size=60))
def test_staleness_shares_sum_to_one(ages: list[int]) -> None:
    """Every age up to the maximum has its share, and none is lost beyond the last bin."""
    found = staleness_shares(np.array(ages, dtype=np.int64))
    if not ages:
        assert found == {}
        return
    assert list(found) == [f"staleness/{age}" for age in range(min(max(ages), OLDEST_BIN) + 1)]
    assert math.isclose(math.fsum(found.values()), 1.0)
    assert found["staleness/0"] == ages.count(0) / len(ages)


@given(st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=8), st.floats(-3, 3))
def test_effective_sample_size_is_between_0_and_1(ratios: list[list[float]], shift: float) -> None:
    """Between 1/N and 1, and the same when all weights are scaled alike."""
    lengths = [len(row) for row in ratios]
    flat = np.array([value for row in ratios for value in row])
    found = effective_sample_size(flat, np.zeros_like(flat), lengths)
    if not len(flat):
        assert found == {}
        return
    num_sequences = sum(length > 0 for length in lengths)
    assert 1 / len(flat) - 1e-9 <= found["ess_token"] <= 1 + 1e-9
    assert 1 / num_sequences - 1e-9 <= found["ess_sequence"] <= 1 + 1e-9
    shifted = effective_sample_size(flat + shift, np.zeros_like(flat), lengths)
    assert math.isclose(shifted["ess_token"], found["ess_token"], rel_tol=1e-6)


def test_effective_sample_size_equals_hand_computed_values() -> None:
    """Token weights 1, 2 and 3; completion weights 2 and 3, and an empty completion without one."""
    trainer = np.log([1.0, 2.0, 3.0])
    found = effective_sample_size(trainer, np.zeros(3), [2, 0, 1])
    assert math.isclose(found["ess_token"], 36 / (3 * 14))
    assert math.isclose(found["ess_sequence"], 25 / (2 * 13))
    assert math.isnan(effective_sample_size(np.array([np.nan, 0.0]), np.zeros(2), [2])["ess_token"])


def test_mismatch_extreme_ratios_do_not_overflow() -> None:
    """One token with all the weight; a sequence whose product overflows a float."""
    found = effective_sample_size(np.array([-1000.0, 0.0, 0.0, 0.0]), np.zeros(4) - [0, 1000, 1000, 0], [1, 3])
    assert math.isclose(found["ess_token"], 0.5)
    assert math.isclose(found["ess_sequence"], 0.5)


def test_throughput() -> None:
    """There is no rate if the clock did not advance."""
    assert throughput(30, 2.0) == {"tokens_per_s": 15.0}
    assert throughput(30, 0.0) == {}


def test_weight_probe_reads_small_tensors_whole() -> None:
    """The relative norm is then exact; integer tensors are left out."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in (("a", (20, 30)), ("b", (7,)))}
    tensors["ids"] = torch.arange(9)
    probe = WeightProbe(tensors)
    before, whole = probe.read(), torch.cat([tensors["a"].flatten(), tensors["b"]])
    tensors["a"][3] += 0.5
    found = probe.change(before)
    assert math.isclose(found["update_norm"], math.sqrt(30 * 0.25) / float(whole.norm()), rel_tol=1e-5)
    assert found["weights_changed_share"] == 30 / 607
    assert probe.change(probe.read()) == {"update_norm": 0.0, "weights_changed_share": 0.0}


def test_weight_probe_samples_large_tensors() -> None:
    """Each tensor counts by its size, not by its sample: the estimate is close to the value over all elements."""
    generator = torch.Generator().manual_seed(1)
    tensors = {"large": torch.randn(300, 400, generator=generator), "small": torch.randn(50, generator=generator)}
    probe = WeightProbe(tensors)
    before = probe.read()
    assert sum(len(part) for part in before.values()) <= 2 * 1024
    moves = {name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    exact = math.sqrt(
        sum(float(m.square().sum()) for m in moves.values()) / sum(float(t.square().sum()) for t in tensors.values())
    )
    for name, move in moves.items():
        tensors[name] += move
    assert probe.change(before)["update_norm"] == pytest.approx(exact, rel=0.1)


def test_weight_probe_detects_updates_lost_to_rounding() -> None:
    """The case that the alarm detects: an update of a thousandth leaves every weight unchanged."""
    weights = {"w": torch.ones(64, dtype=torch.bfloat16)}
    probe = WeightProbe(weights)
    before = probe.read()
    weights["w"].add_(1e-3)
    assert probe.change(before)["weights_changed_share"] == 0.0
    weights["w"].add_(1e-2)
    assert probe.change(before)["weights_changed_share"] == 1.0

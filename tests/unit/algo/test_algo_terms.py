"""Sums over completions: values, derivatives and bitwise determinism."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algo_batches import RAGGED, make_tokens

from starling.algo.loss.terms import MAX_LOG_RATIO, log_ratio, ratio_metrics, sequence_mean, sequence_sum


@pytest.mark.parametrize("lengths", RAGGED)
def test_sums_and_means_equal_a_loop_over_completions(lengths: list[int]) -> None:
    tokens = make_tokens(lengths, seed=1)
    values = tokens.logprobs.detach().tolist()
    sums, means, start = [], [], 0
    for length in lengths:
        total = math.fsum(values[start : start + length])
        sums += [total] * length
        means += [total / max(length, 1)] * length
        start += length
    assert sequence_sum(tokens.logprobs, tokens).tolist() == pytest.approx(sums, rel=1e-6)
    assert sequence_mean(tokens.logprobs, tokens).tolist() == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("lengths", RAGGED)
def test_derivatives_of_sums_and_means(lengths: list[int]) -> None:
    tokens = make_tokens(lengths, seed=2)
    factors = torch.linspace(-1.0, 2.0, sum(lengths))
    (by_sum,) = torch.autograd.grad((sequence_sum(tokens.logprobs, tokens) * factors).sum(), tokens.logprobs)
    (by_mean,) = torch.autograd.grad((sequence_mean(tokens.logprobs, tokens) * factors).sum(), tokens.logprobs)
    expected = torch.cat([part.double().sum().expand(len(part)) for part in factors.split(lengths)])
    counts = torch.cat([torch.full((length,), length) for length in lengths])
    torch.testing.assert_close(by_sum.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(by_mean.double(), expected / counts, rtol=1e-6, atol=1e-6)


def test_tokens_of_a_completion_need_not_stand_together() -> None:
    tokens = make_tokens([4, 2, 5], seed=3)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(4))
    mixed = replace(tokens, logprobs=tokens.logprobs[order], sequence=tokens.sequence[order])
    expected = sequence_mean(tokens.logprobs, tokens)[order]
    torch.testing.assert_close(sequence_mean(mixed.logprobs, mixed), expected)


def test_terms_that_cancel_keep_their_digits() -> None:
    tokens = make_tokens([3])
    values = torch.tensor([1e8, 1.0, -1e8])
    assert sequence_sum(values, tokens).tolist() == [1.0, 1.0, 1.0]


def test_sums_of_no_tokens_are_empty() -> None:
    tokens = make_tokens([0, 0])
    assert sequence_mean(tokens.logprobs, tokens).shape == (0,)


def test_extreme_ratio_is_clamped_without_a_derivative() -> None:
    new = torch.tensor([0.0, -500.0, -1.0], requires_grad=True)
    held = log_ratio(new, torch.tensor([-500.0, 0.0, -1.5]))
    held.sum().backward()
    assert held.tolist() == [MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.5]
    assert new.grad is not None
    assert new.grad.tolist() == [0.0, 0.0, 1.0]


def test_approx_kl_is_precise_for_nearly_equal_policies() -> None:
    metrics = ratio_metrics(torch.tensor([1e-3, 0.0, -2.0]))
    expected = [math.expm1(x) - x for x in (1e-3, 0.0, -2.0)]
    assert metrics["approx_kl"].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-12)
    assert metrics["ratio_max"].tolist() == pytest.approx([math.exp(x) for x in (1e-3, 0.0, -2.0)])

"""Losses and their gradients against loops over tokens in double precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.grpo import grpo_loss
from starling.algo.loss.kl import kl_k3
from starling.algo.loss.sft import sft_loss

torch.set_num_threads(1)

SHAPES = [(1,), (7,), (3, 5), (16, 33)]


def tokens(shape: tuple[int, ...], seed: int, spread: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3.0 * torch.rand(shape, generator=generator)
    new = old + spread * torch.randn(shape, generator=generator)
    advantages = torch.randn(shape, generator=generator)
    return new.requires_grad_(), old, advantages


def reference_grpo(new: float, old: float, advantage: float, low: float, high: float) -> tuple[float, float, bool]:
    """One token's loss, its derivative by `new`, and whether the clipped branch decides."""
    ratio = math.exp(new - old)
    bounded = min(max(ratio, 1.0 - low), 1.0 + high)
    if bounded * advantage < ratio * advantage:
        return -bounded * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1.0, 5.0), (0.01, 0.01)])
def test_grpo_equals_a_loop_over_tokens(shape: tuple[int, ...], low: float, high: float) -> None:
    new, old, advantages = tokens(shape, seed=len(shape))
    terms = grpo_loss(new, old, advantages, clip_low=low, clip_high=high)
    terms.loss.sum().backward()
    assert new.grad is not None
    rows = zip(
        *(
            tensor.flatten().tolist()
            for tensor in (new, old, advantages, terms.loss, new.grad, terms.clipped, terms.ratio, terms.approx_kl)
        ),
        strict=True,
    )
    for n, o, a, loss, gradient, clipped, ratio, kl in rows:
        expected_loss, expected_gradient, expected_clipped = reference_grpo(n, o, a, low, high)
        assert loss == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx(expected_gradient, rel=1e-6, abs=1e-6)
        assert clipped == expected_clipped
        assert ratio == pytest.approx(math.exp(n - o), rel=1e-6)
        assert kl == pytest.approx(math.exp(n - o) - 1.0 - (n - o), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_grpo_equals_the_published_formula_of_trl(shape: tuple[int, ...]) -> None:
    new, old, advantages = tokens(shape, seed=11)
    theirs = new.detach().clone().requires_grad_()
    coefficient = torch.exp(theirs - old)
    bounded = torch.clamp(coefficient, 1 - 0.2, 1 + 0.28)
    expected = -torch.min(coefficient * advantages, bounded * advantages)
    expected.sum().backward()
    loss = grpo_loss(new, old, advantages, clip_low=0.2, clip_high=0.28).loss
    loss.sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(new.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_grpo_on_policy_has_the_gradient_of_reinforce() -> None:
    new, _, advantages = tokens((9,), seed=3)
    terms = grpo_loss(new, new.detach().clone(), advantages)
    terms.loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)
    assert not terms.clipped.any()
    assert terms.approx_kl.abs().max() == 0.0


def test_an_absurd_token_stays_finite() -> None:
    new = torch.tensor([0.0, -500.0], requires_grad=True)
    terms = grpo_loss(new, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all()
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_k3_equals_a_loop_over_tokens(shape: tuple[int, ...]) -> None:
    new, reference, _ = tokens(shape, seed=5)
    kl = kl_k3(new, reference)
    kl.sum().backward()
    assert new.grad is not None
    rows = zip(*(t.flatten().tolist() for t in (new, reference, kl, new.grad)), strict=True)
    for n, r, value, gradient in rows:
        assert value == pytest.approx(math.exp(r - n) - (r - n) - 1.0, rel=1e-6, abs=1e-6)
        assert gradient == pytest.approx(1.0 - math.exp(r - n), rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.05, 1.0), min_size=2, max_size=6), st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6))
def test_k3_is_an_unbiased_estimate_that_is_never_negative(p: list[float], q: list[float]) -> None:
    trained = torch.tensor(p, dtype=torch.float64)
    reference = torch.tensor(q[: len(p)], dtype=torch.float64)
    trained, reference = trained / trained.sum(), reference / reference.sum()
    estimates = kl_k3(trained.log(), reference.log())
    exact = (trained * (trained.log() - reference.log())).sum()
    assert (estimates >= -1e-12).all()
    torch.testing.assert_close((trained * estimates).sum(), exact)


def test_sft_is_the_cross_entropy() -> None:
    logits = torch.randn(12, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(12) % 9
    theirs = logits.detach().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(theirs, targets)
    expected.backward()
    loss = token_mean(sft_loss(logits.log_softmax(-1).gather(-1, targets[:, None])), 12)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_the_parts_of_unequal_microbatches_add_up_to_the_mean() -> None:
    losses = torch.randn(10, generator=torch.Generator().manual_seed(1))
    parts = [token_mean(part, 10) for part in losses.split([1, 6, 3])]
    torch.testing.assert_close(torch.stack(parts).sum(), losses.mean(), rtol=1e-6, atol=1e-6)


def test_a_step_without_tokens_has_no_mean() -> None:
    with pytest.raises(ValueError, match="num_tokens is 0"):
        token_mean(torch.zeros(0), 0)

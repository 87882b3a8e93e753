"""Divergences and entropies: estimates compared with loops, and their expected gradients over a whole vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algo_batches import RAGGED, gradient, make_tokens
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

from starling.algo.loss.regularisers import KlKind, entropy_bonus, kl_loss
from starling.algo.loss.terms import LossTerms, Tokens

KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3", "unbiased")


def reference(kind: KlKind, new: float, rollout: float, q: float) -> tuple[float, float]:
    """Return one token's estimate and its derivative with respect to `new`."""
    d = new - q
    k3 = math.exp(-d) - 1.0 + d
    match kind:
        case "k1":
            return d, 1.0
        case "k2":
            return 0.5 * d * d, d
        case "k3":
            return k3, 1.0 - math.exp(-d)
        case "unbiased":
            ratio = math.exp(new - rollout)
            return ratio * k3, ratio * (k3 + 1.0 - math.exp(-d))


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("kind", KINDS)
def test_estimates_equal_a_loop_over_tokens(kind: KlKind, lengths: list[int]) -> None:
    tokens = make_tokens(lengths, seed=5)
    q = tokens.old_logprobs - 0.1
    terms = kl_loss(tokens, q, kind=kind)
    columns = (tokens.logprobs.tolist(), tokens.rollout_logprobs.tolist(), q.tolist())
    expected = [reference(kind, *numbers) for numbers in zip(*columns, strict=True)]
    assert terms.loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-6, abs=1e-6)
    assert gradient(terms, tokens).tolist() == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-6)
    k3 = [reference("k3", *numbers)[0] for numbers in zip(*columns, strict=True)]
    assert terms.metrics["kl_reference"].tolist() == pytest.approx(k3, rel=1e-6, abs=1e-6)


LOGITS = st.lists(st.floats(-2.0, 2.0), min_size=4, max_size=4)


def whole_vocabulary(logits: Tensor, sampler: Tensor) -> Tokens:
    """Return every token of the vocabulary once, so that expectations under `sampler` are exact sums."""
    logprobs = logits.log_softmax(-1)
    zeros = torch.zeros(4, dtype=torch.float64)
    sequence = torch.zeros(4, dtype=torch.int64)
    return Tokens(logprobs, logprobs.detach(), sampler.log_softmax(-1), zeros, sequence, 1)


def slope_of(total: Tensor, logits: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(total, logits, retain_graph=True)
    return slope


@examples(40)
@given(LOGITS, LOGITS, LOGITS)
def test_expected_gradients_of_the_estimates(p: list[float], q: list[float], sampler: list[float]) -> None:
    logits = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    q_logs = torch.tensor(q, dtype=torch.float64).log_softmax(-1)
    chances, logs = logits.softmax(-1), logits.log_softmax(-1)
    forwards = slope_of((chances * (logs - q_logs)).sum(), logits)
    backwards = slope_of((q_logs.exp() * (q_logs - logs)).sum(), logits)
    nothing = torch.zeros_like(forwards)

    def average(kind: KlKind, drawn_by: Tensor) -> tuple[Tensor, Tensor]:
        terms = kl_loss(whole_vocabulary(logits, drawn_by), q_logs, kind=kind)
        mean = (drawn_by.softmax(-1) * terms.loss).sum()
        return mean.detach(), slope_of(mean, logits)

    own, other = logits.detach(), torch.tensor(sampler, dtype=torch.float64)
    exact = (chances * (logs - q_logs)).sum().detach()
    close = torch.testing.assert_close
    for kind in ("k1", "k3", "unbiased"):
        close(average(kind, own)[0], exact, rtol=1e-9, atol=1e-12)
    close(average("k1", own)[1], nothing, rtol=0.0, atol=1e-12)
    close(average("k2", own)[1], forwards, rtol=1e-9, atol=1e-12)
    close(average("k3", own)[1], backwards, rtol=1e-9, atol=1e-12)
    # This estimate is unbiased in value and gradient for any sampler.
    close(average("unbiased", other)[0], exact, rtol=1e-9, atol=1e-12)
    close(average("unbiased", other)[1], forwards, rtol=1e-9, atol=1e-12)


@examples(40)
@given(LOGITS)
def test_entropy_bonus_has_the_gradient_of_the_entropy(p: list[float]) -> None:
    logits = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    terms = entropy_bonus(entropy[None])
    torch.testing.assert_close(slope_of(terms.loss.sum(), logits), -slope_of(entropy, logits))
    torch.testing.assert_close(terms.metrics["entropy"], entropy.detach()[None])


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_ratios_stay_finite(kind: KlKind) -> None:
    tokens = replace(
        make_tokens([2]),
        logprobs=torch.tensor([0.0, -500.0], requires_grad=True),
        rollout_logprobs=torch.tensor([-500.0, 0.0]),
    )
    terms: LossTerms = kl_loss(tokens, torch.tensor([-500.0, 0.0]), kind=kind)
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(gradient(terms, tokens)).all()


def test_unknown_kind_is_rejected() -> None:
    tokens = make_tokens([1])
    with pytest.raises(ValueError, match="kind is 'k4': the estimates are k1, k2, k3 and unbiased"):
        kl_loss(tokens, tokens.old_logprobs, kind="k4")  # type: ignore[arg-type]

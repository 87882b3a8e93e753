"""Distillation, compared with loops in double precision and with published numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from algo_batches import RAGGED, make_tokens
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.algo.loss.distill import generalised_jsd, reverse_kl_advantages


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_advantages_equal_a_sum_over_the_following_tokens(lengths: list[int], discount: float) -> None:
    tokens = make_tokens(lengths, seed=4)
    actual = reverse_kl_advantages(tokens.rollout_logprobs, tokens.old_logprobs, tokens.sequence, discount=discount)
    student, teacher = tokens.rollout_logprobs.tolist(), tokens.old_logprobs.tolist()
    expected, start = [], 0
    for length in lengths:
        gains = [t - s for s, t in zip(student[start : start + length], teacher[start : start + length], strict=True)]
        for position in range(length):
            later = gains[position:]
            expected.append(math.fsum(discount**k * gain for k, gain in enumerate(later)))
        start += length
    assert actual.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def outcomes(logprobs: list[float]) -> list[float]:
    chances = [math.exp(x) for x in logprobs]
    return [*chances, max(0.0, 1.0 - math.fsum(chances))]


def divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0.0)


def reference_jsd(student: list[float], teacher: list[float], beta: float) -> float:
    s, t = outcomes(student), outcomes(teacher)
    if beta in (0.0, 1.0):
        return divergence(t, s) if beta == 0.0 else divergence(s, t)
    mixture = [beta * a + (1.0 - beta) * b for a, b in zip(t, s, strict=True)]
    return beta * divergence(t, mixture) + (1.0 - beta) * divergence(s, mixture)


def distributions(seed: int, num_tokens: int, kept: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a student's logits and a teacher's log-probabilities, in descending order of the teacher's."""
    generator = torch.Generator().manual_seed(seed)
    student = 2.0 * torch.randn(num_tokens, vocabulary, generator=generator)
    teacher = (2.0 * torch.randn(num_tokens, vocabulary, generator=generator)).log_softmax(-1)
    order = teacher.argsort(dim=-1, descending=True)
    return student.gather(-1, order).requires_grad_(), teacher.gather(-1, order)[:, :kept]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kept", [1, 4, 9])
def test_jsd_with_the_rest_as_one_outcome_equals_a_loop(beta: float, kept: int) -> None:
    logits, teacher = distributions(5, 6, kept, 12)
    terms = generalised_jsd(logits.log_softmax(-1)[:, :kept], teacher, beta=beta)
    student = logits.detach().double().log_softmax(-1)[:, :kept].tolist()
    rows = teacher.double().tolist()
    expected = [reference_jsd(s, t, beta) for s, t in zip(student, rows, strict=True)]
    assert terms.loss.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert terms.metrics["teacher_tail"].tolist() == pytest.approx([outcomes(t)[-1] for t in rows], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_gradient_equals_finite_differences(beta: float) -> None:
    logits, teacher = distributions(6, 3, 4, 7)
    (slope,) = torch.autograd.grad(
        generalised_jsd(logits.log_softmax(-1)[:, :4], teacher, beta=beta).loss.sum(), logits
    )
    base = logits.detach().double()
    for token in range(3):
        for position in range(7):
            values = []
            for sign in (1.0, -1.0):
                moved = base[token].clone()
                moved[position] += sign * 1e-5
                values.append(reference_jsd(moved.log_softmax(-1)[:4].tolist(), teacher[token].double().tolist(), beta))
            assert float(slope[token, position]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_jsd_in_float32_equals_autograd_in_double_precision(beta: float) -> None:
    """The reference is the definition in probabilities; the tolerance is 1e-6."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(6, 12, generator=generator).log_softmax(-1)[:, :7] for _ in range(2))
    mine, exact = student.clone().requires_grad_(), student.double().requires_grad_()
    p, q = teacher.double().exp(), exact.exp()
    p, q = (torch.cat([chances, 1.0 - chances.sum(-1, keepdim=True)], dim=-1) for chances in (p, q))
    mixed = beta * p + (1.0 - beta) * q
    if beta in (0.0, 1.0):
        over, under = (p, q) if beta == 0.0 else (q, p)
        expected = (over * (over / under).log()).sum(-1)
    else:
        expected = beta * (p * (p / mixed).log()).sum(-1) + (1.0 - beta) * (q * (q / mixed).log()).sum(-1)
    loss = generalised_jsd(mine, teacher, beta=beta).loss
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    loss.sum().backward()
    expected.sum().backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)


@examples(30)
@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_jsd_with_more_tokens_approaches_the_divergence_from_below(seed: int, beta: float) -> None:
    logits, teacher = distributions(seed, 2, 8, 8)
    losses = []
    for kept in (1, 3, 6, 8):
        student = logits.detach().double().log_softmax(-1)
        losses.append(generalised_jsd(student[:, :kept], teacher.double()[:, :kept], beta=beta).loss)
    for fewer, more in itertools.pairwise(losses):
        assert (fewer >= -1e-9).all()
        assert (fewer <= more + 1e-6).all()


def test_jsd_of_equal_models_is_zero() -> None:
    logits, _ = distributions(7, 4, 5, 9)
    student = logits.log_softmax(-1)[:, :5]
    for beta in (0.0, 0.5, 1.0):
        assert generalised_jsd(student, student.detach(), beta=beta).loss.abs().max() < 1e-6


def test_options_out_of_range_are_rejected() -> None:
    tokens = make_tokens([2])
    with pytest.raises(ValueError, match=r"discount is 1\.5"):
        reverse_kl_advantages(tokens.old_logprobs, tokens.rollout_logprobs, tokens.sequence, discount=1.5)
    with pytest.raises(ValueError, match=r"beta is -0\.1"):
        generalised_jsd(torch.zeros(1, 1), torch.zeros(1, 1), beta=-0.1)


# The numbers were computed once by running `GKDTrainer.generalized_jsd_loss` of TRL 1.16 in double precision.
@pytest.mark.parametrize(
    ("beta", "value", "slopes"),
    [
        (
            0.0,
            0.463483611,
            [
                [0.258421587, -0.201949699, 0.046215630, -0.102687518],
                [-0.170007556, -0.073847871, 0.163515677, 0.080339750],
            ],
        ),
        (
            0.3,
            0.089361879,
            [
                [0.053154251, -0.040124845, 0.009056960, -0.022086365],
                [-0.022892655, -0.016725336, 0.022487187, 0.017130803],
            ],
        ),
        (
            0.5,
            0.103592605,
            [
                [0.063316803, -0.046804957, 0.010373780, -0.026885626],
                [-0.022921799, -0.020295989, 0.021402172, 0.021815615],
            ],
        ),
        (
            1.0,
            0.413310210,
            [
                [0.267870977, -0.187949657, 0.037898218, -0.117819537],
                [-0.070408442, -0.086510212, 0.032945579, 0.123973076],
            ],
        ),
    ],
)
def test_jsd_over_the_whole_vocabulary_equals_trl(beta: float, value: float, slopes: list[list[float]]) -> None:
    student = torch.tensor([[1.0, 0.2, -0.5, 0.0], [-1.0, 0.3, 2.0, 0.1]], requires_grad=True)
    teacher = torch.tensor([[0.3, 0.9, -1.0, 0.5], [0.0, 0.0, 1.0, -2.0]])
    total = generalised_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta=beta).loss.sum()
    assert float(total.detach()) == pytest.approx(value, rel=1e-5)
    (slope,) = torch.autograd.grad(total, student)
    torch.testing.assert_close(slope, torch.tensor(slopes), rtol=1e-5, atol=1e-6)

"""Losses over pairs, compared with double-precision formulas and published numbers, and their invariants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.algo.loss.preference import Pairs, bradley_terry, dpo, ipo
from starling.algo.loss.terms import LossTerms


def make_pairs(num_pairs: int, seed: int, *, reference: bool) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return -20.0 * torch.rand(num_pairs, generator=generator)

    return Pairs(
        chosen=draw().requires_grad_(),
        rejected=draw().requires_grad_(),
        chosen_tokens=torch.randint(1, 30, (num_pairs,), generator=generator),
        rejected_tokens=torch.randint(1, 30, (num_pairs,), generator=generator),
        reference_chosen=draw() if reference else None,
        reference_rejected=draw() if reference else None,
    )


def table(pairs: Pairs) -> list[tuple[float, float, int, int]]:
    """Return for each pair, in double precision, log-ratio and tokens of the chosen and of the rejected completion."""
    zero = torch.zeros_like(pairs.chosen)
    q_chosen = zero if pairs.reference_chosen is None else pairs.reference_chosen
    q_rejected = zero if pairs.reference_rejected is None else pairs.reference_rejected
    columns = (pairs.chosen, q_chosen, pairs.rejected, q_rejected, pairs.chosen_tokens, pairs.rejected_tokens)
    return [(c - qc, r - qr, m, n) for c, qc, r, qr, m, n in zip(*(x.tolist() for x in columns), strict=True)]


def slopes(terms: LossTerms, pairs: Pairs) -> tuple[list[float], list[float]]:
    chosen, rejected = torch.autograd.grad(terms.loss.sum(), [pairs.chosen, pairs.rejected])
    return chosen.tolist(), rejected.tolist()


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.0), (0.1, 0.2)])
def test_dpo_equals_its_formula(reference: bool, beta: float, smoothing: float) -> None:
    pairs = make_pairs(9, seed=1, reference=reference)
    terms = dpo(pairs, beta=beta, label_smoothing=smoothing)
    values, by_chosen = [], []
    for chosen, rejected, _, _ in table(pairs):
        p = sigmoid(beta * (chosen - rejected))
        values.append(-(1.0 - smoothing) * math.log(p) - smoothing * math.log(1.0 - p))
        by_chosen.append(-beta * ((1.0 - smoothing) * (1.0 - p) - smoothing * p))
    assert terms.loss.tolist() == pytest.approx(values, rel=2e-6, abs=1e-6)
    chosen_slopes, rejected_slopes = slopes(terms, pairs)
    assert chosen_slopes == pytest.approx(by_chosen, rel=2e-6, abs=1e-6)
    assert rejected_slopes == pytest.approx([-slope for slope in by_chosen], rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("reference", [True, False])
def test_ipo_equals_its_formula(reference: bool) -> None:
    pairs = make_pairs(9, seed=2, reference=reference)
    terms = ipo(pairs, beta=0.2)
    values, by_chosen, by_rejected = [], [], []
    for chosen, rejected, m, n in table(pairs):
        miss = chosen / m - rejected / n - 2.5
        values.append(miss * miss)
        by_chosen.append(2.0 * miss / m)
        by_rejected.append(-2.0 * miss / n)
    assert terms.loss.tolist() == pytest.approx(values, rel=2e-6, abs=1e-6)
    chosen_slopes, rejected_slopes = slopes(terms, pairs)
    assert chosen_slopes == pytest.approx(by_chosen, rel=2e-6, abs=1e-6)
    assert rejected_slopes == pytest.approx(by_rejected, rel=2e-6, abs=1e-6)


@examples(30)
@given(st.integers(0, 1000), st.booleans())
def test_wrong_order_costs_more_and_shows_in_metrics(seed: int, reference: bool) -> None:
    pairs = make_pairs(5, seed, reference=reference)
    swapped = replace(
        pairs,
        chosen=pairs.rejected,
        rejected=pairs.chosen,
        reference_chosen=pairs.reference_rejected,
        reference_rejected=pairs.reference_chosen,
    )
    terms, other = dpo(pairs), dpo(swapped)
    right = terms.metrics["accuracy"].bool()
    assert torch.equal(right, terms.metrics["reward_margin"] > 0)
    assert torch.equal(right, ~other.metrics["accuracy"].bool())
    assert torch.equal(right, terms.loss < other.loss)
    margin = terms.metrics["reward_chosen"] - terms.metrics["reward_rejected"]
    torch.testing.assert_close(margin, terms.metrics["reward_margin"])


def test_reference_model_has_no_margin() -> None:
    pairs = make_pairs(4, seed=3, reference=False)
    same = replace(pairs, reference_chosen=pairs.chosen.detach(), reference_rejected=pairs.rejected.detach())
    assert dpo(same).loss.tolist() == pytest.approx([math.log(2.0)] * 4)
    assert dpo(same).metrics["accuracy"].tolist() == [0.0] * 4


def test_bradley_terry_equals_its_formula() -> None:
    chosen = torch.tensor([0.3, -2.0, 40.0], requires_grad=True)
    rejected = torch.tensor([1.0, -2.0, -60.0], requires_grad=True)
    terms = bradley_terry(chosen, rejected, center=0.1)
    logits = [0.3 - 1.0, 0.0, 100.0]
    sums = [1.3, -4.0, -20.0]
    values = [math.log1p(math.exp(-x)) + 0.1 * s * s for x, s in zip(logits, sums, strict=True)]
    assert terms.loss.tolist() == pytest.approx(values, rel=1e-6)
    by_chosen, by_rejected = torch.autograd.grad(terms.loss.sum(), [chosen, rejected])
    pulls = [sigmoid(x) - 1.0 for x in logits]
    centring = [0.2 * x for x in sums]
    assert by_chosen.tolist() == pytest.approx([c + p for p, c in zip(pulls, centring, strict=True)], rel=1e-6)
    assert by_rejected.tolist() == pytest.approx([c - p for p, c in zip(pulls, centring, strict=True)], rel=1e-6)
    assert terms.metrics["accuracy"].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda pairs: dpo(pairs, beta=0.0), "beta is 0.0"),
        (lambda pairs: dpo(pairs, label_smoothing=0.5), "label_smoothing is 0.5"),
        (lambda pairs: ipo(pairs, beta=-1.0), "beta is -1.0"),
        (lambda pairs: bradley_terry(pairs.chosen, pairs.rejected, center=-0.1), "center is -0.1"),
        (lambda pairs: replace(pairs, reference_chosen=pairs.chosen), "one side only"),
    ],
)
def test_options_out_of_range_are_rejected(call: Callable[[Pairs], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(make_pairs(1, seed=0, reference=False))


# The numbers were computed once by running the code of TRL 1.16 (`DPOTrainer`, `RewardTrainer`) on these inputs.
@pytest.mark.parametrize(
    ("loss", "value", "slopes"),
    [
        pytest.param(dpo, 0.567673970, [-0.067153814, -0.062736093, 0.067153814, 0.062736093], id="TRL sigmoid"),
        pytest.param(ipo, 1.750868056, [-0.466666667, -1.241666667, 0.7, 0.310416667], id="TRL ipo"),
    ],
)
def test_preference_losses_equal_trl(loss: Callable[..., LossTerms], value: float, slopes: list[float]) -> None:
    chosen = torch.tensor([-3.1, -0.7], requires_grad=True)
    rejected = torch.tensor([-2.4, -5.0], requires_grad=True)
    pairs = Pairs(
        chosen=chosen,
        rejected=rejected,
        chosen_tokens=torch.tensor([3, 1]),
        rejected_tokens=torch.tensor([2, 4]),
        reference_chosen=torch.tensor([-3.6, -0.9]),
        reference_rejected=torch.tensor([-2.2, -4.1]),
    )
    mean = loss(pairs, beta=0.3).loss.mean()
    assert float(mean.detach()) == pytest.approx(value, rel=1e-6)
    assert torch.cat(torch.autograd.grad(mean, [chosen, rejected])).tolist() == pytest.approx(slopes, rel=1e-5)


def test_reward_model_loss_with_centering_equals_trl() -> None:
    chosen = torch.tensor([1.2, -0.3], requires_grad=True)
    rejected = torch.tensor([0.4, 0.5], requires_grad=True)
    mean = bradley_terry(chosen, rejected, center=0.01).loss.mean()
    assert float(mean.detach()) == pytest.approx(0.784100666, rel=1e-6)
    slopes = torch.cat(torch.autograd.grad(mean, [chosen, rejected])).tolist()
    assert slopes == pytest.approx([-0.139012759, -0.342987241, 0.171012759, 0.346987241], rel=1e-6)

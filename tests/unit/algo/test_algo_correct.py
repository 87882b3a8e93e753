"""Off-policy corrections, compared with loops over completions, and their invariants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from algo_batches import RAGGED, gradient, make_tokens, on_policy, rows
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.algo.algorithm import Correction
from starling.algo.loss.correct import correct
from starling.algo.loss.ppo import ppo_clip

CORRECTIONS = [
    Correction("truncate", "token", high=1.1),
    Correction("truncate", "sequence", high=1.5),
    Correction("truncate", "geometric", high=1.05),
    Correction("mask", "token", low=0.8, high=1.3),
    Correction("mask", "sequence", low=0.5, high=3.0),
    Correction("mask", "geometric", low=0.95, high=1.05),
    Correction("sequence_mask", high=0.05),
]


def reference(row: list[tuple[float, float, float, float]], correction: Correction) -> list[tuple[float, float]]:
    """Return the factor of each token of a completion, and whether the bound determines it."""
    if correction.kind == "sequence_mask":
        drift = math.fsum(rollout - new for new, _, rollout, _ in row) / max(len(row), 1)
        out = [advantage < 0.0 and drift > correction.high for *_, advantage in row]
        return [(0.0 if masked else 1.0, float(masked)) for masked in out]
    logs = [old - rollout for _, old, rollout, _ in row]
    if correction.level != "token":
        total = math.fsum(logs) / (len(logs) if correction.level == "geometric" and logs else 1)
        logs = [total] * len(logs)
    result = []
    for log in logs:
        weight = math.exp(max(-20.0, min(20.0, log)))
        if correction.kind == "truncate":
            result.append((min(weight, correction.high), float(weight > correction.high)))
        else:
            kept = correction.low <= weight <= correction.high
            result.append((weight if kept else 0.0, float(not kept)))
    return result


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.kind}-{c.level}")
@pytest.mark.parametrize("lengths", RAGGED)
def test_factors_equal_a_loop_over_completions(lengths: list[int], correction: Correction) -> None:
    tokens = make_tokens(lengths, seed=12)
    factor, metrics = correct(tokens, [correction])
    expected = [numbers for row in rows(tokens) for numbers in reference(row, correction)]
    assert factor.tolist() == pytest.approx([value for value, _ in expected], rel=2e-6)
    assert not factor.requires_grad
    (fraction,) = (value for name, value in metrics.items() if name.endswith("_fraction"))
    assert fraction.tolist() == [decided for _, decided in expected]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.kind}-{c.level}")
def test_every_bound_applies_to_some_tokens_of_the_cases(correction: Correction) -> None:
    batches = [make_tokens(lengths, seed=12) for lengths in RAGGED]
    decided = [d for tokens in batches for row in rows(tokens) for _, d in reference(row, correction)]
    assert 0.0 < sum(decided) < len(decided)


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


@examples(40)
@given(LENGTHS, st.integers(0, 1000), st.sampled_from(CORRECTIONS))
def test_on_policy_tokens_are_not_corrected(lengths: list[int], seed: int, correction: Correction) -> None:
    factor, metrics = correct(on_policy(make_tokens(lengths, seed)), [correction])
    assert factor.tolist() == [1.0] * sum(lengths)
    assert all(value.max() == 0.0 for name, value in metrics.items() if name.endswith("_fraction"))


@examples(40)
@given(LENGTHS, st.integers(0, 1000), st.lists(st.sampled_from(CORRECTIONS), max_size=3))
def test_corrections_multiply(lengths: list[int], seed: int, several: list[Correction]) -> None:
    tokens = make_tokens(lengths, seed)
    product = torch.ones(sum(lengths))
    for correction in several:
        product = product * correct(tokens, [correction])[0]
    assert torch.equal(correct(tokens, several)[0], product)


@examples(20)
@given(LENGTHS, st.integers(0, 1000))
def test_unbounded_completion_weight_is_the_product_of_token_weights(lengths: list[int], seed: int) -> None:
    tokens = make_tokens(lengths, seed)
    whole, _ = correct(tokens, [Correction("truncate", "sequence", high=1e9)])
    each, _ = correct(tokens, [Correction("truncate", "token", high=1e9)])
    for index in range(len(lengths)):
        own = tokens.sequence == index
        if own.any():
            assert whole[own].tolist() == pytest.approx([float(each[own].double().prod())] * int(own.sum()), rel=1e-5)


def test_masked_completion_has_no_gradient_and_others_are_unchanged() -> None:
    tokens = make_tokens([3, 2])
    stale = replace(
        tokens,
        rollout_logprobs=tokens.logprobs.detach() + torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0]),
        old_logprobs=tokens.logprobs.detach().clone(),
        advantages=torch.full((5,), -1.0),
    )
    factor, metrics = correct(stale, [Correction("sequence_mask", high=0.2)])
    assert gradient(ppo_clip(stale), stale, factor).tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0, 1.0])
    assert metrics["sequence_mask_fraction"].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    raised, _ = correct(replace(stale, advantages=-stale.advantages), [Correction("sequence_mask", high=0.2)])
    assert raised.tolist() == [1.0] * 5


def test_decoupled_ppo_equals_ppo_on_the_proximal_policy_times_a_bounded_weight() -> None:
    """Equation 5 of arXiv:2505.24298 in double precision, tokens above the cap dropped."""
    tokens = make_tokens([4, 1, 20], seed=9)
    factor, _ = correct(tokens, [Correction("mask", high=1.25)])
    terms = ppo_clip(tokens)
    values, slopes = [], []
    for new, proximal, rollout, advantage in (row for completion in rows(tokens) for row in completion):
        weight = math.exp(proximal - rollout)
        weight = weight if weight <= 1.25 else 0.0
        ratio = math.exp(new - proximal)
        bounded = min(max(ratio, 0.8), 1.2)
        values.append(-weight * min(ratio * advantage, bounded * advantage))
        slopes.append(-weight * ratio * advantage if ratio * advantage <= bounded * advantage else 0.0)
    assert (terms.loss * factor).tolist() == pytest.approx(values, rel=1e-6, abs=1e-6)
    assert gradient(terms, tokens, factor).tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-6)
    assert values.count(0.0) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kind": "mask", "low": 2.0, "high": 1.0}, r"low is 2\.0 and high 1\.0: give 0 <= low <= high"),
        ({"kind": "truncate", "high": math.inf}, "high inf"),
        ({"kind": "truncate", "low": 0.5}, r"low is 0\.5: a correction of the kind truncate has no lower bound"),
    ],
)
def test_bounds_out_of_range_are_rejected(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Correction(**arguments)  # type: ignore[arg-type]

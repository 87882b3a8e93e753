"""Policy losses: values and gradients compared with loops in double precision, and their invariants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from algo_batches import RAGGED, gradient, make_tokens, on_policy, rows
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.algo.loss.aggregate import token_weights
from starling.algo.loss.aipo import aipo
from starling.algo.loss.cispo import cispo
from starling.algo.loss.gspo import gspo
from starling.algo.loss.ppo import ppo_clip
from starling.algo.loss.regularisers import positive_nll
from starling.algo.loss.reinforce import reinforce
from starling.algo.loss.sequence_clip import sequence_clip
from starling.algo.loss.terms import LossTerms, Tokens

Row = list[tuple[float, float, float, float]]
Numbers = list[tuple[float, float, float]]
"""Loss, its derivative with respect to the token's log-probability, and whether the token counts as clipped."""


def reference_ppo(row: Row, low: float, high: float, dual: float) -> Numbers:
    result = []
    for new, old, _, advantage in row:
        ratio = math.exp(new - old)
        if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
            bound = 1 + high if advantage > 0 else 1 - low
            result.append((-bound * advantage, 0.0, 1.0))
        elif dual and advantage < 0 and ratio > dual:
            result.append((-dual * advantage, 0.0, 0.0))
        else:
            result.append((-ratio * advantage, -ratio * advantage, 0.0))
    return result


def reference_gspo(row: Row, low: float, high: float) -> Numbers:
    if not row:
        return []
    ratio = math.exp(math.fsum(new - old for new, old, _, _ in row) / len(row))
    result = []
    for *_, advantage in row:
        if (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low):
            result.append((-(1 + high if advantage > 0 else 1 - low) * advantage, 0.0, 1.0))
        else:
            result.append((-ratio * advantage, -ratio * advantage, 0.0))
    return result


def reference_weighted(row: Row, least: float, greatest: float) -> Numbers:
    result = []
    for new, old, _, advantage in row:
        ratio = math.exp(new - old)
        weight = min(max(ratio, least), greatest)
        result.append((-weight * advantage * new, -weight * advantage, float(weight != ratio)))
    return result


CASES: dict[str, tuple[Callable[[Tokens], LossTerms], Callable[[Row], Numbers]]] = {
    "ppo": (ppo_clip, lambda row: reference_ppo(row, 0.2, 0.2, 0.0)),
    "dapo": (lambda t: ppo_clip(t, clip_high=0.28), lambda row: reference_ppo(row, 0.2, 0.28, 0.0)),
    "narrow": (lambda t: ppo_clip(t, clip_low=0.01, clip_high=0.0), lambda row: reference_ppo(row, 0.01, 0.0, 0.0)),
    "dual clip": (lambda t: ppo_clip(t, dual_clip=1.3), lambda row: reference_ppo(row, 0.2, 0.2, 1.3)),
    "gspo": (lambda t: gspo(t, clip_low=0.05, clip_high=0.08), lambda row: reference_gspo(row, 0.05, 0.08)),
    "gspo published": (gspo, lambda row: reference_gspo(row, 3e-4, 4e-4)),
    "cispo": (lambda t: cispo(t, clip_low=0.3, clip_high=0.2), lambda row: reference_weighted(row, 0.7, 1.2)),
    "cispo published": (cispo, lambda row: reference_weighted(row, 0.0, 5.0)),
    "aipo": (lambda t: aipo(t, max_ratio=1.2), lambda row: reference_weighted(row, 0.0, 1.2)),
}


@pytest.mark.parametrize(
    ("lengths", "name", "kind"), covering(RAGGED, CASES, ["token_mean", "sequence_mean_token_mean"])
)
def test_values_and_gradients_equal_a_loop_in_double_precision(name: str, lengths: list[int], kind: str) -> None:
    loss, reference = CASES[name]
    tokens = make_tokens(lengths, seed=len(lengths))
    shares = token_weights(lengths, kind, num_tokens=sum(lengths), num_sequences=len(lengths))  # type: ignore[arg-type]
    terms = loss(tokens)
    slopes = gradient(terms, tokens, torch.from_numpy(shares)[tokens.sequence].float())
    expected = [numbers for row in rows(tokens) for numbers in reference(row)]
    assert terms.loss.tolist() == pytest.approx([value for value, _, _ in expected], rel=1e-6, abs=1e-6)
    weighted = [s * float(shares[i]) for (_, s, _), i in zip(expected, tokens.sequence.tolist(), strict=True)]
    assert slopes.tolist() == pytest.approx(weighted, rel=1e-6, abs=1e-7)
    assert terms.metrics["clip_fraction"].tolist() == [clipped for _, _, clipped in expected]


def test_every_bound_applies_to_some_tokens_of_the_cases() -> None:
    """The batches of the tests above have tokens on both sides of each bound."""
    batches = [make_tokens(lengths, seed=len(lengths)) for lengths in RAGGED]
    for name, (loss, _) in CASES.items():
        if name != "cispo published":
            clipped = torch.cat([loss(tokens).metrics["clip_fraction"] for tokens in batches])
            assert 0.0 < clipped.mean() < 1.0, name
    dual = torch.cat([ppo_clip(tokens, dual_clip=1.3).metrics["dual_clip_fraction"] for tokens in batches])
    assert 0.0 < dual.mean() < 1.0


@pytest.mark.parametrize("lengths", RAGGED)
def test_reinforce_and_positive_examples_equal_their_formulas(lengths: list[int]) -> None:
    tokens = make_tokens(lengths, seed=7)
    plain, positive = reinforce(tokens), positive_nll(tokens)
    table = [row for completion in rows(tokens) for row in completion]
    assert plain.loss.tolist() == pytest.approx([-a * new for new, _, _, a in table], rel=1e-6)
    assert gradient(plain, tokens).tolist() == pytest.approx([-a for *_, a in table], rel=1e-6)
    assert positive.loss.tolist() == pytest.approx([-new if a > 0 else 0.0 for new, _, _, a in table], rel=1e-6)
    assert gradient(positive, tokens).tolist() == [-1.0 if a > 0 else 0.0 for *_, a in table]
    assert positive.metrics["positive_fraction"].tolist() == [float(a > 0) for *_, a in table]


@pytest.mark.parametrize("loss", [ppo_clip, gspo, sequence_clip, cispo, aipo, reinforce])
def test_ratio_metrics_are_those_of_the_old_policy(loss: Callable[[Tokens], LossTerms]) -> None:
    tokens = make_tokens([5, 1, 9], seed=8)
    metrics = loss(tokens).metrics
    table = [row for completion in rows(tokens) for row in completion]
    kl = [math.exp(new - old) - 1.0 - (new - old) for new, old, _, _ in table]
    assert metrics["approx_kl"].tolist() == pytest.approx(kl, rel=1e-5, abs=1e-6)
    ratio = [math.exp(new - old) for new, old, _, _ in table]
    if loss is gspo:
        means = [math.fsum(n - o for n, o, _, _ in c) / len(c) for c in rows(tokens)]
        ratio = [math.exp(mean) for mean, c in zip(means, rows(tokens), strict=True) for _ in c]
    if loss is sequence_clip:
        sums = [math.fsum(n - o for n, o, _, _ in c) for c in rows(tokens)]
        ratio = [math.exp(total) for total, c in zip(sums, rows(tokens), strict=True) for _ in c]
    assert metrics["ratio_max"].tolist() == pytest.approx(ratio, rel=1e-6)
    assert all(not value.requires_grad and value.shape == (15,) for value in metrics.values())


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


@examples(40)
@given(LENGTHS, st.integers(0, 1000))
def test_on_policy_gradient_of_every_loss_equals_reinforce(lengths: list[int], seed: int) -> None:
    tokens = on_policy(make_tokens(lengths, seed))
    expected = gradient(reinforce(tokens), tokens)
    for loss in (ppo_clip, gspo, sequence_clip, cispo, aipo, lambda t: ppo_clip(t, dual_clip=3.0)):
        terms = loss(tokens)
        torch.testing.assert_close(gradient(terms, tokens), expected, rtol=1e-6, atol=1e-7)
        assert terms.metrics.get("clip_fraction", torch.zeros(1)).max() == 0.0


@examples(40)
@given(LENGTHS, st.integers(0, 1000), st.data())
def test_step_is_independent_of_microbatches(lengths: list[int], seed: int, data: st.DataObject) -> None:
    tokens = make_tokens(lengths, seed)
    cut = data.draw(st.integers(0, len(lengths)))
    shares = token_weights(lengths, "token_mean", num_tokens=sum(lengths), num_sequences=len(lengths))
    weights = torch.from_numpy(shares)[tokens.sequence].float()
    for loss in (ppo_clip, gspo, sequence_clip, cispo, aipo, reinforce):
        whole = gradient(loss(tokens), tokens, weights)
        parts = []
        for chosen in (tokens.sequence < cut, tokens.sequence >= cut):
            part = select(tokens, chosen)
            parts.append(gradient(loss(part), part, weights[chosen]))
        assert torch.equal(torch.cat(parts), whole)


def select(tokens: Tokens, chosen: torch.Tensor) -> Tokens:
    part = {
        name: getattr(tokens, name).detach()[chosen]
        for name in ("old_logprobs", "rollout_logprobs", "advantages", "sequence")
    }
    return replace(tokens, logprobs=tokens.logprobs.detach()[chosen].requires_grad_(), **part)


@examples(30)
@given(LENGTHS, st.integers(0, 1000))
def test_gspo_gradient_equals_one_ratio_per_completion(lengths: list[int], seed: int) -> None:
    """The reference is the sequence objective (equation 5) in double precision, without the form of GSPO-token."""
    tokens = make_tokens(lengths, seed)
    logprobs = tokens.logprobs.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for index, length in enumerate(lengths):
        if length:
            mine = tokens.sequence == index
            ratio = (logprobs[mine] - tokens.old_logprobs[mine].double()).mean().exp()
            advantage = tokens.advantages[mine][0].double()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage) / len(lengths)
    (expected,) = torch.autograd.grad(total, logprobs)
    shares = token_weights(lengths, "sequence_mean_token_mean", num_tokens=1, num_sequences=len(lengths))
    terms = gspo(tokens, clip_low=0.05, clip_high=0.05)
    actual = gradient(terms, tokens, torch.from_numpy(shares)[tokens.sequence].float())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@examples(30)
@given(LENGTHS, st.integers(0, 1000))
def test_sequence_clip_equals_the_mean_over_completions(lengths: list[int], seed: int) -> None:
    """The reference is PPO's objective with one action per completion, in double precision."""
    tokens = make_tokens(lengths, seed)
    logprobs = tokens.logprobs.detach().double().requires_grad_()
    total = (0.0 * logprobs).sum()
    for index, length in enumerate(lengths):
        if length:
            mine = tokens.sequence == index
            ratio = (logprobs[mine] - tokens.old_logprobs[mine].double()).sum().exp()
            advantage = tokens.advantages[mine][0].double()
            total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage) / len(lengths)
    (expected,) = torch.autograd.grad(total, logprobs)
    shares = token_weights(lengths, "sequence_mean_token_sum", num_tokens=1, num_sequences=len(lengths))
    weights = torch.from_numpy(shares)[tokens.sequence].float()
    terms = sequence_clip(tokens, clip_high=0.3)
    assert float((terms.loss * weights).sum()) == pytest.approx(total.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient(terms, tokens, weights).double(), expected, rtol=1e-5, atol=1e-6)


def test_aipo_keeps_the_gradient_above_its_bound() -> None:
    tokens = make_tokens([2])
    raised = replace(
        tokens,
        logprobs=torch.tensor([-0.1, -1.0], requires_grad=True),
        old_logprobs=torch.tensor([-2.1, -1.1]),
        advantages=torch.tensor([1.5, 1.5]),
    )
    ratio = (raised.logprobs - raised.old_logprobs).exp()
    minimum = LossTerms(-ratio.clamp(max=2.0) * raised.advantages, {})
    ours, theirs = gradient(aipo(raised), raised), gradient(minimum, raised)
    assert ours.tolist() == pytest.approx([-3.0, -1.5 * math.exp(0.1)])
    assert theirs.tolist() == pytest.approx([0.0, -1.5 * math.exp(0.1)])


@pytest.mark.parametrize("loss", [ppo_clip, gspo, sequence_clip, cispo, aipo, reinforce, positive_nll])
def test_extreme_ratios_and_empty_batches_stay_finite(loss: Callable[[Tokens], LossTerms]) -> None:
    tokens = replace(
        make_tokens([2, 2]),
        logprobs=torch.tensor([0.0, -500.0, -500.0, 0.0], requires_grad=True),
        old_logprobs=torch.tensor([-500.0, 0.0, 0.0, -500.0]),
        advantages=torch.tensor([-1.0, -1.0, 1.0, 1.0]),
    )
    terms = loss(tokens)
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(gradient(terms, tokens)).all()
    assert loss(make_tokens([0])).loss.shape == (0,)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: ppo_clip(t, clip_low=-0.1), "clip_low is -0.1"),
        (lambda t: ppo_clip(t, dual_clip=1.0), "dual_clip is 1.0: it must be above 1, or 0"),
        (lambda t: gspo(t, clip_high=-1.0), "clip_high -1.0"),
        (lambda t: sequence_clip(t, clip_low=-1.0), "clip_low is -1.0"),
        (lambda t: cispo(t, clip_high=math.nan), "clip_high nan"),
        (lambda t: aipo(t, max_ratio=0.0), "max_ratio is 0.0: it must be above 0"),
    ],
)
def test_options_out_of_range_are_rejected(call: Callable[[Tokens], LossTerms], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call(make_tokens([1]))

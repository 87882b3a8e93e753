"""Reference reinforcement-learning steps as in the papers: a loop over completions and tokens, in double precision.

Sequences are neither packed nor shared, and no advantage of 0 is skipped. `ALGORITHMS` spells out each algorithm.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from starling.policy.train.data.groups import ScoredGroup

RAGGED = [(6, [4, 9, 1, 0]), (1, [2, 0, 7, 5]), (11, [1, 1, 1, 12])]
"""Prompts with completions, some without a token and some of a single one."""
CUT = [(False, True, False, False), (False, False, True, False), (True, False, False, False)]
"""Which of them reached their limit."""


@dataclass
class Completion:
    """A completion under a model, n tokens."""

    new: list[Tensor]
    """Log-probabilities, differentiable."""
    entropy: list[Tensor]
    """Of the distribution that each token was drawn from, differentiable."""
    rollout: list[float]
    old: list[float]
    """The denominators of the importance ratios."""
    reference: list[float]
    advantage: float
    cut: bool


Advantage = Callable[[list[tuple[float, ...]]], list[list[float]]]
TokenLosses = Callable[[Completion], list[Tensor]]
Aggregate = Callable[[list[list[Tensor]]], Tensor]


@dataclass
class Plain:
    """An algorithm, and the distance of its rollouts from the trained model at which its bounds take effect."""

    losses: TokenLosses
    advantage: Advantage
    aggregate: Aggregate
    noise: float = 0.2
    proximal: bool = False
    by_scorer: bool = False
    """`advantage` is GRPO's, of the scores of each scorer instead of the rewards."""


def under(
    model: Any, groups: Sequence[ScoredGroup], temperature: float = 1.0
) -> list[list[tuple[list[Tensor], list[Tensor]]]]:
    """Return the log-probabilities and entropies of each completion of each group, at its sampled tokens.

    They are over the tokens that a group kept at a position, if it says so. `temperature` is of the groups that do not
    say theirs.
    """
    found = []
    for group in groups:
        end, own, divisor = 0, [], group.temperature or temperature
        for length in group.lengths:
            start, end = end, end + length
            answer = group.completion_ids[start:end]
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, answer]).astype(np.int64))[None]
            logits = model(ids).logits[0].double() / divisor
            at = len(group.prompt_ids) - 1
            logprobs, entropies = [], []
            for offset in np.flatnonzero(group.sampled[start:end]).tolist():
                kept = kept_at(group, start + offset, logits.shape[1])
                logs = logits[at + offset, kept].log_softmax(-1)
                logprobs.append(logs[kept.index(answer[offset])])
                entropies.append(-(logs.exp() * logs).sum())
            own.append((logprobs, entropies))
        found.append(own)
    return found


def kept_at(group: ScoredGroup, position: int, vocabulary: int) -> list[int]:
    """Return the tokens that were kept at a position of a group; all where nothing was truncated."""
    count = 0 if group.kept is None else int(group.kept.counts[position])
    if group.kept is None or not count:
        return list(range(vocabulary))
    first = int(group.kept.counts[:position].sum())
    return [int(token) for token in group.kept.ids[first : first + count]]


def logprobs_of(model: Any, groups: Sequence[ScoredGroup], temperature: float = 1.0) -> list[list[list[float]]]:
    """Return the log-probabilities of each completion of each group, as numbers."""
    with torch.no_grad():
        return [[[float(one) for one in new] for new, _ in own] for own in under(model, groups, temperature)]


def near(
    model: Any, groups: Sequence[ScoredGroup], noise: float, *, seed: int = 5, temperature: float = 1.0
) -> list[ScoredGroup]:
    """Return `groups` as sampled by weights close to those of `model`: ratios lie on both sides of their bounds."""
    generator = np.random.default_rng(seed)
    found = []
    for group, own in zip(groups, logprobs_of(model, groups, temperature), strict=True):
        exact = np.array([one for completion in own for one in completion])
        logprobs = np.zeros(len(group.completion_ids), np.float32)
        logprobs[group.sampled] = exact + noise * generator.standard_normal(len(exact))
        found.append(replace(group, logprobs=logprobs))
    return found


def completions(
    model: Any,
    groups: Sequence[ScoredGroup],
    advantages: Sequence[Sequence[float]],
    *,
    old: Sequence[Sequence[Sequence[float]]] | None = None,
    reference: Any = None,
    temperature: float = 1.0,
) -> list[Completion]:
    """Return the completions of `groups` under `model`.

    Args:
        model: that is trained.
        groups: of an update.
        advantages: of each completion of each group.
        old: log-probabilities of each completion of each group; by default those of the rollout.
        reference: another model.
        temperature: of sampling.
    """
    known = None if reference is None else logprobs_of(reference, groups, temperature)
    found = []
    for at, (group, own) in enumerate(zip(groups, under(model, groups, temperature), strict=True)):
        end, sampled = 0, group.logprobs[group.sampled]
        for index, (new, entropy) in enumerate(own):
            start, end = end, end + len(new)
            rollout = [float(value) for value in sampled[start:end]]
            found.append(
                Completion(
                    new,
                    entropy,
                    rollout,
                    rollout if old is None else list(old[at][index]),
                    [] if known is None else known[at][index],
                    advantages[at][index],
                    group.truncated[index],
                )
            )
    return found


# Advantages.


def normalised(groups: list[tuple[float, ...]]) -> list[list[float]]:
    return [[(r - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) for r in group] for group in groups]


def centred(groups: list[tuple[float, ...]]) -> list[list[float]]:
    return [[r - statistics.fmean(group) for r in group] for group in groups]


def leave_one_out(groups: list[tuple[float, ...]]) -> list[list[float]]:
    return [[r - (sum(group) - r) / (len(group) - 1) for r in group] for group in groups]


def over_the_batch(groups: list[tuple[float, ...]]) -> list[list[float]]:
    flat = [r for group in groups for r in group]
    mean, deviation = statistics.fmean(flat), statistics.stdev(flat)
    return [[(r - mean) / (deviation + 1e-4) for r in group] for group in groups]


def centred_over_the_batch(groups: list[tuple[float, ...]]) -> list[list[float]]:
    return over_the_batch([tuple(row) for row in centred(groups)])


# Losses of tokens.


def ppo(low: float = 0.2, high: float = 0.2) -> TokenLosses:
    def losses(one: Completion) -> list[Tensor]:
        found = []
        for new, old in zip(one.new, one.old, strict=True):
            ratio = torch.exp(new - old)
            clipped = torch.clamp(ratio, 1 - low, 1 + high)
            found.append(-torch.minimum(ratio * one.advantage, clipped * one.advantage))
        return found

    return losses


def dual_clip(one: Completion) -> list[Tensor]:
    if one.advantage >= 0:
        return ppo()(one)
    # -max(min(...), c A)
    return [torch.minimum(loss, torch.tensor(-3.0 * one.advantage, dtype=loss.dtype)) for loss in ppo()(one)]


def gspo(one: Completion) -> list[Tensor]:
    if not one.new:
        return []
    ratio = torch.exp(torch.stack(one.new).sub(torch.tensor(one.old, dtype=torch.float64)).mean())
    clipped = torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4)
    return [-torch.minimum(ratio * one.advantage, clipped * one.advantage)] * len(one.new)


def by_completion(one: Completion) -> list[Tensor]:
    if not one.new:
        return []
    ratio = torch.exp(torch.stack(one.new).sub(torch.tensor(one.old, dtype=torch.float64)).sum())
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return [-torch.minimum(ratio * one.advantage, clipped * one.advantage)]


def cispo(one: Completion) -> list[Tensor]:
    found = []
    for new, old in zip(one.new, one.old, strict=True):
        weight = min(math.exp(new.item() - old), 5.0)
        found.append(-weight * one.advantage * new)
    return found


def aipo(one: Completion) -> list[Tensor]:
    found = []
    for new, old in zip(one.new, one.old, strict=True):
        weight = min(math.exp(new.item() - old), 2.0)
        found.append(-weight * one.advantage * new)
    return found


def decoupled(one: Completion) -> list[Tensor]:
    found = []
    for loss, old, rollout in zip(ppo()(one), one.old, one.rollout, strict=True):
        weight = math.exp(old - rollout)
        found.append(weight * loss if weight <= 5.0 else 0.0 * loss)
    return found


# From the losses of tokens to that of an update.


def token_mean(losses: list[list[Tensor]]) -> Tensor:
    return sum((one for row in losses for one in row), ZERO) / max(1, sum(len(row) for row in losses))


def mean_of_means(losses: list[list[Tensor]]) -> Tensor:
    return sum((sum(row, ZERO) / len(row) for row in losses if row), ZERO) / max(1, len(losses))


def mean_of_sums(losses: list[list[Tensor]]) -> Tensor:
    return sum((sum(row, ZERO) for row in losses), ZERO) / max(1, len(losses))


def by_constant(constant: int) -> Aggregate:
    return lambda losses: mean_of_sums(losses) / constant


ZERO = torch.zeros((), dtype=torch.float64)
LONGEST = max(length for _, lengths in RAGGED for length in lengths)

ALGORITHMS = {
    "grpo": Plain(ppo(), normalised, mean_of_means),
    "dr_grpo": Plain(ppo(), centred, by_constant(LONGEST)),
    "dapo": Plain(ppo(0.2, 0.28), normalised, token_mean),
    "gspo": Plain(gspo, normalised, mean_of_means, noise=1e-3),
    "cispo": Plain(cispo, normalised, token_mean, noise=1.5),
    "rloo": Plain(ppo(), leave_one_out, mean_of_sums),
    "rloo_sequence": Plain(by_completion, leave_one_out, mean_of_sums),
    "reinforce_pp": Plain(ppo(), over_the_batch, token_mean),
    "reinforce_pp_baseline": Plain(ppo(), centred_over_the_batch, token_mean),
    "gdpo": Plain(ppo(), normalised, mean_of_means, by_scorer=True),
    "aipo": Plain(aipo, normalised, token_mean, noise=0.8),
    "dual_clip": Plain(dual_clip, normalised, token_mean, noise=1.0),
    "decoupled_ppo": Plain(decoupled, normalised, token_mean, noise=1.5, proximal=True),
}


def rows_of(name: str, groups: Sequence[ScoredGroup]) -> list[list[float]]:
    """Return the advantages of a step by group."""
    plain = ALGORITHMS[name]
    if not plain.by_scorer:
        return plain.advantage([group.rewards for group in groups])
    sums = []
    for group in groups:
        own = [(scorer.weight, plain.advantage([scorer.values])[0]) for scorer in group.scores]
        sums.append([sum(weight * row[index] for weight, row in own) for index in range(len(group.lengths))])
    flat = [value for row in sums for value in row]
    mean, deviation = statistics.fmean(flat), statistics.stdev(flat)
    return [[(value - mean) / (deviation + 1e-4) for value in row] for row in sums]


def plain_loss(
    name: str,
    model: Any,
    groups: Sequence[ScoredGroup],
    *,
    rows: Sequence[Sequence[float]] | None = None,
    old: Sequence[Sequence[Sequence[float]]] | None = None,
    factor: Callable[[Completion], list[float]] | None = None,
    extra: Callable[[Completion], list[Tensor]] | None = None,
    mask_truncated: bool = False,
    aggregate: Aggregate | None = None,
    reference: Any = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the loss of one update of an algorithm.

    Args:
        name: one of `ALGORITHMS`.
        model: that is trained.
        groups: of the update.
        rows: the advantages, where the update is a part of a step; by default the groups are a whole step.
        old: the denominators, as for `completions`; by default as the algorithm has it in a step of one update.
        factor: of each token's loss.
        extra: terms to add to each token's loss.
        mask_truncated: leave completions out that reached their limit.
        aggregate: other than the algorithm's.
        reference: the model that `Completion.reference` is of.
        temperature: of sampling.
    """
    plain = ALGORITHMS[name]
    if rows is None:
        rows = rows_of(name, groups)
    if old is None and plain.proximal:
        old = logprobs_of(model, groups, temperature)
    losses = []
    for one in completions(model, groups, rows, old=old, reference=reference, temperature=temperature):
        if mask_truncated and one.cut:
            continue
        own = plain.losses(one)
        if factor is not None:
            own = [a * b for a, b in zip(factor(one), own, strict=True)]
        if extra is not None:
            own = [a + b for a, b in zip(own, extra(one), strict=True)]
        losses.append(own)
    return (aggregate or plain.aggregate)(losses)


def double(model: Any) -> Any:
    """Return a copy of `model` in double precision, without gradients."""
    copied = copy.deepcopy(model).double()
    copied.zero_grad(set_to_none=True)
    return copied


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of each gradient, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: torch.nn.Module, expected: torch.nn.Module, bound: float = 2e-6) -> None:
    """Compare the gradients of two models, each tensor by the norm of its difference."""
    found_gradients, expected_gradients = gradients(found), gradients(expected)
    assert found_gradients.keys() == expected_gradients.keys()
    assert any(gradient.any() for gradient in expected_gradients.values()), "there are no gradients to compare"
    for name, gradient in expected_gradients.items():
        difference = torch.linalg.vector_norm(found_gradients[name].double() - gradient)
        norm = torch.linalg.vector_norm(gradient)
        assert difference <= bound * norm, f"{name}: {difference / norm:.2e} of its norm, above {bound}"

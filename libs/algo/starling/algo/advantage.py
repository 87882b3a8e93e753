"""Stop 6 of the walk, credit: the rewards of a group become advantages.

An advantage is a function ``advantage(groups, *, option=default, ...)``: the rewards of each group of a step in, the
advantages out, one list per group in the same order. In all of them equal rewards have advantages of exactly 0, an
empty group or a reward that is not finite is an error, and a step without groups has no advantages.

One with a second parameter, ``advantage(groups, scores, *, option=default, ...)``, also gets of each group the scores
of each scorer. Equal scores of each scorer, and not equal rewards, then have advantages of exactly 0.

Pure Python in double precision; no torch, no numpy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from starling.common.wire.messages import ScorerScores

Scale = Literal["std", "batch", "none"]
Baseline = Literal["none", "group"]

EPSILON: Final = 1e-4
"""Added to the standard deviation; the value that TRL's `GRPOTrainer` uses, so that results are comparable."""


def group_relative(
    rewards: Sequence[float], *, scale: Literal["std", "none"] = "std", epsilon: float = EPSILON
) -> list[float]:
    """Return the advantage of each completion of one group over the group's mean reward.

    ``scale="std"`` is the outcome supervision of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2):
    ``(r_i - mean(r)) / (std(r) + epsilon)`` with the sample standard deviation (divisor n - 1), as TRL computes it.
    ``scale="none"`` leaves out the division (Dr. GRPO, arXiv:2503.20783): dividing favours prompts whose rewards
    hardly differ.

    A group of one, and a group of equal rewards, has advantages of exactly 0: there is nothing to compare.

    Raises:
        ValueError: the group is empty, a reward is not finite, or `epsilon` is negative.
    """
    if not rewards:
        raise ValueError("a group without rewards has no advantages: give one reward per completion")
    if not epsilon >= 0.0:
        raise ValueError(f"epsilon is {epsilon}: it must be 0 or more")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward {index} of the group is {reward}: drop a completion whose scoring failed")
    if all(reward == rewards[0] for reward in rewards):
        # Explicitly, because a mean in floating point may differ from its equal terms in the last bit.
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if scale == "none":
        return centred
    divisor = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1)) + epsilon
    return _scaled(centred, divisor)


def group_normalised(
    groups: Sequence[Sequence[float]], *, scale: Scale = "std", epsilon: float = EPSILON
) -> list[list[float]]:
    """Return the advantages of GRPO (or Dr. GRPO, ``scale="none"``), each group separately: see `group_relative`.

    ``scale="batch"`` divides the difference from the group's mean by the standard deviation of all rewards of the step
    (divisor n - 1) plus `epsilon` (Lite PPO, arXiv:2508.08221; TRL's ``scale_rewards="batch"``). It is not
    `batch_normalised` with the baseline ``"group"``, which divides by the deviation of the differences: that one is
    smaller where the means of the groups differ.

    Raises:
        ValueError: a group is empty, a reward is not finite, `epsilon` is negative, or there is no such scale.
    """
    _check(groups, epsilon)
    match scale:
        case "std" | "none":
            return [group_relative(group, scale=scale, epsilon=epsilon) for group in groups]
        case "batch":
            flat = [reward for group in groups for reward in group]
            divisor = (statistics.stdev(flat) if len(flat) > 1 else 0.0) + epsilon
            centred = [group_relative(group, scale="none") for group in groups]
            return [_scaled(group, divisor) for group in centred]
        case _:
            raise ValueError(f"scale is {scale!r}: give std, batch or none")


def leave_one_out(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return each reward minus the mean of the others in its group.

    ``r_i - (sum of r_j, j != i) / (n - 1)`` (RLOO, arXiv:2402.14740, section 2.2): a baseline that does not depend on
    the completion itself, so the gradient stays unbiased. It is ``n / (n - 1)`` times the difference from the mean.

    A group of one has an advantage of 0: there is nothing to compare.

    Raises:
        ValueError: a group is empty or a reward is not finite.
    """
    _check(groups)
    return [_leave_one_out(group) for group in groups]


def batch_normalised(
    groups: Sequence[Sequence[float]], *, baseline: Baseline = "none", epsilon: float = EPSILON
) -> list[list[float]]:
    """Return rewards normalised over all completions of the step: ``(x - mean(x)) / (std(x) + epsilon)``.

    With ``baseline="none"`` x is the reward (REINFORCE++, arXiv:2501.03262); with ``"group"`` it is the reward less
    the mean of its group (REINFORCE++-baseline, the same paper), so that an easy prompt does not give all of its
    completions a positive advantage. One deviation for the whole step, with the divisor n - 1, does not favour prompts
    whose rewards hardly differ. The paper's penalty for divergence from the reference is a separate setting.

    A step of one completion, and one whose x are all equal, has advantages of exactly 0. A group of one has an
    advantage of 0 under ``"group"``, and is like any other under ``"none"``.

    Raises:
        ValueError: a group is empty, a reward is not finite, `epsilon` is negative, or there is no such baseline.
    """
    _check(groups, epsilon)
    if baseline not in ("none", "group"):
        raise ValueError(f"baseline is {baseline!r}: give none or group")
    values = [group_relative(group, scale="none") if baseline == "group" else list(group) for group in groups]
    flat = [value for group in values for value in group]
    if not flat:
        return []
    normalised = iter(group_relative(flat, epsilon=epsilon))
    return [[next(normalised) for _ in group] for group in values]


def decoupled_normalised(
    groups: Sequence[Sequence[float]], scores: Sequence[Sequence[ScorerScores]], *, epsilon: float = EPSILON
) -> list[list[float]]:
    """Return the advantages of GDPO (arXiv:2601.05242, equations 4 to 7): each scorer is normalised by itself.

    With ``s_k(i, j)`` the score of completion j of group i by scorer k, and its weight ``w_k``::

        A_k(i, j) = (s_k(i, j) - mean of s_k(i, .)) / (std of s_k(i, .) + epsilon)    as GRPO, see `group_relative`
        A(i, j)   = sum over k of w_k A_k(i, j)
        result    = A(i, j) / (std of all A of the step + epsilon)

    Both deviations have the divisor n - 1. The paper also subtracts the mean of all A of the step, which is 0, because
    each A_k has the mean 0 in each group. It is not subtracted here, so that its rounding error cannot turn an
    advantage of exactly 0 into another number.

    So two scorers have the influence that their weights say, whatever the scales of their scores. The weighted sum of
    the scores lets the one with the greater deviation decide, and gives completions with equal sums the same advantage.

    A scorer whose scores of a group are equal adds nothing to it. A score that is None is left out: mean and deviation
    are those of the others of its group, and the scorer adds nothing to that completion.

    Args:
        groups: the rewards of each group, which only say how many completions it has.
        scores: of each group the scores by each scorer; may be of other scorers in each group.
        epsilon: added to both deviations.

    Raises:
        ValueError: as `group_normalised`; or scores are not one for each completion, or not finite.
    """
    _check(groups, epsilon)
    if len(scores) != len(groups):
        raise ValueError(f"{len(groups)} groups have scores of {len(scores)}: give those of each group")
    sums = [
        _decoupled_sum(len(group), own, epsilon, position)
        for position, (group, own) in enumerate(zip(groups, scores, strict=True))
    ]
    flat = [value for group in sums for value in group]
    deviation = math.sqrt(math.fsum(value * value for value in flat) / (len(flat) - 1)) if len(flat) > 1 else 0.0
    return [_scaled(group, deviation + epsilon) for group in sums]


def _decoupled_sum(num: int, scorers: Sequence[ScorerScores], epsilon: float, position: int) -> list[float]:
    """Return the weighted sum of the normalised scores of a group of `num` completions."""
    columns = []
    for scorer in scorers:
        where = f"of scorer {scorer.label!r} in group {position}"
        if len(scorer.values) != num:
            raise ValueError(f"{len(scorer.values)} scores {where} came for {num} completions: give one for each")
        known = {index: value for index, value in enumerate(scorer.values) if value is not None}
        if not all(map(math.isfinite, (*known.values(), scorer.weight))):
            raise ValueError(f"a score {where}, or its weight, is not finite: drop a completion whose scoring failed")
        if known:
            normalised = group_relative(list(known.values()), epsilon=epsilon)
            columns.append({index: scorer.weight * one for index, one in zip(known, normalised, strict=True)})
    return [math.fsum(column.get(index, 0.0) for column in columns) for index in range(num)]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def _scaled(values: Sequence[float], divisor: float) -> list[float]:
    """Return `values` over `divisor`; 0 if that is 0: rewards are equal, or the squares of their differences are 0."""
    return [value / divisor if divisor else 0.0 for value in values]


def _check(groups: Sequence[Sequence[float]], epsilon: float = 0.0) -> None:
    if not epsilon >= 0.0:
        raise ValueError(f"epsilon is {epsilon}: it must be 0 or more")
    for position, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {position} has no rewards: give one reward per completion")
        for index, reward in enumerate(group):
            if not math.isfinite(reward):
                raise ValueError(
                    f"reward {index} of group {position} is {reward}: drop a completion whose scoring failed"
                )

"""Stop 6 of the walk, credit: scored groups become the trained tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from starling.algo.advantage import Scale, group_relative
from starling.algo.staleness import staleness
from starling.common.errors import ConfigError
from starling.policy.train.batch import Prompted
from starling.policy.train.groups import FloatArray, Group, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Credited:
    """The trained tokens of a step, T of them, each with its advantage."""

    prompted: tuple[Prompted, ...]
    """Which of the T tokens are completions of which prompt."""
    token_ids: IntArray
    """[T]."""
    old_logprobs: FloatArray
    """Log-probabilities when they were sampled, [T]."""
    advantages: FloatArray
    """[T]."""
    fresh: FloatArray
    """1 for tokens whose whole completion was sampled by the version that is trained now, else 0; [T]."""
    temperatures: FloatArray | None
    """Divisor of the logits under which each was sampled, [T]; None where all are those of the step."""
    num_tokens: int
    """Tokens of all completions, left out or not: the denominator of the step's mean."""
    metrics: dict[str, float]
    """What is known before the forward pass."""


def credit(
    groups: Sequence[Group], *, step: int, scale: Scale = "std", skip_zero: bool = False, temperature: float = 1.0
) -> Credited:
    """Credit the completions of `groups` for step `step`.

    Args:
        groups: scored.
        step: the version to make; ages count from it.
        scale: see `starling.algo.advantage.group_relative`.
        skip_zero: leave out completions whose advantage is exactly 0.
        temperature: of groups that do not say theirs.

    Raises:
        ConfigError: there is no token, or a reward or log-probability is not finite.
    """
    num_tokens = sum(len(group.completion_ids) for group in groups)
    if not num_tokens:
        raise ConfigError(f"step {step} has {len(groups)} groups without a token: there is nothing to train")
    advantages = [_advantages(group, scale) for group in groups]
    ages = [_ages(group, step) for group in groups]
    lengths = [length for group in groups for length in group.lengths]
    flat_advantages, flat_ages = _flat(advantages), _flat(ages)
    trained = [not (skip_zero and advantage == 0.0) for advantage in flat_advantages]
    chosen = np.repeat(np.array(trained), lengths)
    own = [group.temperature or temperature for group in groups]
    drawn = [value for value, group in zip(own, groups, strict=True) for _ in group.lengths]
    return Credited(
        prompted=_prompted(groups, trained),
        token_ids=np.concatenate([group.completion_ids for group in groups])[chosen],
        old_logprobs=np.concatenate([group.logprobs for group in groups])[chosen],
        advantages=_per_token(flat_advantages, lengths)[chosen],
        fresh=_per_token([float(age == 0) for age in flat_ages], lengths)[chosen],
        temperatures=None if set(own) == {temperature} else _per_token(drawn, lengths)[chosen],
        num_tokens=num_tokens,
        metrics=_metrics(groups, flat_advantages, flat_ages, num_tokens, int(chosen.sum())),
    )


def _advantages(group: Group, scale: Scale) -> list[float]:
    if not np.isfinite(group.logprobs).all():
        raise ConfigError(
            f"group {group.prompt_id!r} cannot be trained: a log-probability is not finite, so the rollout's weights "
            "or logits are not"
        )
    try:
        return group_relative(group.rewards, scale=scale)
    except ValueError as error:
        raise ConfigError(f"group {group.prompt_id!r} cannot be trained: {error}") from error


def _ages(group: Group, step: int) -> list[float]:
    """Return the staleness of each completion; an empty one has no token that could be stale."""
    ends = np.cumsum(group.lengths).tolist()
    return [
        float(staleness(step, int(group.versions[end - length : end].min()))) if length else 0.0
        for length, end in zip(group.lengths, ends, strict=True)
    ]


def _prompted(groups: Sequence[Group], trained: Sequence[bool]) -> tuple[Prompted, ...]:
    """Number the trained tokens in order, and say which are whose."""
    prompted = []
    kept = index = 0
    for group in groups:
        spans = []
        for length in group.lengths:
            if length and trained[index]:
                spans.append((kept, kept + length))
                kept += length
            index += 1
        if spans:
            prompted.append(Prompted(group.prompt_ids, tuple(spans)))
    return tuple(prompted)


def _metrics(
    groups: Sequence[Group], advantages: list[float], ages: list[float], num_tokens: int, num_trained: int
) -> dict[str, float]:
    rewards = np.array(_flat([group.rewards for group in groups]))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "zero_advantage_share": advantages.count(0.0) / len(advantages),
        "num_tokens": float(num_tokens),
        "num_trained_tokens": float(num_trained),
        "num_sequences": float(len(ages)),
        "staleness_max": max(ages),
        "staleness_mean": sum(ages) / len(ages),
    }


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _per_token(values: Sequence[float], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Repeat each completion's value for each of its tokens."""
    return np.repeat(np.asarray(values, dtype=np.float32), lengths)

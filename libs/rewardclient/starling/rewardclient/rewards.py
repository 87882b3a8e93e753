"""Rewards of samples, with a mask of those that are valid. A failure is a status, never a reward of 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from starling.common.errors import ConfigError
from starling.rewardclient.errors import TooFewRewardsError

OK: Final = "ok"
TRUNCATED: Final = "truncated"
REWARD_ERROR: Final = "reward_error"
REWARD_TIMEOUT: Final = "reward_timeout"
MAX_SHOWN: Final = 3

Column = tuple[float | None, ...]
"""A score of each sample; None where there is none."""


@dataclass(frozen=True, slots=True)
class GroupRewards:
    """Rewards of the samples of one group."""

    indices: tuple[int, ...]
    """Of its samples, in the order of the call."""
    rewards: Column

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which samples have a valid reward."""
        return tuple(reward is not None for reward in self.rewards)

    @property
    def valid_rate(self) -> float:
        """Share of the samples that have a valid reward."""
        return _rate(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of samples; each field has one element for each sample, in the order of the call."""

    rewards: Column
    """None where a sample has no valid reward."""
    statuses: tuple[str, ...]
    """`ok`, `truncated`, or the kind of the failure: `reward_error`, `reward_timeout`."""
    problems: tuple[tuple[str, ...], ...]
    """Sentences on failures; a sample with a reward may have some, of scorers that do not count."""
    scores: Mapping[str, Column]
    """Of each scorer by its label, and by ``label/key`` of those with several scores."""
    groups: tuple[int, ...]
    """Number of each sample's group."""
    evaluation_scores: Mapping[str, Column] = field(default_factory=dict)
    """As `scores`, of scorers that are no part of the reward."""
    wait_s: float = 0.0
    """From the call to the last reward, in seconds."""
    num_hedged: int = 0
    """Requests that were sent twice because the first one was slow."""

    @property
    def mask(self) -> tuple[bool, ...]:
        """Which samples have a valid reward."""
        return tuple(reward is not None for reward in self.rewards)

    @property
    def valid_rate(self) -> float:
        """Share of the samples that have a valid reward."""
        return _rate(self.rewards)

    def by_group(self) -> tuple[GroupRewards, ...]:
        """Return the rewards of each group."""
        indices: dict[int, list[int]] = {}
        for index, group in enumerate(self.groups):
            indices.setdefault(group, []).append(index)
        return tuple(
            GroupRewards(tuple(found), tuple(self.rewards[index] for index in found)) for found in indices.values()
        )

    def require(self, min_valid_rate: float, *, in_each_group: bool = False) -> Self:
        """Return these rewards if enough of them are valid.

        Args:
            min_valid_rate: the least share of samples with a valid reward.
            in_each_group: demand it of every group, not only of all samples together.

        Raises:
            TooFewRewardsError: fewer are; the text has the first reasons.
        """
        check_rate(min_valid_rate)
        rates = [group.valid_rate for group in self.by_group()] if in_each_group else [self.valid_rate]
        num_below = sum(rate < min_valid_rate for rate in rates)
        if not num_below:
            return self
        where = f"in {num_below} of {len(rates)} groups" if in_each_group else f"of {len(self.rewards)} samples"
        raise TooFewRewardsError(
            f"the share of valid rewards {where} is below {min_valid_rate:g} (at the lowest {min(rates):g}): "
            f"{'; '.join(self._reasons()) or 'no reason is known'}"
        )

    def _reasons(self) -> list[str]:
        failed = zip(self.rewards, self.statuses, self.problems, strict=True)
        reasons = [(problems or (status,))[0] for reward, status, problems in failed if reward is None]
        return list(dict.fromkeys(reasons))[:MAX_SHOWN]


def failed_rewards(groups: Sequence[int], status: str, problem: str) -> Rewards:
    """Return the rewards of samples, given their groups, none of which has one."""
    num = len(groups)
    return Rewards(
        rewards=(None,) * num,
        statuses=(status,) * num,
        problems=((problem,),) * num,
        scores={},
        groups=tuple(groups),
    )


def merge(parts: Sequence[tuple[Sequence[int], Rewards]], groups: Sequence[int]) -> Rewards:
    """Return the rewards of all samples from those of parts of them.

    Args:
        parts: the indices of each part's samples, and their rewards.
        groups: number of each sample's group.
    """
    num = len(groups)
    rewards: list[float | None] = [None] * num
    statuses, problems = [REWARD_ERROR] * num, [()] * num  # type: tuple[list[str], list[tuple[str, ...]]]
    for indices, part in parts:
        for position, index in enumerate(indices):
            rewards[index] = part.rewards[position]
            statuses[index], problems[index] = part.statuses[position], part.problems[position]
    return Rewards(
        rewards=tuple(rewards),
        statuses=tuple(statuses),
        problems=tuple(problems),
        scores=_merged([(indices, part.scores) for indices, part in parts], num),
        evaluation_scores=_merged([(indices, part.evaluation_scores) for indices, part in parts], num),
        groups=tuple(groups),
        wait_s=max((part.wait_s for _, part in parts), default=0.0),
        num_hedged=sum(part.num_hedged for _, part in parts),
    )


def concatenate(parts: Sequence[Rewards]) -> Rewards:
    """Return the rewards of several calls as those of one; their groups stay apart."""
    groups, indices = list[int](), list[range]()
    for part in parts:
        first = 1 + max(groups, default=-1)
        indices.append(range(len(groups), len(groups) + len(part.groups)))
        groups += [first + group for group in part.groups]
    return merge(list(zip(indices, parts, strict=True)), groups)


def with_times(rewards: Rewards, wait_s: float, num_hedged: int) -> Rewards:
    """Return `rewards` with the time that they took, and the number of requests that were sent twice."""
    return replace(rewards, wait_s=wait_s, num_hedged=num_hedged)


def check_rate(rate: float) -> None:
    """Raise ConfigError unless `rate` is a share."""
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"min_valid_rate is {rate!r}; give a share from 0 to 1")


def _merged(parts: Sequence[tuple[Sequence[int], Mapping[str, Column]]], num: int) -> dict[str, Column]:
    wholes: dict[str, list[float | None]] = {}
    for indices, columns in parts:
        for name, column in columns.items():
            whole = wholes.setdefault(name, [None] * num)
            for index, value in zip(indices, column, strict=True):
                whole[index] = value
    return {name: tuple(whole) for name, whole in wholes.items()}


def _rate(rewards: Column) -> float:
    return sum(reward is not None for reward in rewards) / len(rewards) if rewards else 1.0

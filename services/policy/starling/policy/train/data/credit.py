"""Stop 6 of the walk, credit: scored groups become trained tokens, each with an advantage and a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from starling.algo.loss.aggregate import token_weights
from starling.algo.packing import balance
from starling.algo.staleness import staleness
from starling.common.errors import ConfigError
from starling.policy.train.data.groups import Flags, FloatArray, IntArray, ScoredGroup, TeacherLogprobs
from starling.policy.train.data.packing import Index, PromptBlock
from starling.policy.train.loss.objective import Objective


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """The trained tokens of one update, T of them in S completions.

    The completions lie end to end and have C tokens: what an environment said in them is among the C and not the T.
    """

    prompted: tuple[PromptBlock, ...]
    """Which of the C tokens are completions of which prompt."""
    token_ids: IntArray
    """[C]."""
    rollout_logprobs: FloatArray
    """Log-probabilities when they were sampled, [T]."""
    advantages: FloatArray
    """[T]."""
    weights: FloatArray
    """Share of each token in the update's loss, [T]."""
    fresh: FloatArray
    """1 for tokens whose whole completion was sampled by the version that is trained now, else 0; [T]."""
    sequence: Index
    """int64 [T]: the completion that holds each token."""
    versions: IntArray
    """Weight version that sampled each token, [T]."""
    temperatures: FloatArray | None
    """Divisor of the logits under which each was sampled, [T]; None where all are those of the step."""
    taught: TeacherLogprobs | None = None
    """What a teacher says of each, where there is one."""
    trained: Flags | None = None
    """Which of the C tokens are the T trained ones, [C]; None where all are."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.rollout_logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroups:
    """The groups of a step with what was found out about all of them together."""

    groups: tuple[ScoredGroup, ...]
    advantages: tuple[list[float], ...]
    """Of each completion of each group."""
    ages: tuple[list[float], ...]
    """Staleness of each completion of each group."""

    @property
    def longest(self) -> int:
        """Sampled tokens of the longest completion."""
        return max(length for group in self.groups for length in group.num_sampled)

    def split(self, count: int) -> list[StepGroups]:
        """Cut into `count` parts, the numbers of groups differing by at most one; fewer where there are fewer groups.

        The parts have nearly equally many tokens: where every token of an update weighs the same, it then weighs nearly
        the same in the whole step. Which group is in which part follows from the lengths alone.
        """
        num_tokens = [float(sum(group.num_sampled)) for group in self.groups]
        parts = balance(num_tokens, min(count, len(self.groups)), equal_sizes=True)
        return [
            StepGroups(
                tuple(self.groups[index] for index in part),
                tuple(self.advantages[index] for index in part),
                tuple(self.ages[index] for index in part),
            )
            for part in parts
        ]


def compute_advantages(groups: Sequence[ScoredGroup], objective: Objective, *, step: int) -> StepGroups:
    """Find the advantages and ages of the completions of `groups` in step `step`.

    Raises:
        ConfigError: there is no token, a reward or log-probability is not finite, or the advantage function fails or
            gives something else than a finite number per completion.
    """
    if not any(group.sampled.any() for group in groups):
        raise ConfigError(f"step {step} has {len(groups)} groups without a sampled token: there is nothing to train")
    for group in groups:
        _check(group, step)
    advantages = _advantages(groups, objective, step)
    return StepGroups(tuple(groups), advantages, tuple(_ages(group, step) for group in groups))


def make_train_batch(
    scored: StepGroups, objective: Objective, *, longest: int, skip_zero: bool = False, temperature: float = 1.0
) -> TrainBatch:
    """Lay out the trained tokens of one update.

    Args:
        scored: its groups.
        objective: says which completions count, and how much.
        longest: tokens by which the aggregate ``constant`` divides, where the objective has no number for it.
        skip_zero: leave out completions whose advantage is exactly 0; they count in the mean all the same.
        temperature: of groups that do not say theirs.
    """
    groups = scored.groups
    lengths = [length for group in groups for length in group.lengths]
    num_sampled = [length for group in groups for length in group.num_sampled]
    advantages, ages = _flat(scored.advantages), _flat(scored.ages)
    counted = [not (objective.mask_truncated and cut) for group in groups for cut in group.truncated]
    trained = [
        bool(length) and counts and not (skip_zero and advantage == 0.0)
        for length, counts, advantage in zip(num_sampled, counted, advantages, strict=True)
    ]
    counted_lengths = [length if counts else 0 for length, counts in zip(num_sampled, counted, strict=True)]
    weights = token_weights(
        counted_lengths,
        objective.aggregate,
        num_tokens=max(1, sum(counted_lengths)),
        num_sequences=max(1, sum(counted)),
        constant=objective.aggregate_tokens or longest,
    )
    sampled = np.concatenate([group.sampled for group in groups])
    kept = np.repeat(np.array(trained), lengths)
    chosen = kept & sampled
    own = [group.temperature or temperature for group in groups]
    drawn = [value for value, group in zip(own, groups, strict=True) for _ in group.lengths]
    counts = [length for length, taken in zip(num_sampled, trained, strict=True) if taken]
    return TrainBatch(
        prompted=_prompted(groups, trained),
        token_ids=np.concatenate([group.completion_ids for group in groups])[kept],
        rollout_logprobs=np.concatenate([group.logprobs for group in groups])[chosen],
        advantages=_per_token(advantages, lengths)[chosen],
        weights=_per_token(weights.tolist(), lengths)[chosen],
        fresh=_per_token([float(age == 0) for age in ages], lengths)[chosen],
        sequence=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        versions=np.concatenate([group.versions for group in groups])[chosen],
        temperatures=None if set(own) == {temperature} else _per_token(drawn, lengths)[chosen],
        taught=_taught(groups, chosen),
        trained=None if sampled.all() else sampled[kept],
    )


def _taught(groups: Sequence[ScoredGroup], chosen: npt.NDArray[np.bool_]) -> TeacherLogprobs | None:
    """Put together what a teacher says of the chosen tokens. Raises ConfigError when it speaks of some groups only."""
    known = [group.taught for group in groups if group.taught is not None]
    if not known:
        return None
    if len(known) != len(groups) or len({one.top_ids is None for one in known}) > 1:
        silent = next((group.prompt_id for group in groups if group.taught is None), groups[0].prompt_id)
        raise ConfigError(
            f"a teacher says less of group {silent!r} than of others of its step: give all to one teacher"
        )
    ids = [one.top_ids for one in known if one.top_ids is not None]
    logprobs = [one.top_logprobs for one in known if one.top_logprobs is not None]
    return TeacherLogprobs(
        np.concatenate([one.logprobs for one in known])[chosen],
        np.concatenate(ids)[chosen] if ids else None,
        np.concatenate(logprobs)[chosen] if logprobs else None,
    )


def group_metrics(scored: StepGroups) -> dict[str, float]:
    """Return the metrics of a step that are known before any forward pass."""
    advantages, ages = _flat(scored.advantages), _flat(scored.ages)
    rewards = np.array(_flat([group.rewards for group in scored.groups]))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "zero_advantage_share": advantages.count(0.0) / len(advantages),
        "num_tokens": float(sum(sum(group.num_sampled) for group in scored.groups)),
        "num_sequences": float(len(ages)),
        "staleness_max": max(ages),
        "staleness_mean": sum(ages) / len(ages),
    }


def _check(group: ScoredGroup, step: int) -> None:
    if len(group.versions) and int(group.versions.max()) >= step:
        raise ConfigError(
            f"group {group.prompt_id!r} cannot be trained: a token is of version {int(group.versions.max())}, which "
            f"step {step} has yet to make or a later one"
        )
    if not np.isfinite(group.logprobs).all():
        raise ConfigError(
            f"group {group.prompt_id!r} cannot be trained: a log-probability is not finite, so the rollout's weights "
            "or logits are not"
        )
    for index, reward in enumerate(group.rewards):
        if not np.isfinite(reward):
            raise ConfigError(
                f"group {group.prompt_id!r} cannot be trained: reward {index} of the group is {reward}: drop a "
                "completion whose scoring failed"
            )


def _advantages(groups: Sequence[ScoredGroup], objective: Objective, step: int) -> tuple[list[float], ...]:
    """Ask the advantage function, which may be the user's own, and check what it gives."""
    try:
        rows = [list(map(float, row)) for row in objective.advantage([group.rewards for group in groups])]
    except Exception as error:  # A user's function raises anything.
        names = ", ".join(group.prompt_id for group in groups[:3])
        why = error if isinstance(error, ValueError) else f"its advantage function raised {error!r}"
        raise ConfigError(f"the groups of step {step} ({names}, ...) cannot be trained: {why}") from error
    remedy = "the advantage function of policy.algorithm must give one finite number per completion"
    if len(rows) != len(groups):
        raise ConfigError(f"the {len(groups)} groups of step {step} got {len(rows)} lists of advantages: {remedy}")
    for group, row in zip(groups, rows, strict=True):
        if len(row) != len(group.lengths):
            raise ConfigError(
                f"the {len(group.lengths)} completions of group {group.prompt_id!r} got {len(row)} advantages: {remedy}"
            )
        for index, value in enumerate(row):
            if not math.isfinite(value):
                raise ConfigError(
                    f"completion {index} of group {group.prompt_id!r} got the advantage {value}: {remedy}"
                )
    return tuple(rows)


def _ages(group: ScoredGroup, step: int) -> list[float]:
    """Return the staleness of each completion; one in which nothing was sampled has no token that could be stale."""
    versions, lengths = group.versions[group.sampled], group.num_sampled
    ends = np.cumsum(lengths).tolist()
    return [
        float(staleness(step, int(versions[end - length : end].min()))) if length else 0.0
        for length, end in zip(lengths, ends, strict=True)
    ]


def _prompted(groups: Sequence[ScoredGroup], trained: Sequence[bool]) -> tuple[PromptBlock, ...]:
    """Number the tokens of the trained completions in order, and say which are whose."""
    prompted = []
    kept = index = 0
    for group in groups:
        spans = []
        for length in group.lengths:
            if trained[index]:
                spans.append((kept, kept + length))
                kept += length
            index += 1
        if spans:
            prompted.append(PromptBlock(group.prompt_ids, tuple(spans), group.extra))
    return tuple(prompted)


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _per_token(values: Sequence[float], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Repeat each completion's value for each of its tokens."""
    return np.repeat(np.asarray(values, dtype=np.float32), lengths)

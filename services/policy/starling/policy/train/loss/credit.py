"""Stop 6 of the walk, credit: scored groups become trained tokens, each with an advantage and a loss weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.algo.loss.aggregate import token_weights
from starling.algo.packing import balance
from starling.algo.routing import Experts, join_experts
from starling.algo.staleness import staleness
from starling.algo.truncation import KeptTokens, join_kept
from starling.common.errors import ConfigError
from starling.policy.train.data.groups import Flags, FloatArray, IntArray, ScoredGroup, TeacherLogprobs
from starling.policy.train.data.packing import Index, PromptBlock
from starling.policy.train.loss.objective import Objective


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """The T trained tokens of one optimizer update.

    The completions lie end to end and have C tokens, which include those of an environment; T counts sampled ones only.
    """

    blocks: tuple[PromptBlock, ...]
    """Each prompt with the spans of its completions among the C tokens."""
    token_ids: IntArray
    """[C]."""
    rollout_logprobs: FloatArray
    """Log-probabilities at sampling, [T]."""
    advantages: FloatArray
    """[T]."""
    weights: FloatArray
    """Share of each token in the update's loss, [T]."""
    fresh: FloatArray
    """1 for tokens of completions sampled entirely by the version that is trained now, else 0; [T]."""
    sequence: Index
    """int64 [T]: the completion of each token."""
    versions: IntArray
    """Weight version that sampled each token, [T]."""
    temperatures: FloatArray | None
    """Divisor of the logits at sampling, [T]; None where it is the step's for all."""
    teacher: TeacherLogprobs | None = None
    """In runs with a teacher."""
    trained: Flags | None = None
    """Which of the C tokens are the T trained ones, [C]; None where all are."""
    kept: KeptTokens | None = None
    """The tokens over which the log-probabilities of each of the T are normalised; None for the whole vocabulary."""
    routing: Experts | None = None
    """The recorded experts of each of the C tokens; None where nothing is replayed."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.rollout_logprobs)


@dataclass(frozen=True, slots=True, eq=False)
class StepGroups:
    """The groups of a step, with the advantage and the staleness of each completion."""

    groups: tuple[ScoredGroup, ...]
    advantages: tuple[list[float], ...]
    """Of each completion, by group."""
    staleness: tuple[list[float], ...]
    """Of each completion, by group, in versions."""

    @property
    def longest(self) -> int:
        """Sampled tokens of the longest completion."""
        return max(length for group in self.groups for length in group.num_sampled)

    def split(self, count: int) -> list[StepGroups]:
        """Split into `count` parts whose numbers of groups differ by at most one; fewer where there are fewer groups.

        The parts have nearly equal numbers of tokens, so a token that has the same weight as all others of its update
        has nearly the same weight as all others of the step. The split depends on the lengths alone.
        """
        num_tokens = [float(sum(group.num_sampled)) for group in self.groups]
        parts = balance(num_tokens, min(count, len(self.groups)), equal_sizes=True)
        return [
            StepGroups(
                tuple(self.groups[index] for index in part),
                tuple(self.advantages[index] for index in part),
                tuple(self.staleness[index] for index in part),
            )
            for part in parts
        ]


def compute_advantages(groups: Sequence[ScoredGroup], objective: Objective, *, step: int) -> StepGroups:
    """Return `groups` with the advantage and the staleness of each completion in step `step`.

    Raises:
        ConfigError: there is no token, a reward or log-probability is not finite, or the advantage function fails or
            does not return a finite number per completion.
    """
    if not any(group.sampled.any() for group in groups):
        raise ConfigError(f"step {step} has {len(groups)} groups without a sampled token: there is nothing to train")
    for group in groups:
        _check(group, step)
    advantages = _call_advantage(groups, objective, step)
    return StepGroups(tuple(groups), advantages, tuple(_staleness(group, step) for group in groups))


def make_train_batch(
    step_groups: StepGroups, objective: Objective, *, longest: int, skip_zero: bool = False, temperature: float = 1.0
) -> TrainBatch:
    """Collect the trained tokens of one update.

    Args:
        step_groups: the groups of the update.
        objective: aggregation, and whether truncated completions are masked.
        longest: tokens by which the aggregate ``constant`` divides, where the objective has no number for it.
        skip_zero: leave out completions whose advantage is exactly 0; the mean still counts them.
        temperature: of groups without a temperature of their own.
    """
    groups = step_groups.groups
    lengths = [length for group in groups for length in group.lengths]
    num_sampled = [length for group in groups for length in group.num_sampled]
    advantages, ages = _flat(step_groups.advantages), _flat(step_groups.staleness)
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
    in_batch = np.repeat(np.array(trained), lengths)
    chosen = in_batch & sampled
    by_group = [group.temperature or temperature for group in groups]
    by_completion = [value for value, group in zip(by_group, groups, strict=True) for _ in group.lengths]
    counts = [length for length, included in zip(num_sampled, trained, strict=True) if included]
    kept = join_kept((group.kept, len(group.completion_ids)) for group in groups)
    routing = join_experts(
        (None if group.routing is None else group.routing.completions, len(group.completion_ids)) for group in groups
    )
    return TrainBatch(
        blocks=_prompt_blocks(groups, trained),
        token_ids=np.concatenate([group.completion_ids for group in groups])[in_batch],
        rollout_logprobs=np.concatenate([group.logprobs for group in groups])[chosen],
        advantages=_per_token(advantages, lengths)[chosen],
        weights=_per_token(weights.tolist(), lengths)[chosen],
        fresh=_per_token([float(age == 0) for age in ages], lengths)[chosen],
        sequence=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        versions=np.concatenate([group.versions for group in groups])[chosen],
        temperatures=None if set(by_group) == {temperature} else _per_token(by_completion, lengths)[chosen],
        teacher=_join_teacher(groups, chosen),
        trained=None if sampled.all() else sampled[in_batch],
        kept=None if kept is None else kept.take(chosen),
        routing=None if routing is None else routing[in_batch],
    )


def _join_teacher(groups: Sequence[ScoredGroup], chosen: Flags) -> TeacherLogprobs | None:
    """Join the teacher's log-probabilities of the chosen tokens. Raises ConfigError when groups have other ones."""
    known = [group.teacher for group in groups if group.teacher is not None]
    if not known:
        return None
    if len(known) != len(groups) or len({None if one.top_ids is None else one.top_ids.shape[1] for one in known}) > 1:
        lacking = next((group.prompt_id for group in groups if group.teacher is None), groups[0].prompt_id)
        raise ConfigError(
            f"a teacher reported less about group {lacking!r} than about others of its step: score all of them with "
            "one teacher"
        )
    ids = [one.top_ids for one in known if one.top_ids is not None]
    logprobs = [one.top_logprobs for one in known if one.top_logprobs is not None]
    return TeacherLogprobs(
        np.concatenate([one.logprobs for one in known])[chosen],
        np.concatenate(ids)[chosen] if ids else None,
        np.concatenate(logprobs)[chosen] if logprobs else None,
    )


def group_metrics(step_groups: StepGroups) -> dict[str, float]:
    """Return the metrics of a step that need no forward pass."""
    advantages, ages = _flat(step_groups.advantages), _flat(step_groups.staleness)
    rewards = np.array(_flat([group.rewards for group in step_groups.groups]))
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "zero_advantage_share": advantages.count(0.0) / len(advantages),
        "num_tokens": float(sum(sum(group.num_sampled) for group in step_groups.groups)),
        "num_sequences": float(len(ages)),
        "staleness_max": max(ages),
        "staleness_mean": sum(ages) / len(ages),
    }


def _check(group: ScoredGroup, step: int) -> None:
    if len(group.versions) and int(group.versions.max()) >= step:
        raise ConfigError(
            f"group {group.prompt_id!r} cannot be trained: a token is of version {int(group.versions.max())}, and step "
            f"{step} trains from version {step - 1}"
        )
    if not np.isfinite(group.logprobs).all():
        raise ConfigError(
            f"group {group.prompt_id!r} cannot be trained: a log-probability is not finite, so the rollout's weights "
            "or logits are not"
        )
    for index, reward in enumerate(group.rewards):
        if not math.isfinite(reward):
            raise ConfigError(
                f"group {group.prompt_id!r} cannot be trained: reward {index} of the group is {reward}: drop a "
                "completion whose scoring failed"
            )


def _call_advantage(groups: Sequence[ScoredGroup], objective: Objective, step: int) -> tuple[list[float], ...]:
    """Call the advantage function, which may be the user's own, and check its result."""
    given: list[Sequence[Any]] = [[group.rewards for group in groups]]
    if objective.takes_scores:
        _check_scored(groups)
        given.append([group.scores for group in groups])
    try:
        rows = [list(map(float, row)) for row in objective.advantage(*given)]
    except Exception as error:  # A user's function raises anything.
        names = ", ".join(group.prompt_id for group in groups[:3])
        reason = error if isinstance(error, ValueError) else f"its advantage function raised {error!r}"
        raise ConfigError(f"the groups of step {step} ({names}, ...) cannot be trained: {reason}") from error
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


def _check_scored(groups: Sequence[ScoredGroup]) -> None:
    """Refuse groups without the scores of single scorers: they would be trained with advantages of 0."""
    for group in groups:
        if not group.scores:
            raise ConfigError(
                f"group {group.prompt_id!r} cannot be trained: the advantage function of policy.algorithm takes the "
                "scores of each scorer, and they did not come with it; start the controller with the same recipe"
            )


def _staleness(group: ScoredGroup, step: int) -> list[float]:
    """Return the staleness of each completion; 0 for one without a sampled token."""
    versions, lengths = group.versions[group.sampled], np.array(group.num_sampled)
    found = np.zeros(len(lengths))
    if versions.size:
        begins = np.cumsum(lengths) - lengths
        oldest = np.minimum.reduceat(versions, begins[lengths > 0])
        found[lengths > 0] = [staleness(step, version) for version in oldest.tolist()]
    result: list[float] = found.tolist()
    return result


def _prompt_blocks(groups: Sequence[ScoredGroup], trained: Sequence[bool]) -> tuple[PromptBlock, ...]:
    """Return each prompt with the spans of its trained completions, whose tokens are numbered in order."""
    blocks = []
    end = index = 0
    for group in groups:
        spans = []
        for length in group.lengths:
            if trained[index]:
                spans.append((end, end + length))
                end += length
            index += 1
        if spans:
            routing = None if group.routing is None else group.routing.prompt
            blocks.append(PromptBlock(group.prompt_ids, tuple(spans), group.extra, routing))
    return tuple(blocks)


def _flat(rows: Iterable[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _per_token(values: Sequence[float], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Repeat each completion's value for each of its tokens."""
    return np.repeat(np.asarray(values, dtype=np.float32), lengths)

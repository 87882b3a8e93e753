"""Rollout: prompts become completions, and completions get rewards and teacher log-probabilities."""

from __future__ import annotations

import msgspec

from starling.common.ids import Purpose
from starling.common.wire.structs import (
    CompletionText,
    PartialCompletionMeta,
    Prompt,
    Sampling,
    Status,
    TensorMeta,
    TrajectoryMeta,
)


class GenerateGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="generate_group"):
    """Generate `num_completions` completions of `prompt`. Sent when the rollout has a free slot; answered by
    `GroupGenerated` or `GroupInterrupted`.

    If another rollout began the group, buffers follow in the order of `tensors`, from which generation resumes:
    completion token ids (int32, [sum of num_tokens]), log-probabilities (float32), weight versions (int32); and, if
    they were recorded, ``kept_counts`` and ``kept_ids``, and ``routing``, as in `TrainGroup`.
    """

    lease: str
    purpose: Purpose
    prompt: Prompt
    num_completions: int
    sampling: Sampling
    min_version: int
    """Oldest weight version that may sample a token of this group."""
    partial: tuple[PartialCompletionMeta, ...] = ()
    """Partial completions of an earlier rollout, one per completion; empty for a new group."""
    tensors: tuple[TensorMeta, ...] = ()


class GroupGenerated(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_generated"):
    """The completions of one prompt. Sent when all of them are done. Buffers follow as `TrainGroup` lists them."""

    lease: str
    trajectories: tuple[TrajectoryMeta, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = -1.0
    """Divisor of the logits under which they were sampled, as requested; -1 if not reported."""


class GroupInterrupted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_interrupted"):
    """The partial completions of a group that this rollout cannot finish. Sent when it stops, sleeps or loses its
    engine; another rollout resumes from them. Buffers follow as `GenerateGroup` lists them."""

    lease: str
    reason: str
    partial: tuple[PartialCompletionMeta, ...]
    tensors: tuple[TensorMeta, ...]
    temperature: float = -1.0
    """Divisor of the logits under which they were sampled, as requested; -1 if not reported."""
    lost: bool = False
    """The engine died while it worked on this group, which may be the cause."""


class ScoreGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="score_group"):
    """Score the completions of `prompt`. Sent when a group is generated; answered by `GroupScored`.

    Buffers follow in the order of `tensors`: of a diffusion model ``latents`` (float32 or float16, [completions, ...]).
    """

    lease: str
    prompt: Prompt
    completions: tuple[CompletionText, ...]
    evaluate: bool = False
    """Evaluation scorers score them, too."""
    tensors: tuple[TensorMeta, ...] = ()
    """What the model has made besides texts; empty for a language model."""


class GroupScored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="group_scored"):
    """The rewards of one group, in the order of its completions; null where a scorer failed. Sent when all scorers
    are done."""

    lease: str
    rewards: tuple[float | None, ...]
    statuses: tuple[Status, ...]
    components: dict[str, tuple[float | None, ...]] = {}
    """Unweighted score of each scorer, by name."""
    problems: tuple[str, ...] = ()
    """One sentence for each failure."""
    evaluation_scores: dict[str, tuple[float | None, ...]] = {}
    """Score of each evaluation scorer, by name; no part of the rewards."""


class ScoreTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="score_tokens"):
    """Compute a teacher's log-probabilities of the tokens of these completions. Sent when a group is generated;
    answered by `TokensScored`.

    Buffers follow in the order of `tensors`: prompt token ids (int32, [prompt]) and completion token ids (int32,
    [sum of lengths]).
    """

    lease: str
    prompt_id: str
    lengths: tuple[int, ...]
    """Number of tokens of each completion."""
    temperature: float
    """Divisor of the logits under which they were sampled; 0 counts as 1."""
    tensors: tuple[TensorMeta, ...]


class TokensScored(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="tokens_scored"):
    """A teacher's log-probabilities of the completions of one group. Sent when they are computed. Buffers follow in
    the order of `tensors`.

    The tensors are, by name: `teacher_logprobs` (float32, [sum of lengths]), the log-probability of each token; and,
    if the teacher reports its most likely tokens, `teacher_top_ids` (int32, [sum of lengths, k]) and
    `teacher_top_logprobs` (float32, the same shape), most likely first. All come from a softmax over the whole
    vocabulary.
    """

    lease: str
    tensors: tuple[TensorMeta, ...]

"""Scored groups as arrays: the data of a reinforcement-learning step, and its decoding from the wire."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from starling.algo.denoising import group_problem
from starling.algo.media import media_problem, pixel_problem, placeholders_in
from starling.algo.routing import Routing, routing_problem
from starling.algo.truncation import KeptTokens, kept_problem
from starling.common.counts import counted
from starling.common.errors import ConfigError, WireError
from starling.common.wire.messages import ModelLimits, ScorerScores, Status, TensorMeta, TrainGroup
from starling.common.wire.tensors import (
    DENOISING_TENSORS,
    GROUP_TENSORS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_TENSORS,
    LOSS_MASK,
    MASK_FORM,
    PROMPT_ROUTING,
    PROMPT_TENSORS,
    ROUTING,
    ROUTING_FORMS,
    ROUTING_TENSORS,
    TEACHER_TENSORS,
    TensorForm,
    form_of,
)
from starling.policy.train.errors import RejectedGroupsError

IntArray = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherLogprobs:
    """A teacher's log-probabilities of the T tokens of a group."""

    logprobs: FloatArray
    """Log-probability of each token, [T]."""
    top_ids: IntArray | None = None
    """Its K likeliest tokens at each position, [T, K]."""
    top_logprobs: FloatArray | None = None
    """Their log-probabilities, [T, K]."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """The scored completions of one prompt; tokens of all completions lie end to end, T of them."""

    prompt_ids: IntArray
    """Token ids, [prompt], at least one."""
    completion_ids: IntArray
    """Token ids, [T]."""
    logprobs: FloatArray
    """Log-probability of each token at sampling, [T]."""
    versions: IntArray
    """Weight version that sampled each token, [T]."""
    lengths: tuple[int, ...]
    """Tokens of each completion; their sum is T. A completion without sampled tokens is scored but not trained."""
    rewards: tuple[float, ...]
    """Reward of each completion."""
    prompt_id: str = ""
    """Names the group in errors."""
    temperature: float = 0.0
    """Divisor of the logits at sampling; 0 for that of the step."""
    cut: tuple[bool, ...] = ()
    """Whether each completion was cut off at its token limit; empty where none was."""
    teacher: TeacherLogprobs | None = None
    """In runs with a teacher."""
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Model inputs of the prompt's images and videos, by name, and the positions of the prompt's tokens; empty for a
    text prompt."""
    loss_mask: npt.NDArray[np.uint8] | None = None
    """1 for each token that the model sampled, 0 for an environment's tokens between its replies, which are context
    only, [T]; None where all were sampled."""
    kept: KeptTokens | None = None
    """The tokens that truncated sampling kept at each of the T positions, over which `logprobs` are normalised; None
    where they are those of the whole vocabulary."""
    routing: Routing | None = None
    """The experts that the rollout's routers chose for each token of the prompt and of the completions; None where the
    model's own routers choose."""
    scores: tuple[ScorerScores, ...] = ()
    """Scores by each scorer that counts in the rewards; empty where they were not sent."""
    denoising: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Tensors of denoising trajectories, by name (see `TrainGroup`); empty for a language model."""

    @property
    def sampled(self) -> Flags:
        """Whether the model sampled each token, [T]."""
        return np.ones(len(self.completion_ids), np.bool_) if self.loss_mask is None else self.loss_mask == 1

    @property
    def num_sampled(self) -> tuple[int, ...]:
        """Sampled tokens of each completion: those to train."""
        if self.loss_mask is None:
            return self.lengths
        totals = np.concatenate(([0], np.cumsum(self.sampled)))[np.cumsum((0, *self.lengths))]
        return tuple(np.diff(totals).tolist())

    @property
    def truncated(self) -> tuple[bool, ...]:
        """Whether each completion was cut off at its token limit."""
        return self.cut or (False,) * len(self.lengths)

    def __post_init__(self) -> None:
        check_prompt(self.prompt_ids, self.prompt_id)
        _check_extra(self.extra, self.prompt_ids, self.prompt_id)
        total = sum(self.lengths)
        _check_teacher(self.teacher, total, self.prompt_id)
        sizes = (len(self.completion_ids), len(self.logprobs), len(self.versions))
        if any(size != total for size in sizes) or min(self.lengths, default=0) < 0:
            raise ConfigError(
                f"group {self.prompt_id!r} has completions of {self.lengths} tokens but {sizes[0]} token ids, "
                f"{sizes[1]} log-probabilities and {sizes[2]} versions: each must have one entry per token"
            )
        _check_mask(self.loss_mask, total, self.prompt_id)
        _check_kept(self)
        _check_routing(self, None)
        if len(self.rewards) != len(self.lengths):
            raise ConfigError(
                f"group {self.prompt_id!r} has {len(self.lengths)} completions but {len(self.rewards)} rewards: "
                "give one reward per completion"
            )
        if self.cut and len(self.cut) != len(self.lengths):
            raise ConfigError(
                f"group {self.prompt_id!r} has {len(self.lengths)} completions and {len(self.cut)} flags whether they "
                "were cut off: give one flag per completion"
            )
        _check_scores(self)


def groups_from_wire(
    groups: Sequence[TrainGroup], buffers: Sequence[Any], limits: ModelLimits | None = None
) -> list[ScoredGroup]:
    """Decode the groups of a `TrainStep` from its buffer frames, without copying them.

    Args:
        groups: of the message.
        buffers: its frames (bytes or memoryviews) in the order of the groups: four for each, then the named ones.
        limits: of the model; None if they are not known.

    Raises:
        RejectedGroupsError: groups do not match their description, the model cannot read them, or nothing is sampled.
        WireError: frames are missing or left over.
    """
    num_described = sum(len(group.tensors) for group in groups)
    if num_described > len(buffers):
        raise WireError(
            f"a step of {len(groups)} groups lacks a buffer: it describes {num_described}, {len(buffers)} came"
        )
    frames = iter(buffers)
    read: list[ScoredGroup] = []
    problems: dict[str, str] = {}
    for group in groups:
        own = [next(frames) for _ in group.tensors]
        try:
            read.append(_read(group, iter(own)))
            if limits is not None:
                _check_limits(read[-1], limits)
        except WireError as error:
            problems[group.prompt_id] = str(error)
    if problems:
        raise RejectedGroupsError("; ".join(list(problems.values())[:3]), list(problems))
    if num_described < len(buffers):
        surplus = len(buffers) - num_described
        raise WireError(f"a step of {len(groups)} groups came with {surplus} buffers too many")
    if read and not any(group.sampled.any() for group in read):
        what = f"the {counted(len(read), 'group')} of the step have no sampled token: there is nothing to train"
        raise RejectedGroupsError(what, [group.prompt_id for group in groups])
    return read


def _check_limits(group: ScoredGroup, limits: ModelLimits) -> None:
    """Refuse a group that would fail in the model's forward pass, and all groups of the step with it."""
    _check_vocabulary(group, limits.vocabulary_size)
    _check_longest(group, limits.longest)
    if problem := group_problem(group.denoising, group.lengths, group.completion_ids, limits.denoising):
        raise WireError(f"group {group.prompt_id!r} cannot be trained: {problem}")
    if limits.denoising is not None and not (group.loss_mask is None is group.kept):
        raise WireError(f"group {group.prompt_id!r} has a mask or kept tokens, and the model is a diffusion model")
    if group.routing is not None and limits.experts is None:
        raise WireError(
            f"group {group.prompt_id!r} has the experts of its tokens, and the model has none, or cannot replay them"
        )
    try:
        _check_routing(group, limits)
    except ConfigError as error:
        raise WireError(str(error)) from error
    inputs = limits.media
    if group.extra and inputs is None:
        raise WireError(f"group {group.prompt_id!r} has images or videos, and the model reads only text")
    if problem := media_problem(group.extra, group.prompt_ids, inputs) or pixel_problem(group.extra):
        raise WireError(f"group {group.prompt_id!r} cannot be trained: {problem}")
    if placeholders_in(group.completion_ids, inputs).any():
        raise WireError(f"group {group.prompt_id!r} has a placeholder token of images or videos in a completion")


def _check_vocabulary(group: ScoredGroup, size: int) -> None:
    """Refuse token ids that the model has no embedding for: on a GPU they would end the process."""
    teacher = group.teacher.top_ids if group.teacher is not None and group.teacher.top_ids is not None else None
    kept = group.kept.ids if group.kept is not None else None
    found = (group.prompt_ids, group.completion_ids, teacher, kept)
    arrays = [array for array in found if array is not None and array.size]
    for array in arrays if size else ():
        if array.min() < 0 or array.max() >= size:
            raise WireError(
                f"group {group.prompt_id!r} has token ids from {array.min()} to {array.max()}, and the model has {size}"
            )


def _check_longest(group: ScoredGroup, longest: int) -> None:
    """Refuse trained sequences that the model cannot attend to."""
    prompt = len(group.prompt_ids)
    trained = [length for length, sampled in zip(group.lengths, group.num_sampled, strict=True) if sampled]
    most = prompt + max(trained, default=0)
    if longest and trained and most > longest:
        raise WireError(
            f"group {group.prompt_id!r} has a sequence of {most} tokens, {prompt} of them of its prompt, and the model "
            f"can attend to {longest}: shorten the prompts or lower sampling.max_tokens"
        )


def _read(group: TrainGroup, frames: Iterator[Any]) -> ScoredGroup:
    if len(group.tensors) < len(GROUP_TENSORS):
        raise WireError(
            f"group {group.prompt_id!r} describes {len(group.tensors)} tensors instead of {len(GROUP_TENSORS)}"
        )
    arrays: list[npt.NDArray[Any]] = []
    extra: dict[str, npt.NDArray[Any]] = {}
    teacher: dict[str, npt.NDArray[Any]] = {}
    kept: dict[str, npt.NDArray[Any]] = {}
    experts: dict[str, npt.NDArray[Any]] = {}
    denoising: dict[str, npt.NDArray[Any]] = {}
    loss_mask: npt.NDArray[np.uint8] | None = None
    for index, meta in enumerate(group.tensors):
        frame = next(frames)
        if index < len(GROUP_TENSORS):
            arrays.append(_array(group.prompt_id, meta, GROUP_TENSORS[index], frame))
        elif meta.name in PROMPT_TENSORS:
            extra[meta.name] = _array(group.prompt_id, meta, PROMPT_TENSORS[meta.name], frame)
        elif meta.name in TEACHER_TENSORS:
            teacher[meta.name] = _array(group.prompt_id, meta, TEACHER_TENSORS[meta.name], frame)
        elif meta.name in KEPT_TENSORS:
            kept[meta.name] = _array(group.prompt_id, meta, KEPT_TENSORS[meta.name], frame)
        elif meta.name in ROUTING_TENSORS:
            form = ROUTING_FORMS.get(meta.dtype, ROUTING_FORMS["uint8"])
            experts[meta.name] = _array(group.prompt_id, meta, form, frame)
        elif meta.name == LOSS_MASK:
            loss_mask = _array(group.prompt_id, meta, MASK_FORM, frame)
        elif (own_form := form_of(meta.name, meta.dtype, len(meta.shape))) is not None:
            denoising[meta.name] = _array(group.prompt_id, meta, own_form, frame)
        else:
            names = (*PROMPT_TENSORS, *TEACHER_TENSORS, *KEPT_TENSORS, *ROUTING_TENSORS, LOSS_MASK, *DENOISING_TENSORS)
            allowed = ", ".join(names)
            raise WireError(f"group {group.prompt_id!r} has a tensor {meta.name!r} and can only have {allowed}")
    prompt_ids, completion_ids, logprobs, versions = arrays
    for found, names in ((kept, (KEPT_COUNTS, KEPT_IDS)), (experts, ROUTING_TENSORS)):
        if len(found) == 1:
            raise WireError(
                f"group {group.prompt_id!r} has {next(iter(found))} and lacks the other of {', '.join(names)}"
            )
    try:
        return ScoredGroup(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=logprobs,
            versions=versions,
            lengths=tuple(trajectory.num_tokens for trajectory in group.trajectories),
            rewards=tuple(trajectory.reward for trajectory in group.trajectories),
            prompt_id=group.prompt_id,
            temperature=group.temperature,
            cut=tuple(trajectory.status is Status.TRUNCATED for trajectory in group.trajectories),
            teacher=_teacher_logprobs(teacher),
            extra=extra,
            loss_mask=loss_mask,
            kept=KeptTokens(kept[KEPT_COUNTS], kept[KEPT_IDS]) if kept else None,
            routing=Routing(experts[PROMPT_ROUTING], experts[ROUTING]) if experts else None,
            scores=group.scores,
            denoising=denoising,
        )
    except ConfigError as error:
        raise WireError(str(error)) from error


def _check_scores(group: ScoredGroup) -> None:
    for scorer in group.scores:
        if len(scorer.values) != len(group.lengths):
            raise ConfigError(
                f"group {group.prompt_id!r} has {len(group.lengths)} completions and {len(scorer.values)} scores of "
                f"{scorer.label!r}: give one score per completion"
            )
        for value in (scorer.weight, *scorer.values):
            if value is not None and not math.isfinite(value):
                raise ConfigError(
                    f"group {group.prompt_id!r} cannot be trained: a score of {scorer.label!r}, or its weight, is "
                    f"{value}"
                )


def _teacher_logprobs(tensors: Mapping[str, npt.NDArray[Any]]) -> TeacherLogprobs | None:
    if "teacher_logprobs" not in tensors:
        return None
    return TeacherLogprobs(
        tensors["teacher_logprobs"], tensors.get("teacher_top_ids"), tensors.get("teacher_top_logprobs")
    )


def _check_teacher(teacher: TeacherLogprobs | None, num_tokens: int, prompt_id: str) -> None:
    if teacher is None:
        return
    ids, logprobs = teacher.top_ids, teacher.top_logprobs
    fits = len(teacher.logprobs) == num_tokens and (ids is None) == (logprobs is None)
    if ids is not None and logprobs is not None:
        fits = fits and ids.shape == logprobs.shape and len(ids) == num_tokens
    if not fits:
        raise ConfigError(
            f"group {prompt_id!r} has {num_tokens} tokens and its teacher's data does not match them: "
            f"{len(teacher.logprobs)} log-probabilities, and likeliest tokens of shape "
            f"{[None if array is None else list(array.shape) for array in (ids, logprobs)]}"
        )
    if not all(np.isfinite(array).all() for array in (teacher.logprobs, logprobs) if array is not None):
        raise ConfigError(f"group {prompt_id!r} cannot be trained: a log-probability of its teacher is not finite")


def _check_mask(loss_mask: npt.NDArray[np.uint8] | None, num_tokens: int, prompt_id: str) -> None:
    if loss_mask is None:
        return
    if loss_mask.dtype != np.uint8 or loss_mask.shape != (num_tokens,):
        raise ConfigError(
            f"group {prompt_id!r} has {num_tokens} tokens and a loss mask {loss_mask.dtype}{list(loss_mask.shape)}: "
            "it must be uint8 with one entry per token"
        )
    if loss_mask.max(initial=0) > 1:
        raise ConfigError(f"group {prompt_id!r} has {loss_mask.max()} in its loss mask: 1 is sampled, 0 is not")


def _check_kept(group: ScoredGroup) -> None:
    if group.kept is None:
        return
    problem = kept_problem(group.kept, group.completion_ids, None if group.loss_mask is None else group.sampled)
    if problem:
        raise ConfigError(f"group {group.prompt_id!r} cannot be trained: {problem}")


def _check_routing(group: ScoredGroup, limits: ModelLimits | None) -> None:
    if group.routing is None:
        return
    sizes = None if limits is None else limits.experts
    problem = routing_problem(group.routing, len(group.prompt_ids), len(group.completion_ids), sizes)
    if problem:
        raise ConfigError(f"group {group.prompt_id!r} cannot be trained: {problem}")


def _array(prompt_id: str, meta: TensorMeta, form: TensorForm, frame: Any) -> npt.NDArray[Any]:
    size_bytes = memoryview(frame).nbytes
    fits = min(meta.shape, default=0) >= 0 and math.prod(meta.shape) * form.item_bytes == size_bytes
    if meta.dtype != form.dtype or len(meta.shape) != form.num_dims or not fits:
        raise WireError(
            f"group {prompt_id!r} describes a tensor {meta.dtype}{list(meta.shape)} in a buffer of {size_bytes} bytes; "
            f"expected {'one dimension' if form.num_dims == 1 else f'{form.num_dims} dimensions'} of {form.dtype}"
        )
    return np.frombuffer(frame, dtype=form.dtype).reshape(meta.shape)


def _check_extra(extra: Mapping[str, npt.NDArray[Any]], prompt_ids: IntArray, prompt_id: str) -> None:
    """Refuse images that do not match their grids: the model would spread them over other prompts."""
    if problem := media_problem(extra, prompt_ids):
        raise ConfigError(f"group {prompt_id!r} cannot be trained: {problem}")


def check_prompt(prompt_ids: IntArray, prompt_id: str) -> None:
    """Refuse an empty prompt. Raises ConfigError."""
    if not len(prompt_ids):
        raise ConfigError(
            f"prompt {prompt_id!r} has no tokens: give at least one, such as the beginning-of-sequence token"
        )

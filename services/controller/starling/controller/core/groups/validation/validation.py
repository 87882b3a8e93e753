"""Validation of what replicas report of a group, before any of it is stored.

A replica may be broken, or lie. What the journal holds is dispatched again after every restart, so a result that a
policy cannot read would end the run for good. Each check therefore runs before the record is written; what looks into
a tensor is one pass of numpy over it, and runs when the event of the message is made (`contents_problem`). What depends
on the model, as its vocabulary, is checked once a policy has reported its limits; a policy checks it again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from starling.algo.denoising import group_problem
from starling.algo.media import media_problem, pixel_problem, placeholders_in
from starling.algo.routing import Routing, experts_problem, routing_problem
from starling.algo.truncation import KeptTokens, kept_problem
from starling.common.ranges import MAX_METRIC_CHARACTERS, MAX_METRICS, MAX_REWARD, MAX_SCORE_CHARACTERS, MAX_SCORES
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.common.wire.messages import (
    GroupGenerated,
    GroupScored,
    MediaInputs,
    ModelLimits,
    Prompt,
    TensorMeta,
    TokensScored,
    TrajectoryMeta,
)
from starling.common.wire.tensors import (
    GROUP_TENSORS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_TENSORS,
    LOSS_MASK,
    MAX_KEPT_BYTES,
    MAX_ROUTING_BYTES,
    OUTER_DIMS,
    PIXEL_GRIDS,
    PROMPT_ROUTING,
    PROMPT_TENSORS,
    ROUTING,
    TEACHER_TENSORS,
    TensorForm,
    form_of,
)
from starling.controller.core.events import ContentsProblem, Received
from starling.controller.core.groups.validation.limits import OF_TRAINING, UNLIMITED, GroupLimits
from starling.controller.core.groups.validation.scores import TrainedScorer

Array = npt.NDArray[Any]
Buffers = Sequence[bytes]

MAX_METRIC: Final = 1e300
"""Largest absolute metric of an environment: the sum over all trajectories of a step is finite."""
MAX_TOKEN_CHARACTERS: Final = 256
"""Characters of a token, in the mean over a completion: the longest ones of tokenizers, runs of spaces, have half."""
MAX_TEXT_CHARACTERS: Final = 1 << 16
"""Further characters of a completion's texts."""
MAX_TRUNCATION_NATS: Final = 1e3
"""Larger than minus the logarithm of any positive float32."""
MAX_LOGPROB_NATS: Final = 1e6
"""Far more than minus the logarithm of the probability of any token, at any temperature of a recipe."""
HIGHEST_LOGPROB: Final = 1.0
"""Of a token: 0, and an error of rounding."""
INT32: Final = np.dtype(np.int32)
UINT32: Final = np.dtype(np.uint32)
NEGATIVE: Final = 1 << 31
"""The lowest of the negative numbers of 32 bits, read as unsigned ones."""
FLOAT32: Final = np.dtype(np.float32)
GROUP_NAMES: Final = ("token ids of the prompt", "token ids", "log-probabilities", "versions")
OF_TOKENS: Final = tuple((index, GROUP_TENSORS[index].dtype) for index in range(1, len(GROUP_TENSORS)))
"""Position and element type of the tensors with one entry for each token of the completions."""
MAX_TENSOR_BYTES: Final = 900_000_000
"""Largest tensor that is stored: a row of the journal's database has at most 10^9 bytes."""
COMPLETION_BYTES: Final = 128
"""Upper bound of what a `CompletionText` takes on the wire besides its text, and below a `ScoreGroup`."""
MESSAGE_BYTES: Final = 1024


class InvalidResultError(ValueError):
    """A result that cannot be used; one sentence."""

    is_malformed = True
    """No working replica sends it, whatever its model, its environment or its scorers give."""


class UnusableResultError(InvalidResultError):
    """A result that a working replica can send: its model, its environment or a scorer gave what cannot be used."""

    is_malformed = False


# --- completions ------------------------------------------------------------------------------------------------------


def check_trajectories(trajectories: Sequence[TrajectoryMeta], newest_version: int, prompt: Prompt) -> None:
    """Check the descriptions of trajectories, of which no token may be newer than `newest_version`.

    Raises:
        InvalidResultError: naming the first that is wrong.
    """
    num_characters = 0
    for index, one in enumerate(trajectories):
        _check_trajectory(index, one, newest_version)
        num_characters += len(one.text) + len(one.problem)
    # A character has at most four bytes, and a prompt at most three quarters of a message.
    if 4 * num_characters + len(trajectories) * COMPLETION_BYTES > MAX_MESSAGE_BYTES // 4 - MESSAGE_BYTES:
        _check_texts(trajectories, prompt)
    if num_characters > MAX_TEXT_CHARACTERS:
        _check_lengths_of_texts(trajectories)


def _check_trajectory(index: int, one: TrajectoryMeta, newest_version: int) -> None:
    """Check the numbers in the description of a trajectory. Raises InvalidResultError."""
    if not 0 <= one.num_masked <= one.num_tokens or one.num_turns < 0:
        raise InvalidResultError(
            f"completion {index} has {one.num_tokens} tokens, {one.num_masked} of them masked, in {one.num_turns} turns"
        )
    if not 0 <= one.oldest_version <= one.newest_version <= newest_version:
        raise InvalidResultError(
            f"completion {index} has tokens of versions {one.oldest_version} to {one.newest_version}, and the "
            f"newest that is published is {newest_version}"
        )
    if one.truncation_nats is not None and not abs(one.truncation_nats) <= MAX_TRUNCATION_NATS:
        raise InvalidResultError(f"the kept tokens of completion {index} have {one.truncation_nats} nats")
    if one.reward is not None and not abs(one.reward) <= MAX_REWARD:
        raise UnusableResultError(f"the environment gave completion {index} a reward of {one.reward}")
    if one.metrics:
        _check_metrics(one.metrics, f"completion {index}")


def check_num_sampled(numbers: Sequence[int], limit: int) -> None:
    """Check the numbers of sampled tokens of the completions of a group.

    An environment's tokens between them are masked and not counted; a policy checks the length of whole sequences.

    Raises:
        InvalidResultError: naming the first that is over the limit.
    """
    if not numbers or max(numbers) <= limit:  # `max` with a default takes four times as long
        return
    for index, number in enumerate(numbers):
        if number > limit:
            raise InvalidResultError(f"completion {index} has {number} sampled tokens, and {limit} were allowed")


def check_num_media(prompt: Prompt, tensors: Sequence[TensorMeta], limits: ModelLimits | None) -> None:
    """Check that a result has a grid for each image and each video of its prompt, by the shapes that it describes.

    Raises:
        InvalidResultError: naming how many came.
    """
    if not prompt.media:
        if not PROMPT_TENSORS.keys().isdisjoint([tensor.name for tensor in tensors]):
            raise InvalidResultError("it has images or videos, and its prompt has none")
        return
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.name in PROMPT_TENSORS}
    if shapes and limits is not None and limits.media is None:
        raise InvalidResultError("it has images or videos, and the model reads only text")
    for kind, grid in zip(("image", "video"), PIXEL_GRIDS.values(), strict=True):
        num = sum(media.kind == kind for media in prompt.media)
        came = shapes[grid][0] if shapes.get(grid) else 0
        if came != num:
            raise InvalidResultError(f"{grid} describes {came} {kind}s, and its prompt has {num}")


def _check_texts(trajectories: Sequence[TrajectoryMeta], prompt: Prompt) -> None:
    """Check that a scorer can be sent the texts together with the prompt."""
    num_bytes = sum(len(one.text.encode()) + COMPLETION_BYTES for one in trajectories)
    limit = MAX_MESSAGE_BYTES - MESSAGE_BYTES - len(msgspec.msgpack.encode(prompt))
    if num_bytes > limit:
        raise UnusableResultError(
            f"its completions have {num_bytes} bytes of text, and beside the prompt a message holds {limit}; lower "
            "sampling.max_tokens or rl.group_size"
        )


def _check_lengths_of_texts(trajectories: Sequence[TrajectoryMeta]) -> None:
    """Check that the texts of completions are no longer than their tokens can be: the controller holds the texts of all
    groups of some steps."""
    for index, one in enumerate(trajectories):
        most, num = MAX_TOKEN_CHARACTERS * one.num_tokens + MAX_TEXT_CHARACTERS, len(one.text) + len(one.problem)
        if num > most:
            raise UnusableResultError(
                f"completion {index} has {one.num_tokens} tokens and {num} characters of text; {most} are possible"
            )


def check_group_forms(trajectories: Sequence[TrajectoryMeta], tensors: Sequence[TensorMeta], buffers: Buffers) -> None:
    """Check the element types, shapes and sizes of the tensors of a generated group.

    Raises:
        InvalidResultError: naming the first that is wrong.
    """
    num = len(tensors)
    if num < len(GROUP_TENSORS) or len(buffers) != num:
        raise InvalidResultError(
            f"{num} tensors came in {len(buffers)} buffers instead of {len(GROUP_TENSORS)} or more"
        )
    _check_no_names(tensors[: len(GROUP_TENSORS)])
    total = sum([one.num_tokens for one in trajectories])
    shape, size_bytes = (total,), 4 * total
    for index, dtype in OF_TOKENS:
        meta = tensors[index]
        if meta.shape != shape or meta.dtype != dtype or not meta.nbytes == len(buffers[index]) == size_bytes:
            _check_form(GROUP_NAMES[index], GROUP_TENSORS[index], meta, buffers[index])
            raise InvalidResultError(
                f"its completions have {total} tokens, and {meta.shape[0]} {GROUP_NAMES[index]} came"
            )
    _check_form(GROUP_NAMES[0], GROUP_TENSORS[0], tensors[0], buffers[0])
    if not buffers[0]:
        raise InvalidResultError("its prompt has no tokens")
    if num > len(GROUP_TENSORS) or size_bytes + len(buffers[0]) > MAX_TENSOR_BYTES:
        _check_sizes(buffers)
        _named(tensors[len(GROUP_TENSORS) :], buffers[len(GROUP_TENSORS) :])


def check_group_contents(
    trajectories: Sequence[TrajectoryMeta],
    tensors: Sequence[TensorMeta],
    buffers: Buffers,
    limits: ModelLimits | None,
    *,
    is_trained: bool = True,
) -> None:
    """Check what the tensors of a generated group, whose forms are right, hold.

    Args:
        trajectories: of the group.
        tensors: of the group.
        buffers: of the group.
        limits: of the model; None if they are not known.
        is_trained: a step trains it; evaluations of a diffusion model follow other steps than those that are trained.

    Raises:
        InvalidResultError: naming the first that is wrong.
    """
    num = len(GROUP_TENSORS)
    named = _named(tensors[num:], buffers[num:]) if len(tensors) > num else {}
    mask = named.get(LOSS_MASK)
    prompt, tokens = np.frombuffer(buffers[0], UINT32), np.frombuffer(buffers[1], UINT32)
    _check_ids(prompt, None, limits)
    _check_ids(tokens, mask, limits)
    # The densities of the steps of trajectories are above 1 where these add little noise.
    highest = MAX_LOGPROB_NATS if named.keys() & OUTER_DIMS.keys() else HIGHEST_LOGPROB
    _check_logprobs("", np.frombuffer(buffers[2], FLOAT32), highest)
    _check_mask(trajectories, mask, len(tokens))
    _check_versions(trajectories, buffers[3], mask)
    if named:
        _check_kept(named, tokens.view(INT32), mask, limits)
        _check_routing(named, len(prompt), len(tokens), limits)
    if limits is not None and (named or limits.denoising is not None):
        lengths = [one.num_tokens for one in trajectories]
        problem = group_problem(named, lengths, tokens.view(INT32), limits.denoising, is_trained=is_trained)
        if problem:
            raise InvalidResultError(problem)
    inputs = limits.media if limits is not None else None
    if named or inputs is not None:
        _check_media(named, prompt.view(INT32), tokens.view(INT32), inputs)


def _check_ids(ids: Array, mask: Array | None, limits: ModelLimits | None) -> None:
    """Check that ids are not negative, and in the vocabulary if it is known. `mask`: which were sampled; None for all.

    `ids`: as unsigned numbers, so that negative ones are above all others.
    """
    if not ids.size:
        return
    largest, end = ids.item(ids.argmax()), (limits is not None and limits.vocabulary_size) or NEGATIVE
    if largest < end:
        return
    if largest >= NEGATIVE:
        raise InvalidResultError("it has a negative token id")
    _refuse_ids(ids >= end, mask, f"it has token id {largest}, and the model has {end} token ids")


def _refuse_ids(wrong: Array, mask: Array | None, problem: str) -> None:
    """Raise for wrong ids: no working replica samples one, but the text of an environment may contain some."""
    if mask is not None and len(mask) == len(wrong) and not mask[wrong].any():
        raise UnusableResultError(f"{problem}: an environment gave it")
    raise InvalidResultError(problem)


def _named(tensors: Sequence[TensorMeta], buffers: Buffers) -> dict[str, Array]:
    """Return tensors by name: those of a group or of partial completions that follow the ones without a name."""
    arrays: dict[str, Array] = {}
    for meta, buffer in zip(tensors, buffers, strict=True):
        form = form_of(meta.name, meta.dtype, len(meta.shape))
        if form is None or meta.name in arrays:
            raise InvalidResultError(f"a tensor {meta.name[:MAX_METRIC_CHARACTERS]!r} came, or came twice")
        arrays[meta.name] = _array(meta.name, form, meta, buffer)
    return arrays


def _check_no_names(tensors: Sequence[TensorMeta]) -> None:
    """Check that tensors that their position identifies have no names: they go on to the policy as they came."""
    for meta in tensors:
        if meta.name:
            raise InvalidResultError(f"a tensor without a name is called {meta.name[:MAX_METRIC_CHARACTERS]!r}")


def _check_form(name: str, form: TensorForm, meta: TensorMeta, buffer: bytes) -> None:
    """Check that a tensor has this form, and a shape that an array can have, also where it has no element."""
    fits = meta.dtype == form.dtype and len(meta.shape) == form.num_dims
    fits = fits and min(meta.shape) >= 0 and max(meta.shape) <= MAX_TENSOR_BYTES
    if not fits or not meta.nbytes == len(buffer) == math.prod(meta.shape) * form.item_bytes:
        raise InvalidResultError(
            f"the tensor of {name} is {meta.dtype[:20]}{list(meta.shape[:9])} in {len(buffer)} bytes instead of "
            f"{form.dtype} of {form.num_dims} dimensions"
        )


def _check_sizes(buffers: Buffers) -> None:
    """Check that the journal can store these tensors."""
    largest = max(map(len, buffers), default=0)
    if largest > MAX_TENSOR_BYTES:
        raise UnusableResultError(f"a tensor of {largest} bytes came, and the journal stores up to {MAX_TENSOR_BYTES}")


def _array(name: str, form: TensorForm, meta: TensorMeta, buffer: bytes) -> Array:
    """Return a tensor without copying it, after a check of its form."""
    _check_form(name, form, meta, buffer)
    array: Array = np.frombuffer(buffer, form.dtype)
    return array if form.num_dims == 1 else array.reshape(meta.shape)


def _check_logprobs(whose: str, array: Array, upper: float = HIGHEST_LOGPROB) -> None:
    """Check log-probabilities. In a run with a teacher, the differences between its own and those of the rollout become
    advantages, whose squares must be finite: otherwise no step of a group with them would change the weights."""
    if not array.size:
        return
    flat = array if array.ndim == 1 else array.reshape(-1)
    # NaN is both the smallest and the largest element. The positions take less time than the extremes themselves.
    lowest, highest = flat.item(flat.argmin()), flat.item(flat.argmax())
    if lowest >= -MAX_LOGPROB_NATS and highest <= upper:
        return
    if not np.isfinite(flat).all():
        raise UnusableResultError(f"a log-probability{whose} is not finite")
    raise UnusableResultError(
        f"the log-probabilities{whose} are from {lowest} to {highest}, and {-MAX_LOGPROB_NATS:g} to "
        f"{upper if upper > HIGHEST_LOGPROB else 0:g} are usable"
    )


def _check_mask(trajectories: Sequence[TrajectoryMeta], mask: Array | None, total: int) -> None:
    if mask is None:
        for one in trajectories:
            if one.num_masked:
                raise InvalidResultError("some of its tokens are masked, and no mask came")
        return
    if len(mask) != total or (total and np.maximum.reduce(mask) > 1):
        raise InvalidResultError(f"a mask of {len(mask)} entries, 0 or 1, came with {total} tokens")
    begin = 0
    for index, one in enumerate(trajectories):
        end = begin + one.num_tokens
        num_masked = one.num_tokens - int(np.count_nonzero(mask[begin:end]))
        if num_masked != one.num_masked:
            raise InvalidResultError(f"completion {index} has {one.num_masked} masked tokens, its mask {num_masked}")
        begin = end


def _check_kept(named: Mapping[str, Array], tokens: Array, mask: Array | None, limits: ModelLimits | None) -> None:
    """Check the kept tokens of truncated sampling, where they were recorded."""
    counts, ids = named.get(KEPT_COUNTS), named.get(KEPT_IDS)
    if counts is None and ids is None:
        return
    if counts is None or ids is None:
        raise InvalidResultError(f"one of {KEPT_COUNTS} and {KEPT_IDS} came without the other")
    if ids.nbytes > MAX_KEPT_BYTES:
        raise UnusableResultError(
            f"its kept tokens take {ids.nbytes} bytes, and {MAX_KEPT_BYTES} are allowed; lower sampling.top_k or "
            "sampling.max_tokens"
        )
    if problem := kept_problem(KeptTokens(counts, ids), tokens, None if mask is None else mask == 1):
        raise InvalidResultError(problem)
    _check_ids(ids.view(UINT32), None, limits)


def _check_routing(named: Mapping[str, Array], num_prompt: int, num_tokens: int, limits: ModelLimits | None) -> None:
    """Check the experts of the tokens, where they were recorded."""
    prompt, completions = named.get(PROMPT_ROUTING), named.get(ROUTING)
    if prompt is None and completions is None:
        return
    if prompt is None or completions is None:
        raise InvalidResultError(f"one of {PROMPT_ROUTING} and {ROUTING} came without the other")
    _check_routing_size(prompt.nbytes + completions.nbytes)
    sizes = None if limits is None else limits.experts
    if problem := routing_problem(Routing(prompt, completions), num_prompt, num_tokens, sizes):
        raise InvalidResultError(problem)


def _check_routing_size(num_bytes: int) -> None:
    if num_bytes > MAX_ROUTING_BYTES:
        raise UnusableResultError(
            f"the experts of its tokens take {num_bytes} bytes, and {MAX_ROUTING_BYTES} are allowed; lower "
            "sampling.max_tokens or rl.group_size"
        )


def _check_versions(trajectories: Sequence[TrajectoryMeta], encoded: bytes, mask: Array | None) -> None:
    """Check that each trajectory names the oldest and the newest version of its sampled tokens."""
    if not encoded:
        return
    first = bytes(encoded[:4])
    if encoded == first * (len(encoded) // 4):  # all are equal, as nearly always
        lowest, fits = _version(first), True
        for one in trajectories:
            if one.oldest_version != lowest or one.newest_version != lowest:
                fits &= one.num_tokens == one.num_masked
    else:
        fits = _have_versions(trajectories, encoded, mask)
    if not fits:
        raise InvalidResultError("the versions of its tokens are not those that its completions name")


def _have_versions(trajectories: Sequence[TrajectoryMeta], encoded: bytes, mask: Array | None) -> bool:
    """Say whether the tokens of a group, which are of several versions, have those that its trajectories name."""
    fits, begin, extremes = True, 0, list[int]()
    found: tuple[int, ...]
    sampled: tuple[int, ...]
    for one in trajectories:
        end = begin + one.num_tokens
        part = bytes(encoded[4 * begin : 4 * end])
        # Most completions are of one version, and numpy takes longer. Of a malformed group no count is right.
        if part == part[:4] * (len(part) // 4):
            found = (_version(part[:4]),) if part else ()
            sampled = found if one.num_tokens > one.num_masked else ()
        else:
            versions = np.frombuffer(part, INT32)
            found = sampled = versions.item(versions.argmin()), versions.item(versions.argmax())
            if mask is not None:
                of_model = versions[mask[begin:end] == 1]
                sampled = (int(of_model.min()), int(of_model.max())) if len(of_model) else ()
        if sampled:
            fits &= (sampled[0], sampled[-1]) == (one.oldest_version, one.newest_version)
        extremes += found
        begin = end
    oldest, newest = min(one.oldest_version for one in trajectories), max(one.newest_version for one in trajectories)
    return fits and bool(extremes) and oldest <= min(extremes) and max(extremes) <= newest


def _version(encoded: bytes) -> int:
    return int.from_bytes(encoded, sys.byteorder, signed=True)


def _check_media(named: Mapping[str, Array], prompt: Array, tokens: Array, inputs: MediaInputs | None) -> None:
    """Check that images and videos match the grids that describe them, the prompt, and the model where it is known."""
    tensors = {name: array for name, array in named.items() if name in PROMPT_TENSORS}
    # Where the completions of a group begin with the same text of an environment, that text is part of the prompt.
    if not tensors and placeholders_in(prompt, inputs).any():
        raise UnusableResultError(
            "the prompt is text and has a placeholder token of images or videos: an environment or the dataset gave "
            "it; leave these tokens out of texts"
        )
    if problem := media_problem(tensors, prompt, inputs):
        raise InvalidResultError(problem)
    if problem := pixel_problem(tensors):
        raise UnusableResultError(problem)
    if inputs is not None and (wrong := placeholders_in(tokens, inputs)).any():
        problem = "a completion has a placeholder token of images or videos"
        _refuse_ids(wrong, named.get(LOSS_MASK), problem)


def check_partial_tensors(
    total: int, tensors: Sequence[TensorMeta], buffers: Buffers, limits: ModelLimits | None
) -> Array:
    """Check the tensors of partial completions of `total` tokens, and return the versions of the tokens.

    Raises:
        InvalidResultError: naming the first that is wrong.
    """
    if limits is not None and limits.denoising is not None:
        raise InvalidResultError("partial completions came, and denoising trajectories cannot be resumed")
    forms = GROUP_TENSORS[1:]
    further = {len(KEPT_TENSORS) * with_kept + with_experts for with_kept in (0, 1) for with_experts in (0, 1)}
    if len(tensors) - len(forms) not in further or len(buffers) != len(tensors):
        raise InvalidResultError(f"{len(tensors)} tensors came in {len(buffers)} buffers instead of {len(forms)}")
    _check_sizes(buffers)
    own = slice(0, len(forms))
    _check_no_names(tensors[own])
    tokens, logprobs, versions = map(_array, GROUP_NAMES[1:], forms, tensors[own], buffers[own])
    if not len(tokens) == len(logprobs) == len(versions) == total:
        raise InvalidResultError(f"{[len(tokens), len(logprobs), len(versions)]} entries came with {total} tokens")
    _check_ids(tokens.view(UINT32), None, limits)
    if limits is not None and placeholders_in(tokens, limits.media).any():
        raise InvalidResultError("a completion has a placeholder token of images or videos")
    _check_logprobs("", logprobs)
    named = _named(tensors[len(forms) :], buffers[len(forms) :])
    if named.keys() - {*KEPT_TENSORS, ROUTING}:
        raise InvalidResultError(f"tensors {', '.join(named)} came with partial completions")
    _check_kept(named, tokens, None, limits)
    if (experts := named.get(ROUTING)) is not None:
        _check_routing_size(experts.nbytes)
        if problem := experts_problem(experts, total, None if limits is None else limits.experts):
            raise InvalidResultError(problem)
    return versions


# --- rewards and teacher log-probabilities ----------------------------------------------------------------------------


def check_rewards(message: GroupScored, num: int, num_scorers: int) -> None:
    """Check the rewards of a group of `num` completions, none of which has failed. `num_scorers`: of the recipe.

    Raises:
        InvalidResultError: naming the first value that is wrong.
    """
    if not len(message.rewards) == len(message.statuses) == num:
        raise InvalidResultError(f"{len(message.rewards)} rewards and {len(message.statuses)} statuses came of {num}")
    for reward in message.rewards:
        if reward is None or not abs(reward) <= MAX_REWARD:
            raise UnusableResultError(f"a reward is {reward}")
    most, came = max(MAX_SCORES, num_scorers), max(len(message.components), len(message.evaluation_scores))
    if came > most:
        raise InvalidResultError(
            f"{came} scores came, and {most} are allowed; start the reward replicas with the recipe of the controller"
        )
    for name, values in (*message.components.items(), *message.evaluation_scores.items()):
        if len(name) > MAX_SCORE_CHARACTERS or len(values) != num:
            raise InvalidResultError(f"{len(values)} scores of {name[:MAX_SCORE_CHARACTERS]!r} came of {num}")
    for name, values in message.components.items():
        for value in values:
            if value is not None and not abs(value) <= MAX_REWARD:
                raise UnusableResultError(f"a score of {name} is {value}")


def usable_scores(scores: Mapping[str, Sequence[float | None]]) -> dict[str, tuple[float | None, ...]]:
    """Return evaluation scores without the numbers that are too large or none: these have failed, and cost no group."""
    return {
        name: tuple(value if value is not None and abs(value) <= MAX_REWARD else None for value in values)
        for name, values in scores.items()
    }


def check_scores(message: GroupScored, scorers: Sequence[TrainedScorer], prompt: Prompt) -> None:
    """Check that each completion of `prompt` has a score by each of `scorers` that scores it.

    Raises:
        UnusableResultError: naming the scorer whose score is missing.
    """
    for scorer in scorers:
        if scorer.scores(prompt) and None in message.components.get(scorer.label, (None,)):
            raise UnusableResultError(
                f"it has a reward and no score of {scorer.label!r}, which counts in the reward; start the reward "
                "replicas with the recipe of the controller"
            )


def _check_metrics(metrics: Mapping[str, float], whose: str) -> None:
    if len(metrics) > MAX_METRICS or max(map(len, metrics)) > MAX_METRIC_CHARACTERS:  # fewer are stored: `MetricNames`
        raise UnusableResultError(f"{whose} has {len(metrics)} metrics, or one with a name of many characters")
    for name, value in metrics.items():
        if not abs(value) <= MAX_METRIC:
            raise UnusableResultError(f"{whose} has {value} as its metric {name}")


def check_teacher_names(total: int, tensors: Sequence[TensorMeta], top_k: int | None = None) -> None:
    """Check which tensors a teacher sent of a group of `total` tokens. `top_k`: `teacher.top_k`; None if not known.

    A policy cannot train a step of which some groups have fewer likeliest tokens than others.

    Raises:
        InvalidResultError: naming what it sent.
    """
    names = tuple(tensor.name for tensor in tensors)
    wanted = tuple(TEACHER_TENSORS)
    if names not in (wanted[:1], wanted) or any(tensor.shape[:1] != (total,) for tensor in tensors):
        shapes = ", ".join(f"{tensor.name[:40]} {tensor.shape[:9]}" for tensor in tensors[:9]) or "nothing"
        raise InvalidResultError(f"its teacher sent {shapes}, and it has {total} tokens")
    num_top = tensors[1].shape[1] if len(tensors) > 1 and len(tensors[1].shape) > 1 else 0
    if top_k is not None and num_top != top_k:
        raise InvalidResultError(
            f"its teacher sent the {num_top} likeliest tokens at each position, and teacher.top_k is {top_k}"
        )


def teacher_arrays(tensors: Sequence[TensorMeta], buffers: Buffers) -> list[Array]:
    """Return a teacher's tensors, after a check of their forms and sizes.

    Raises:
        InvalidResultError: naming the first that is wrong.
    """
    if len(buffers) != len(tensors) or any(tensor.name not in TEACHER_TENSORS for tensor in tensors):
        raise InvalidResultError(f"its teacher sent {len(tensors)} tensors in {len(buffers)} buffers, or unknown ones")
    _check_sizes(buffers)
    arrays = [_array(m.name, TEACHER_TENSORS[m.name], m, buffer) for m, buffer in zip(tensors, buffers, strict=True)]
    if len(arrays) == len(TEACHER_TENSORS):
        _, ids, logprobs = arrays
        if ids.shape != logprobs.shape or ids.ndim != logprobs.ndim or not ids.shape[-1]:
            raise InvalidResultError(f"its teacher sent likeliest tokens {ids.shape} and {logprobs.shape}")
    return arrays


# --- the contents of tensors ------------------------------------------------------------------------------------------


def contents_problem(
    message: object, buffers: Buffers, sizes: GroupLimits, limits: ModelLimits | None
) -> ContentsProblem | None:
    """Return what is wrong with the tensors of a result, or None.

    Their forms and their sizes come first: of a group that is larger than allowed no element is looked at.

    This runs when the event of a message is made (`core/groups/arrival.py`): recordings of events have no tensors.
    """
    try:
        if isinstance(message, GroupGenerated):
            check_group_forms(message.trajectories, message.tensors, buffers)
            _require_fit(sizes.group_problem(message, limits))
            check_group_contents(
                message.trajectories, message.tensors, buffers, limits, is_trained=message.lease.startswith(OF_TRAINING)
            )
        elif isinstance(message, TokensScored):
            _require_fit(sizes.teacher_problem(message.tensors))
            _check_teacher_contents(teacher_arrays(message.tensors, buffers), limits)
    except InvalidResultError as error:
        return ContentsProblem(str(error), error.is_malformed)
    return None


def _check_teacher_contents(arrays: Sequence[Array], limits: ModelLimits | None = None) -> None:
    for array in arrays:
        if array.dtype == np.int32:
            _check_ids(array.reshape(-1).view(UINT32), None, limits)
        else:
            _check_logprobs(" of its teacher", array)


def _require_fit(problem: str) -> None:
    if problem:
        raise UnusableResultError(problem)


def check_contents(event: Received, sizes: GroupLimits, limits: ModelLimits | None) -> None:
    """Check the tensors of a result, unless that was done when its event was made.

    Raises:
        InvalidResultError: as `contents_problem`.
    """
    problem = event.problem if event.is_checked else contents_problem(event.message, event.buffers, sizes, limits)
    if problem is not None:
        raise (InvalidResultError if problem.is_malformed else UnusableResultError)(problem.reason)


# --- stored groups ----------------------------------------------------------------------------------------------------


def check_stored(
    trajectories: Sequence[TrajectoryMeta],
    tensors: Sequence[TensorMeta],
    buffers: Buffers,
    rewards: Sequence[float | None],
    *,
    contents: bool = False,
) -> None:
    """Check the forms of a group of the journal, which an older controller may have stored unchecked.

    `contents`: also check all numbers, as of a file that may be anyone's.

    Raises:
        InvalidResultError: naming what a policy could not train.
    """
    for index, one in enumerate(trajectories if contents else ()):
        _check_trajectory(index, one, UNLIMITED)
    if len(tensors) != len(buffers):
        raise InvalidResultError(f"it has {len(tensors)} tensors and {len(buffers)} buffers")
    of_teacher = [index for index, meta in enumerate(tensors) if meta.name in TEACHER_TENSORS]
    own = [index for index in range(len(tensors)) if index not in of_teacher]
    own_tensors, own_buffers = [tensors[i] for i in own], [buffers[i] for i in own]
    check_group_forms(trajectories, own_tensors, own_buffers)
    if contents:
        check_group_contents(trajectories, own_tensors, own_buffers, None)
    if of_teacher:
        of_tokens = [tensors[i] for i in of_teacher]
        check_teacher_names(sum(one.num_tokens for one in trajectories), of_tokens)
        arrays = teacher_arrays(of_tokens, [buffers[i] for i in of_teacher])
        if contents:
            _check_teacher_contents(arrays)
    if rewards and (len(rewards) != len(trajectories) or any(r is None or not abs(r) <= MAX_REWARD for r in rewards)):
        raise InvalidResultError(f"its rewards are {list(rewards)[:9]}")

"""Scorers of whole batches: classes of the user, and how functions of one completion are called like them.

class Brevity:
    keys = ("brevity", "length")          # names of its scores; by default one, "score"
    scope = "pointwise"                   # or "groupwise": a batch is all completions of one prompt
    batch_size = 16                       # most samples of a batch, if pointwise; by default 1
    media = "text"                        # or "pixels", "latents", "token_ids": what it reads besides the texts

    def __init__(self, limit=256): ...    # the options of the recipe
    def setup(self): ...                  # once in each worker, before the first batch
    def score(self, batch): ...           # returns {key: [a number or None for each sample]}
"""

from __future__ import annotations

import errno
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from starling.common.errors import ConfigError
from starling.common.raised import describe_raised, plain_text
from starling.common.wire.messages import CompletionText
from starling.reward.core.media import INPUTS, Input
from starling.reward.core.samples import PromptText

if TYPE_CHECKING:  # a worker imports numpy only for scorers that read media
    import numpy as np
    import numpy.typing as npt

    from starling.reward.score.scorers.pixel_output import PixelOutput

Scope = Literal["pointwise", "groupwise"]
SCORE: Final = "score"
"""Key of a scorer that names none."""
MAX_KEYS: Final = 64
MAX_BATCH: Final = 1024
MAX_KEY_CHARACTERS: Final = 100


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that a scorer judges at once. Each field has one element for each sample."""

    completions: tuple[str, ...]
    references: tuple[str, ...]
    prompts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]
    num_tokens: tuple[int, ...]
    """Sampled tokens."""
    statuses: tuple[str, ...]
    """``ok``, or ``truncated`` where the length limit ended it."""
    rewards: tuple[float | None, ...]
    """The environment's reward; None without one."""
    pixels: tuple[npt.NDArray[np.uint8], ...] = ()
    """Of scorers that read pixels: each [T, H, W, 3], red, green, blue, read-only; an image has T = 1."""
    latents: tuple[npt.NDArray[np.float32], ...] = ()
    """Of scorers that read latents: each [C, T, H, W], read-only."""
    token_ids: tuple[npt.NDArray[np.int32], ...] = ()
    """Of scorers that read token ids: those of each completion, read-only."""
    fps: tuple[float, ...] = ()
    """Of scorers that read pixels or latents: frames per second of the pixels; 0 if not known."""
    outputs: tuple[PixelOutput, ...] = ()
    """Of the decoder of latents only: where the pixels are to be written."""

    def __len__(self) -> int:
        return len(self.completions)


class BatchScores(msgspec.Struct, frozen=True, array_like=True):
    """What a scorer returned for a batch."""

    values: tuple[tuple[float | None, ...], ...]
    """Of each sample its scores in the order of the scorer's keys; None where it has none."""
    problems: tuple[str, ...]
    """Of each sample the reason why a score is missing, as the end of a sentence; empty if none is."""
    is_exhausted: bool = False
    """Whether memory or processes did not suffice. The worker ends then, with what has taken them."""


class ScorerForm(NamedTuple):
    """How a scorer is called."""

    keys: tuple[str, ...] = (SCORE,)
    scope: Scope = "pointwise"
    batch_size: int = 1
    media: Input = "text"
    """What it reads of the samples, besides the texts."""
    is_function: bool = False
    """It judges one completion at a time, so that a call may be of any number of them."""


class MediaArray(NamedTuple):
    """Media of one sample."""

    array: Any
    """numpy's array, read-only."""
    fps: float
    """Frames per second of the pixels; 0 if not known."""
    output: PixelOutput | None = None
    """Of latents that are to be decoded: where their pixels are to be written."""


class LoadedScorer(NamedTuple):
    """A scorer that is ready to score."""

    form: ScorerForm
    score: Callable[[Sequence[tuple[PromptText, CompletionText]], Sequence[MediaArray]], BatchScores]
    """From samples, and the media of each if it reads some, to their scores."""


class _InvalidResultError(Exception):
    """A scorer returned no scores; the text is the end of a sentence."""


Samples = Sequence[tuple[PromptText, CompletionText]]
Media = Sequence[MediaArray]


def function_scorer(function: Callable[..., float], fields: tuple[str, ...]) -> LoadedScorer:
    """Return the scorer that calls a function of one completion.

    Args:
        function: takes the completion, the reference, the prompt, its metadata, and `fields` by name.
        fields: of the completion.
    """

    def one(prompt: PromptText, completion: CompletionText) -> float | None:
        more = {name: getattr(completion, name) for name in fields}
        return _number(function(completion.text, prompt.reference, prompt.text, prompt.metadata, **more))

    def score(samples: Samples, media: Media = ()) -> BatchScores:
        values, problems, is_exhausted = list[tuple[float | None, ...]](), list[str](), False
        for sample in samples:
            try:
                values.append((one(*sample),))
                problems.append("")
            except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
                values.append((None,))
                problems.append(_problem(error))
                is_exhausted = is_exhausted or _is_exhaustion(error)
        return BatchScores(tuple(values), tuple(problems), is_exhausted)

    return LoadedScorer(ScorerForm(is_function=True), score)


def class_scorer(name: str, scorer: Any) -> LoadedScorer:
    """Return the scorer of an instance of a user's class.

    Args:
        name: of the scorer, for errors.
        scorer: the instance; its `setup` has been called.

    Raises:
        ConfigError: what it declares is not valid.
    """
    form = _form_of(name, scorer)

    def score(samples: Samples, media: Media = ()) -> BatchScores:
        try:
            batch = _batch(samples)
            if media:
                batch = _with_media(batch, form.media, media)
            columns, reasons = _columns(scorer.score(batch), form.keys, len(samples))
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, even SystemExit
            nothing = ((None,) * len(form.keys),) * len(samples)
            return BatchScores(nothing, (_problem(error),) * len(samples), _is_exhaustion(error))
        rows = tuple(zip(*columns, strict=True))
        problems = (
            reason or ("returned None" if None in row else "") for row, reason in zip(rows, reasons, strict=True)
        )
        return BatchScores(rows, tuple(problems))

    return LoadedScorer(form, score)


def _form_of(name: str, scorer: Any) -> ScorerForm:
    """Return how a user's scorer is called. Raises ConfigError."""
    default = ScorerForm()
    keys, scope, batch_size, media = (
        getattr(scorer, field, getattr(default, field)) for field in ("keys", "scope", "batch_size", "media")
    )
    return checked_form(name, keys, scope, batch_size, media, is_function=False)


def checked_form(name: str, keys: Any, scope: Any, batch_size: Any, media: Any, is_function: bool) -> ScorerForm:
    """Return the form of scorer `name`, if what it declares is one. Raises ConfigError."""
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"Scorer {name!r}: its `keys` must be 1 to {MAX_KEYS} names, not {keys!r}.")
    for key in keys:
        if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_CHARACTERS or "+" in key:
            raise ConfigError(f"Scorer {name!r}: the key {key!r} must be a short text without '+'.")
    if len(set(keys)) < len(keys):
        raise ConfigError(f"Scorer {name!r}: its `keys` {tuple(keys)} must differ.")
    if scope not in ("pointwise", "groupwise"):
        raise ConfigError(f"Scorer {name!r}: its `scope` must be 'pointwise' or 'groupwise', not {scope!r}.")
    if type(batch_size) is not int or not 1 <= batch_size <= MAX_BATCH:
        raise ConfigError(f"Scorer {name!r}: its `batch_size` must be 1 to {MAX_BATCH}, not {batch_size!r}.")
    if media not in INPUTS:
        known = ", ".join(map(repr, INPUTS))
        raise ConfigError(f"Scorer {name!r}: its `media` must be one of {known}, not {media!r}.")
    return ScorerForm(tuple(keys), scope, batch_size, media, is_function)


def _batch(samples: Samples) -> Batch:
    completions = [completion for _, completion in samples]
    return Batch(
        completions=tuple(one.text for one in completions),
        references=tuple(prompt.reference for prompt, _ in samples),
        prompts=tuple(prompt.text for prompt, _ in samples),
        metadata=tuple(prompt.metadata for prompt, _ in samples),
        num_tokens=tuple(one.num_tokens for one in completions),
        statuses=tuple(str(one.status) for one in completions),
        rewards=tuple(one.reward for one in completions),
    )


def _with_media(batch: Batch, kind: Input, media: Media) -> Batch:
    arrays, fps = tuple(one.array for one in media), tuple(one.fps for one in media)
    if kind == "token_ids":
        return replace(batch, token_ids=arrays)
    if kind == "pixels":
        return replace(batch, pixels=arrays, fps=fps)
    outputs = tuple(one.output for one in media if one.output is not None)
    return replace(batch, latents=arrays, fps=fps, outputs=outputs)


def _columns(returned: object, keys: tuple[str, ...], num: int) -> tuple[list[list[float | None]], list[str]]:
    """Return the scores by key, of `num` samples, and of each the reason that it has in place of a number.

    Raises:
        _InvalidResultError: they are no scores.
    """
    if not isinstance(returned, Mapping):
        raise _InvalidResultError(f"returned a {type(returned).__name__}, not a dictionary of scores by key")
    if set(returned) != set(keys):
        raise _InvalidResultError(f"returned the keys {sorted(map(str, returned))}, not {sorted(keys)}")
    columns, reasons = list[list[float | None]](), [""] * num
    for key in keys:
        values = returned[key]
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or len(values) != num:
            raise _InvalidResultError(f"returned no list of {num} scores as {key!r}")
        columns.append([None if value is None or isinstance(value, str) else _number(value) for value in values])
        for index, value in enumerate(values):
            if isinstance(value, str):
                reasons[index] = reasons[index] or f"gave no score: {plain_text(value)}"
    return columns, reasons


def _number(value: object) -> float:
    """Return a score as a float. Raises _InvalidResultError when it is not a finite number."""
    if not isinstance(value, Real):
        raise _InvalidResultError(f"returned a {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise _InvalidResultError(f"returned {number}")
    return number


def _problem(error: BaseException) -> str:
    """Return the end of a sentence about what a scorer raised, or why its result is invalid."""
    if isinstance(error, _InvalidResultError):
        return str(error)
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if isinstance(error, MemoryError) and limit != resource.RLIM_INFINITY:
        return f"exceeded its limit of {limit >> 20} MiB"
    return f"raised {describe_raised(error)}"


def _is_exhaustion(error: BaseException) -> bool:
    """Return whether a scorer could get no memory, process or thread."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("can't start new thread")
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.EAGAIN)

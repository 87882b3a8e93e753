"""Preparation of prompts: token ids and, in threads so that sampling continues, the tensors of images and videos.

For a diffusion model every prompt is prepared in these threads, because its text encoders take seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from starling.common.errors import StarlingError
from starling.common.wire.messages import GenerateGroup, Prompt, Wait

log = structlog.get_logger(__name__)

NUM_THREADS = 2
"""Two, so that a file system that hangs leaves one."""
Encode = Callable[[Prompt], tuple[list[int], Mapping[str, Any]]]
"""Returns a prompt's token ids and tensors."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt in the form of the engine, or the problem with it."""

    message: GenerateGroup
    ids: list[int] = field(default_factory=list)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(slots=True)
class _Reading:
    """One prompt for a thread, queued or being read."""

    since: float
    """When it was queued or, once a thread reads it, when that began."""
    begun: bool = False
    future: Future[PreparedPrompt] | None = None


class PromptPreparation:
    """The prompts that are being prepared.

    Args:
        encode: returns a prompt's token ids and tensors; called in any thread.
        put: takes each `PreparedPrompt` of a prompt that a thread prepares.
        timeout_s: limit on preparing a prompt in a thread, from when that begins. A queued prompt may wait as long
            as those before it take, unless no thread begins anything for that time: then all threads hang. The lease's
            deadline, set by the controller, applies in any case.
        product: what the threads prepare, named in errors.
        has_texts: threads prepare every prompt, and not only those with media.
    """

    def __init__(
        self,
        encode: Encode,
        put: Callable[[object], None],
        timeout_s: float,
        *,
        product: str = "images and videos",
        has_texts: bool = False,
    ) -> None:
        self._product, self._has_texts = product, has_texts
        self._encode, self._put, self._timeout_s = encode, put, timeout_s
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prepare")
        self._readings: dict[str, _Reading] = {}
        self._last_begun = float("-inf")
        """When a thread last began to read."""

    def begin(self, message: GenerateGroup) -> PreparedPrompt | None:
        """Prepare the prompt of `message`: a text at once, unless threads prepare it; their result is `put` later."""
        if not message.prompt.media and not self._has_texts:
            return self._prepare(message)
        reading = self._readings[message.lease] = _Reading(time.monotonic())
        reading.future = self._pool.submit(self._read, message, reading)
        reading.future.add_done_callback(self._done)
        return None

    def take(self, lease: str) -> bool:
        """Remove the prompt of `lease`; returns False when it was cancelled, so that its result is to be dropped."""
        return self._readings.pop(lease, None) is not None

    def cancel(self, lease: str) -> None:
        """Cancel a prompt: a queued one is not read, and the result of one being read is dropped."""
        reading = self._readings.pop(lease, None)
        if reading is not None and reading.future is not None:
            reading.future.cancel()

    def cancel_all(self) -> list[str]:
        """Cancel all prompts; return their leases."""
        leases = list(self._readings)
        for lease in leases:
            self.cancel(lease)
        return leases

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Cancel the prompts that took too long; return their leases with the reason."""
        late = [lease for lease, reading in self._readings.items() if now - self._clock(reading) >= self._timeout_s]
        for lease in late:
            self.cancel(lease)
        return [(lease, f"its {self._product} could not be read within {self._timeout_s:g} s") for lease in late]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the wait for the threads at `now`, since the oldest prompt made no progress."""
        if not self._readings:
            return ()
        since_s = now - min(self._clock(reading) for reading in self._readings.values())
        left_s = max(0.0, self._timeout_s - since_s)
        return (Wait(what=f"{self._product} of prompts", on="disk", since_s=since_s, seconds_left=left_s),)

    def close(self) -> None:
        """Cancel what is queued."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _clock(self, reading: _Reading) -> float:
        """Return since when `reading` has made no progress."""
        return reading.since if reading.begun else max(reading.since, self._last_begun)

    def _read(self, message: GenerateGroup, reading: _Reading) -> PreparedPrompt:
        reading.since = self._last_begun = time.monotonic()
        reading.begun = True
        return self._prepare(message)

    def _prepare(self, message: GenerateGroup) -> PreparedPrompt:
        try:
            return PreparedPrompt(message, *self._encode(message.prompt))
        except StarlingError as error:
            return PreparedPrompt(message, problem=str(error))
        except Exception as error:
            # An edge of the process: tokenizers and image processors come with the model and prompts from the user, so
            # any exception is possible. It must fail this prompt and not the replica.
            log.exception("not_encoded", prompt=message.prompt.id)
            reason = (str(error).strip() or "without a word").splitlines()[0]
            return PreparedPrompt(
                message, problem=f"it cannot be encoded ({type(error).__name__}: {reason:.200}): change it"
            )

    def _done(self, future: Future[PreparedPrompt]) -> None:
        if not future.cancelled():
            self._put(future.result())

"""Prompts become token ids; those with images in threads of their own, so that tokens go on being sampled meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from starling.common.errors import StarlingError
from starling.common.wire.messages import GenerateGroup, Prompt, Wait

log = structlog.get_logger(__name__)

NUM_THREADS = 2
"""One that a file system does not answer leaves another."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the engine takes it, or why it cannot be."""

    message: GenerateGroup
    ids: list[int] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(slots=True)
class _Reading:
    """The media of one prompt, queued or under way."""

    since: float
    """When it was queued or, once a thread has it, when that took it up."""
    begun: bool = False
    future: Future[PreparedPrompt] | None = None


class PromptPreparation:
    """The prompts that are being prepared.

    Args:
        encode: returns a prompt's token ids and tensors; called in any thread.
        put: takes each `PreparedPrompt` of a prompt with media.
        timeout_s: how long the media of one prompt may take from when a thread takes them up. What is queued may wait
            for as long as those before it need, unless no thread takes anything up for that time: then all of them
            hang. The deadline of the lease, which is the controller's, bounds it in any case.
    """

    def __init__(
        self,
        encode: Callable[[Prompt], tuple[list[int], dict[str, Any]]],
        put: Callable[[object], None],
        timeout_s: float,
    ) -> None:
        self._encode, self._put, self._timeout_s = encode, put, timeout_s
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prepare")
        self._readings: dict[str, _Reading] = {}
        self._taken_up = float("-inf")
        """When a thread began with something last."""

    def begin(self, message: GenerateGroup) -> PreparedPrompt | None:
        """Prepare the prompt of `message`: at once where it is text, else the result is `put` later."""
        if not message.prompt.media:
            return self._prepare(message)
        reading = self._readings[message.lease] = _Reading(time.monotonic())
        reading.future = self._pool.submit(self._read, message, reading)
        reading.future.add_done_callback(self._done)
        return None

    def take(self, lease: str) -> bool:
        """Return whether what was prepared for `lease` is still wanted; it is not again."""
        return self._readings.pop(lease, None) is not None

    def forget(self, lease: str) -> None:
        """Want it no longer: what is queued is not begun, and of what is under way nobody asks."""
        reading = self._readings.pop(lease, None)
        if reading is not None and reading.future is not None:
            reading.future.cancel()

    def forget_all(self) -> list[str]:
        """Want none of them any longer; return their leases."""
        leases = list(self._readings)
        for lease in leases:
            self.forget(lease)
        return leases

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Give up the leases whose media took too long; return them with the reason."""
        late = [lease for lease, reading in self._readings.items() if now - self._clock(reading) >= self._timeout_s]
        for lease in late:
            self.forget(lease)
        return [(lease, f"its images and videos could not be read within {self._timeout_s:g} s") for lease in late]

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`: the media that take longest."""
        if not self._readings:
            return ()
        since_s = now - min(self._clock(reading) for reading in self._readings.values())
        left_s = max(0.0, self._timeout_s - since_s)
        return (Wait(what="images and videos of prompts", on="disk", since_s=since_s, seconds_left=left_s),)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _clock(self, reading: _Reading) -> float:
        """Return since when `reading` has been getting nowhere."""
        return reading.since if reading.begun else max(reading.since, self._taken_up)

    def _read(self, message: GenerateGroup, reading: _Reading) -> PreparedPrompt:
        reading.since = self._taken_up = time.monotonic()
        reading.begun = True
        return self._prepare(message)

    def _prepare(self, message: GenerateGroup) -> PreparedPrompt:
        try:
            return PreparedPrompt(message, *self._encode(message.prompt))
        except StarlingError as error:
            return PreparedPrompt(message, problem=str(error))
        except Exception as error:
            # An edge of the process: tokenizers and image processors are the model's, prompts the user's, and what they
            # raise of each other is anything. It must cost this prompt and not the replica.
            log.exception("not_encoded", prompt=message.prompt.id)
            reason = (str(error).strip() or "without a word").splitlines()[0]
            return PreparedPrompt(
                message, problem=f"it cannot be encoded ({type(error).__name__}: {reason:.200}): change it"
            )

    def _done(self, future: Future[PreparedPrompt]) -> None:
        if not future.cancelled():
            self._put(future.result())

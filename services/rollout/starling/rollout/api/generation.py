"""Generation of one request: its groups go through the engine's queue, and their tokens come back as they are sampled.

event loop of the server                            thread of the engine
submit ─────────────── EngineQueue ───────────────> add
queue  <── call_soon_threadsafe ── listener, future <── step
finish (every completion has a stop text), abandon (client gone) ──> interrupt, cancel
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from starling.common.wire.messages import Status
from starling.rollout.api.detokenizer import IncrementalDetokenizer
from starling.rollout.api.errors import ApiError, timeout_error
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult, PromptLogprobs, RequestError
from starling.rollout.engine.queue import LEASE_PREFIX, EngineQueue

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text and tokens of one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete choice; the three sequences have one element per sampled token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    prompt_logprobs: PromptLogprobs | None = None
    """Log-probabilities of the prompt's tokens, if requested."""


class _Tokens(NamedTuple):
    """Tokens that a listener received."""

    group: int
    completion: int
    """Index of the completion in its group."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(slots=True)
class _PendingGroup:
    """One group in the engine."""

    request: GroupRequest
    streams: list[IncrementalDetokenizer]
    future: Future[GroupResult] | None = None
    ended: bool = False
    """Its result has arrived."""
    finishing: bool = False
    ended_rows: set[int] | None = None
    """Completions that have ended, by a token or a stop text; None where no stop text could end one early."""


class Generation:
    """The choices of one request, in the order of its groups.

    Args:
        engine_queue: the request queue of the engine.
        requests: the groups to generate; they get leases of their own.
        decode: decodes token ids, without special tokens.
        stops: stop texts; a choice ends before the first of them.
        ends: tokens that end a choice.
        timeout_s: limit for all groups together.
        streaming: whether deltas are needed as the tokens are sampled.
    """

    def __init__(
        self,
        engine_queue: EngineQueue,
        requests: Sequence[GroupRequest],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        timeout_s: float,
        streaming: bool = True,
    ) -> None:
        self._engine_queue, self._ends = engine_queue, ends
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[_Tokens | int] = asyncio.Queue()
        """Tokens, and the numbers of groups that have ended."""
        self._stops = tuple(stops)
        self._groups = [self._group(number, request, decode, streaming) for number, request in enumerate(requests)]
        self._first = [sum(r.num_completions for r in requests[:number]) for number in range(len(requests))]
        self.choices: list[Choice] = []
        """All choices, once `deltas` has ended."""

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Submit the groups, and yield their deltas until all have ended; closing the generator abandons them.

        Raises:
            ApiError: the time limit has passed.
            StarlingError: the engine rejected or failed a group, or the replica leaves.
        """
        results: dict[int, GroupResult] = {}
        try:
            for number, group in enumerate(self._groups):
                group.future = self._engine_queue.submit(group.request)
                group.future.add_done_callback(lambda _, number=number: self._post(number))  # type: ignore[misc]
            while len(results) < len(self._groups):
                event = await self._next()
                if isinstance(event, int):
                    results[event] = self._result(event)
                    for delta in self._remaining_deltas(event, results[event]):
                        yield delta
                elif (new := self._delta_of(event)) is not None:
                    yield new
            self.choices = [
                choice for number in sorted(results) for choice in self._choices_of(number, results[number])
            ]
        finally:
            for group in self._groups:
                if group.future is not None and not group.ended:
                    self._engine_queue.abandon(group.request.lease)

    async def all(self) -> list[Choice]:
        """Return all choices, once they are complete."""
        async for _ in self.deltas():
            pass
        return self.choices

    def _group(
        self, number: int, request: GroupRequest, decode: Callable[[Sequence[int]], str], streaming: bool
    ) -> _PendingGroup:
        def listener(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self._post(_Tokens(number, index, tuple(map(int, token_ids)), tuple(map(float, logprobs))))

        # A group that is finished early has no scores of its prompt. And a group with prompt scores is generated anew
        # when the engine is interrupted, so a listener would receive its tokens twice.
        may_be_cut = bool(self._stops) and not request.score_prompt
        return _PendingGroup(
            request=replace(
                request,
                lease=f"{LEASE_PREFIX}api/{secrets.token_hex(8)}",
                listener=listener if streaming or may_be_cut else None,
            ),
            streams=[IncrementalDetokenizer(decode, self._stops) for _ in range(request.num_completions)],
            ended_rows=set() if may_be_cut else None,
        )

    def _post(self, event: _Tokens | int) -> None:
        """Queue an event, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            return  # the server has ended

    async def _next(self) -> _Tokens | int:
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise timeout_error(self._timeout_s) from None

    def _result(self, number: int) -> GroupResult:
        group = self._groups[number]
        group.ended = True
        assert group.future is not None, "only submitted groups end"
        try:
            return group.future.result()
        except RequestError as error:
            raise ApiError(str(error).removeprefix(f"{group.request.lease}: ")) from None

    def _delta_of(self, tokens: _Tokens) -> ChoiceDelta | None:
        """Add tokens to their choice, and finish the group early if a stop text has ended every completion."""
        number, index, token_ids, logprobs = tokens
        group = self._groups[number]
        stream = group.streams[index]
        before = stream.num_tokens
        text = stream.add(token_ids)
        taken = stream.num_tokens - before
        if group.ended_rows is not None and (stream.stopped or self._ends.intersection(token_ids)):
            group.ended_rows.add(index)
            stopped = any(one.stopped for one in group.streams)
            if stopped and len(group.ended_rows) == len(group.streams) and not group.finishing:
                group.finishing = True
                self._engine_queue.finish(group.request.lease)
        return ChoiceDelta(self._first[number] + index, text, token_ids[:taken], logprobs[:taken]) if taken else None

    def _remaining_deltas(self, number: int, result: GroupResult) -> list[ChoiceDelta]:
        """Return the deltas of an ended group that no listener has received."""
        deltas = []
        for index, completion in enumerate(result.completions):
            stream = self._groups[number].streams[index]
            before = stream.num_tokens
            text = stream.add(completion.token_ids[before:].tolist()) + stream.close()
            fresh = slice(before, stream.num_tokens)
            token_ids, logprobs = completion.token_ids[fresh].tolist(), completion.logprobs[fresh].tolist()
            if text or token_ids:
                deltas.append(ChoiceDelta(self._first[number] + index, text, tuple(token_ids), tuple(logprobs)))
        return deltas

    def _choices_of(self, number: int, result: GroupResult) -> list[Choice]:
        streams = self._groups[number].streams
        return [
            replace(_complete(stream, completion), prompt_logprobs=result.prompt_logprobs)
            for stream, completion in zip(streams, result.completions, strict=True)
        ]


def choice_of(completion: Completion, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> Choice:
    """Return a completion as a choice, cut before the first stop text."""
    stream = IncrementalDetokenizer(decode, stops)
    stream.add(completion.token_ids.tolist())
    stream.close()
    return _complete(stream, completion)


def without_tokens(choice: Choice) -> Choice:
    """Return a choice without its sampled tokens."""
    return replace(choice, text="", token_ids=(), logprobs=(), versions=(), finish="length")


def _complete(stream: IncrementalDetokenizer, completion: Completion) -> Choice:
    size = stream.num_tokens
    return Choice(
        text=stream.text,
        token_ids=tuple(completion.token_ids[:size].tolist()),
        logprobs=tuple(completion.logprobs[:size].tolist()),
        versions=tuple(completion.versions[:size].tolist()),
        finish="length" if completion.status is Status.TRUNCATED and not stream.stopped else "stop",
    )

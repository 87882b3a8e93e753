"""From a request to its completions: groups go through the door, and what the engine says comes back as it is said.

event loop of the endpoint                          thread of the engine
submit ────────────────── door ───────────────────> add
queue  <── call_soon_threadsafe ── listener, future <── step
finish (all have said a stop text), abandon (nobody listens) ──> interrupt, cancel
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final, Literal

from starling.common.wire.messages import Status
from starling.rollout.api.errors import ApiError, timeout_error
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult, PromptLogprobs, RequestError
from starling.rollout.shell.request_queue import LEASE_PREFIX, EngineQueue

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What was added to one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, whole; the three sequences have one element per sampled token."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    prompt_logprobs: PromptLogprobs | None = None
    """What the model makes of the prompt, where that was asked for."""


@dataclass(slots=True)
class _Group:
    """One group under way."""

    request: GroupRequest
    streams: list[TextStream]
    future: Future[GroupResult] | None = None
    ended: bool = False
    """Its result is here, or nobody wants it."""
    finishing: bool = False
    over: set[int] | None = None
    """Completions of which nothing more is wanted; None where no stop text could end one early."""


class Generation:
    """The choices of one request: those of the first group come first.

    Args:
        door: the way to the engine.
        requests: what to generate; they get leases of their own.
        decode: the text of token ids, without special tokens.
        stops: texts before which a choice ends.
        ends: tokens that end a choice.
        timeout_s: how long all of it may take.
        listens: whether pieces are wanted as they come.
    """

    def __init__(
        self,
        door: EngineQueue,
        requests: Sequence[GroupRequest],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        ends: frozenset[int] = frozenset(),
        timeout_s: float,
        listens: bool = True,
    ) -> None:
        self._door, self._ends = door, ends
        self._timeout_s, self._until = timeout_s, time.monotonic() + timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, int, tuple[int, ...], tuple[float, ...]] | int] = asyncio.Queue()
        self._stops = tuple(stops)
        self._groups = [self._group(number, request, decode, listens) for number, request in enumerate(requests)]
        self._first = [sum(r.num_completions for r in requests[:number]) for number in range(len(requests))]
        self.made: list[Choice] = []
        """All choices, once `pieces` has ended."""

    async def pieces(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Ask for the groups, and yield what is said, until all of it is; whoever leaves early has it abandoned.

        Raises:
            ApiError: it took too long.
            StarlingError: the engine refused it, or could not finish it, or the replica leaves.
        """
        results: dict[int, GroupResult] = {}
        try:
            for number, group in enumerate(self._groups):
                group.future = self._door.submit(group.request)
                group.future.add_done_callback(lambda _, number=number: self._post(number))  # type: ignore[misc]
            while len(results) < len(self._groups):
                came = await self._next()
                if isinstance(came, int):
                    results[came] = self._result(came)
                    for piece in self._rest(came, results[came]):
                        yield piece
                elif (heard := self._heard(*came)) is not None:
                    yield heard
            self.made = [made for number in sorted(results) for made in self._made(number, results[number])]
        finally:
            for group in self._groups:
                if group.future is not None and not group.ended:
                    self._door.abandon(group.request.lease)

    async def all(self) -> list[Choice]:
        """Return all choices, when they are whole."""
        async for _ in self.pieces():
            pass
        return self.made

    def _group(
        self, number: int, request: GroupRequest, decode: Callable[[Sequence[int]], str], listens: bool
    ) -> _Group:
        def listener(index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self._post((number, index, tuple(map(int, token_ids)), tuple(map(float, logprobs))))

        # What is cut off has no scores of its prompt. And who wants those begins anew where the engine is taken away:
        # what a listener had heard before would count twice.
        may_be_cut = bool(self._stops) and not request.score_prompt
        return _Group(
            request=replace(
                request,
                lease=f"{LEASE_PREFIX}api/{secrets.token_hex(8)}",
                listener=listener if listens or may_be_cut else None,
            ),
            streams=[TextStream(decode, self._stops) for _ in range(request.num_completions)],
            over=set() if may_be_cut else None,
        )

    def _post(self, item: tuple[int, int, tuple[int, ...], tuple[float, ...]] | int) -> None:
        """Queue `item`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:
            return  # the endpoint has ended, and nobody listens

    async def _next(self) -> tuple[int, int, tuple[int, ...], tuple[float, ...]] | int:
        try:
            return await asyncio.wait_for(self._queue.get(), max(0.0, self._until - time.monotonic()))
        except TimeoutError:
            raise timeout_error(self._timeout_s) from None

    def _result(self, number: int) -> GroupResult:
        group = self._groups[number]
        group.ended = True
        assert group.future is not None, "only what was asked for is answered"
        try:
            return group.future.result()
        except RequestError as error:
            raise ApiError(str(error).removeprefix(f"{group.request.lease}: ")) from None

    def _heard(
        self, number: int, index: int, token_ids: tuple[int, ...], logprobs: tuple[float, ...]
    ) -> ChoiceDelta | None:
        """Take tokens that a listener heard."""
        group = self._groups[number]
        stream = group.streams[index]
        before = stream.num_tokens
        text = stream.add(token_ids)
        taken = stream.num_tokens - before
        if group.over is not None and (stream.stopped or self._ends.intersection(token_ids)):
            group.over.add(index)
            stopped = any(one.stopped for one in group.streams)
            if stopped and len(group.over) == len(group.streams) and not group.finishing:
                group.finishing = True
                self._door.finish(group.request.lease)
        return ChoiceDelta(self._first[number] + index, text, token_ids[:taken], logprobs[:taken]) if taken else None

    def _rest(self, number: int, result: GroupResult) -> list[ChoiceDelta]:
        """Return what no listener has told of a group that has ended."""
        pieces = []
        for index, completion in enumerate(result.completions):
            stream = self._groups[number].streams[index]
            before = stream.num_tokens
            text = stream.add(completion.token_ids[before:].tolist()) + stream.close()
            fresh = slice(before, stream.num_tokens)
            token_ids, logprobs = completion.token_ids[fresh].tolist(), completion.logprobs[fresh].tolist()
            if text or token_ids:
                pieces.append(ChoiceDelta(self._first[number] + index, text, tuple(token_ids), tuple(logprobs)))
        return pieces

    def _made(self, number: int, result: GroupResult) -> list[Choice]:
        streams = self._groups[number].streams
        return [
            replace(_whole(stream, completion), prompt_logprobs=result.prompt_logprobs)
            for stream, completion in zip(streams, result.completions, strict=True)
        ]


def choice_of(completion: Completion, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> Choice:
    """Return a completion as a choice; a text of `stops` ends it."""
    stream = TextStream(decode, stops)
    stream.add(completion.token_ids.tolist())
    stream.close()
    return _whole(stream, completion)


def without_tokens(made: Choice) -> Choice:
    """Return a choice of which nothing sampled is wanted."""
    return replace(made, text="", token_ids=(), logprobs=(), versions=(), finish="length")


def _whole(stream: TextStream, completion: Completion) -> Choice:
    size = stream.num_tokens
    return Choice(
        text=stream.text,
        token_ids=tuple(completion.token_ids[:size].tolist()),
        logprobs=tuple(completion.logprobs[:size].tolist()),
        versions=tuple(completion.versions[:size].tolist()),
        finish="length" if completion.status is Status.TRUNCATED and not stream.stopped else "stop",
    )


# JOINED from starling.rollout.api.text: Token ids become text as they come: whole characters only, and
# nothing beyond a stop text. Pure.

BROKEN: Final = "�"
"""What decoders write for bytes that are no character yet."""


class TextStream:
    """The text of one completion, which grows by tokens.

    A tokenizer's decoder may write a token otherwise at the beginning of a text, and a character may be spread over
    tokens. So each piece of text is the difference between two decodings that begin a few tokens earlier; what is
    returned, joined, is what decoding all tokens at once gives.

    Args:
        decode: the text of token ids, without special tokens.
        stops: texts before which the text ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._begin = 0
        """Where decoding begins: a few tokens before those whose text is out."""
        self._read = 0
        """Tokens whose text is in `_text`."""
        self._text = ""
        self._told = 0
        """Characters that were returned."""
        self.stopped = False
        """Whether a stop text came; nothing counts from there on."""

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end, or up to the one that completed a stop text."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """The text so far, without what might still become a stop text or a character."""
        return self._text[: self._told]

    def add(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is certain because of them."""
        begin = self._told
        for token in token_ids:
            if self.stopped:
                break
            self._ids.append(int(token))
            fresh = self._fresh()
            if fresh and not fresh.endswith(BROKEN):
                self._extend(fresh)
            elif self._first_stop(whole := fresh.rstrip(BROKEN)) is not None:
                self._extend(whole)  # the token that began a character completed a stop text before it
        return self._text[begin : self._told]

    def close(self) -> str:
        """Return the rest: nothing comes after it."""
        begin = self._told
        if not self.stopped:
            self._extend(self._fresh())
            if not self.stopped:
                self._told = len(self._text)
        return self._text[begin : self._told]

    def _fresh(self) -> str:
        """Return the text of the tokens that are not in `_text`."""
        known = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(known) :]

    def _extend(self, fresh: str) -> None:
        end = self._first_stop(fresh)
        self._text += fresh
        self._begin, self._read = self._read, len(self._ids)
        if end is not None:
            self.stopped, self._text = True, self._text[:end]
            self._told = len(self._text)
        else:
            self._told = max(self._told, len(self._text) - _overlap(self._text, self._stops))

    def _first_stop(self, fresh: str) -> int | None:
        """Return where in the text, grown by `fresh`, the first stop text begins; None where there is none."""
        begin = max(0, len(self._text) - max(map(len, self._stops), default=0))
        searched = self._text[begin:] + fresh
        return min((begin + at for stop in self._stops if (at := searched.find(stop)) >= 0), default=None)


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of `text` may be the beginning of one of `stops`."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )

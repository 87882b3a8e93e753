"""What choices look like in OpenAI's schema: whole, and in pieces. Pure."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from starling.common.errors import StarlingError
from starling.rollout.api.errors import api_error_of
from starling.rollout.api.generation import Choice, ChoiceDelta, Generation
from starling.rollout.api.messages import ReadCalls
from starling.rollout.api.requests import RequestOptions
from starling.rollout.engine.base import PromptLogprobs

Kind = Literal["chat", "text"]
Json = dict[str, Any]

CALL_ID_BYTES = 12


class ResponseBuilder:
    """The responses to one request.

    Args:
        kind: of a chat, or of plain text.
        model: the model's name.
        token_text: the text of one token, special ones too.
        logprobs: whether log-probabilities were asked for.
        read_calls: where the request offers tools. A reply is then told when it is whole, as only then it is known what
            of it is a call.
        at_once: tell each reply when it is whole in any case.
        top_logprobs: tell the likeliest token of each place of plain text; each sampled one is that itself.
        echo: the text of a prompt's tokens, where it is to stand before its completions.
    """

    def __init__(
        self,
        kind: Kind,
        model: str,
        token_text: Callable[[int], str],
        *,
        logprobs: bool,
        read_calls: ReadCalls | None = None,
        at_once: bool = False,
        top_logprobs: bool = False,
        echo: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._kind, self._model, self._token_text = kind, model, token_text
        self._logprobs, self._read_calls = logprobs, read_calls
        self._at_once = at_once or read_calls is not None
        self._top_logprobs, self._echo = top_logprobs, echo
        self._id = ("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._num_characters: dict[int, int] = {}
        """Of each choice, how much text its tokens told so far have; `text_offset` counts in it."""

    def whole(self, made: Sequence[Choice], prompts: Sequence[Sequence[int]], extra: Json | None = None) -> Json:
        """Return the response that has everything in it; `extra` goes to what is Starling's own."""
        each = len(made) // len(prompts)
        choices = [self._choice(index, one, prompts[index // each]) for index, one in enumerate(made)]
        starling = {"prompt_token_ids": [list(ids) for ids in prompts], **(extra or {})}
        return self._envelope("", choices, usage=_usage(made, prompts), starling=starling)

    def begin(self, num_choices: int) -> list[Json]:
        """Return the chunks before the first piece."""
        if self._kind == "text":
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def piece(self, piece: ChoiceDelta) -> Json | None:
        """Return the chunk of a piece, or None where it has nothing to tell yet."""
        if self._at_once or not (piece.text or self._logprobs):
            return None
        return self._said(piece)

    def end(self, index: int, made: Choice) -> list[Json]:
        """Return the last chunks of a choice."""
        provenance = _provenance(made)
        if self._kind == "text":
            last = {"index": index, "text": "", "logprobs": None, "finish_reason": made.finish, "starling": provenance}
            return [self._envelope("", [last])]
        text, calls = self._calls(made)
        chunks = []
        if self._at_once and (text or self._logprobs):
            chunks.append(self._said(ChoiceDelta(index, text or "", made.token_ids, made.logprobs)))
        if calls:
            called = [{"index": at, **_call(*call)} for at, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": called}))
        finish = "tool_calls" if calls else made.finish
        return [*chunks, self._chunk(index, {}, finish=finish, starling=provenance)]

    def usage(self, made: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> Json:
        """Return the chunk that tells the usage."""
        return self._envelope(".chunk", [], usage=_usage(made, prompts))

    def _calls(self, made: Choice) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        return (made.text, ()) if self._read_calls is None else self._read_calls(made.text)

    def _said(self, piece: ChoiceDelta) -> Json:
        told = self._told(piece.index, piece.token_ids, piece.logprobs)
        if self._kind == "text":
            choice = {"index": piece.index, "text": piece.text, "logprobs": told, "finish_reason": None}
            return self._envelope("", [choice])
        return self._chunk(piece.index, {"content": piece.text}, told)

    def _choice(self, index: int, made: Choice, prompt: Sequence[int]) -> Json:
        told = self._told(index, made.token_ids, made.logprobs, prompt if self._echo else (), made.prompt_logprobs)
        choice: Json = {"index": index, "logprobs": told, "finish_reason": made.finish, "starling": _provenance(made)}
        if self._kind == "text":
            return {**choice, "text": made.text if self._echo is None else self._echo(prompt) + made.text}
        text, calls = self._calls(made)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(*call) for call in calls]
            choice["finish_reason"] = "tool_calls"
        return {**choice, "message": message}

    def _chunk(
        self, index: int, delta: Json, told: Json | None = None, *, finish: str | None = None, **extra: Any
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish, **extra}
        return self._envelope(".chunk", [choice])

    def _envelope(self, suffix: str, choices: list[Json], **extra: Any) -> Json:
        name = f"chat.completion{suffix}" if self._kind == "chat" else "text_completion"
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **extra,
        }

    def _told(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        prompt: Sequence[int] = (),
        scores: PromptLogprobs | None = None,
    ) -> Json | None:
        """Return the log-probabilities of the sampled tokens, and of those of the prompt, where they were asked for."""
        if not self._logprobs:
            return None
        texts = [self._token_text(token) for token in token_ids]
        if self._kind == "chat":
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        values: list[float | None] = list(logprobs)
        tops: list[Json | None] = [{text: value} for text, value in zip(texts, logprobs, strict=True)]
        if prompt:
            assert scores is not None, "they were asked for"
            texts = [*map(self._token_text, prompt), *texts]
            # Nothing says how likely the first token was.
            values = [None, *scores.logprobs.tolist(), *values]
            best = zip(map(self._token_text, scores.top_ids.tolist()), scores.top_logprobs.tolist(), strict=True)
            tops = [None, *({text: value} for text, value in best), *tops]
        offsets = []
        for text in texts:
            offsets.append(self._num_characters.setdefault(index, 0))
            self._num_characters[index] += len(text)
        top_logprobs = tops if self._top_logprobs else None
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top_logprobs, "text_offset": offsets}


def spans(versions: Sequence[int]) -> list[Json]:
    """Return which tokens each weight version sampled: ``[{version, start, end}, ...]``, `end` excluded."""
    found: list[Json] = []
    for at, version in enumerate(versions):
        if found and found[-1]["version"] == version:
            found[-1]["end"] = at + 1
        else:
            found.append({"version": version, "start": at, "end": at + 1})
    return found


def event(data: Json | str) -> bytes:
    """Return a server-sent event."""
    return b"data: " + (data.encode() if isinstance(data, str) else msgspec.json.encode(data)) + b"\n\n"


def _usage(made: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> Json:
    before, sampled = sum(map(len, prompts)), sum(len(one.token_ids) for one in made)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def _provenance(made: Choice) -> Json:
    scored = {} if made.prompt_logprobs is None else {"prompt_version": made.prompt_logprobs.version}
    return {"token_ids": list(made.token_ids), "versions": spans(made.versions), **scored}


def _call(name: str, arguments: str) -> Json:
    ident = f"call_{secrets.token_hex(CALL_ID_BYTES)}"
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


# JOINED from starling.rollout.api.streams: Answers that take time: as one response or as server-sent events,
# and dropped when the client hangs up.


T = TypeVar("T")

DONE = event("[DONE]")


class EventStream(StreamingResponse):
    """Server-sent events, and what is to be given back when they end, however they do."""

    def __init__(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with self._held:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)


async def attended(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` does; end it when the client hangs up.

    Raises:
        ClientDisconnect: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # so that nothing of it is left


async def told(
    shapes: ResponseBuilder,
    ask: RequestOptions,
    generation: Generation,
    first: ChoiceDelta | None,
    pieces: AsyncGenerator[ChoiceDelta, None],
    prompts: Sequence[Sequence[int]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a generation, of which `first` has come already."""
    async with contextlib.aclosing(pieces):
        try:
            for chunk in shapes.begin(ask.num_completions * len(prompts)):
                yield event(chunk)
            piece = first
            while piece is not None:
                said = shapes.piece(piece)
                if said is not None:
                    yield event(said)
                piece = await anext(pieces, None)
            for data in _ending(shapes, ask, generation.made, prompts):
                yield data
        except StarlingError as error:
            # The status went out with the first event; clients find errors among the events, too.
            yield event(api_error_of(error).body)


async def told_at_once(
    shapes: ResponseBuilder, ask: RequestOptions, made: Choice, prompt: Sequence[int]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one choice that is whole already."""
    for chunk in shapes.begin(1):
        yield event(chunk)
    for data in _ending(shapes, ask, [made], [prompt]):
        yield data


def _ending(
    shapes: ResponseBuilder, ask: RequestOptions, made: Sequence[Choice], prompts: Sequence[Sequence[int]]
) -> Iterator[bytes]:
    for index, one in enumerate(made):
        yield from map(event, shapes.end(index, one))
    if ask.include_usage:
        yield event(shapes.usage(made, prompts))
    yield DONE


async def _hung_up(request: Request) -> None:
    """Return when the client hangs up; its request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

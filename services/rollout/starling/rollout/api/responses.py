"""Responses in OpenAI's schema: complete, or as server-sent events that stop when the client disconnects."""

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
    """Builds the JSON of the responses to one request.

    Args:
        kind: chat or plain text.
        model: the model's name.
        token_text: returns the text of one token, special tokens included.
        logprobs: whether log-probabilities are requested.
        read_calls: parser of tool calls, where the request offers tools. It needs complete replies, so none is
            streamed.
        buffered: send complete replies only, in any case.
        top_logprobs: return the most likely token at each position of plain text; a sampled token is that itself.
        echo: returns the text of a prompt's tokens, where prompts are put before their completions.
    """

    def __init__(
        self,
        kind: Kind,
        model: str,
        token_text: Callable[[int], str],
        *,
        logprobs: bool,
        read_calls: ReadCalls | None = None,
        buffered: bool = False,
        top_logprobs: bool = False,
        echo: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._kind, self._model, self._token_text = kind, model, token_text
        self._logprobs, self._read_calls = logprobs, read_calls
        self._buffered = buffered or read_calls is not None
        self._top_logprobs, self._echo = top_logprobs, echo
        self._id = ("chatcmpl-" if kind == "chat" else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._num_characters: dict[int, int] = {}
        """Length of the text of each choice so far, for `text_offset`."""

    def response(self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]], extra: Json | None = None) -> Json:
        """Return the complete response; `extra` goes into its field `starling`."""
        each = len(choices) // len(prompts)
        built = [self._choice(index, choice, prompts[index // each]) for index, choice in enumerate(choices)]
        starling = {"prompt_token_ids": [list(ids) for ids in prompts], **(extra or {})}
        return self._envelope("", built, usage=_usage(choices, prompts), starling=starling)

    def first_chunks(self, num_choices: int) -> list[Json]:
        """Return the chunks before the first delta."""
        if self._kind == "text":
            return []
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def delta_chunk(self, delta: ChoiceDelta) -> Json | None:
        """Return the chunk of a delta, or None where there is nothing to send yet."""
        if self._buffered or not (delta.text or self._logprobs):
            return None
        return self._delta_chunk(delta)

    def last_chunks(self, index: int, choice: Choice) -> list[Json]:
        """Return the last chunks of a choice."""
        provenance = _provenance(choice)
        if self._kind == "text":
            last = {"index": index, "text": "", "logprobs": None, "finish_reason": choice.finish}
            return [self._envelope("", [{**last, "starling": provenance}])]
        text, calls = self._calls(choice)
        chunks = []
        if self._buffered and (text or self._logprobs):
            chunks.append(self._delta_chunk(ChoiceDelta(index, text or "", choice.token_ids, choice.logprobs)))
        if calls:
            called = [{"index": at, **_call(*call)} for at, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": called}))
        finish = "tool_calls" if calls else choice.finish
        return [*chunks, self._chunk(index, {}, finish=finish, starling=provenance)]

    def usage_chunk(self, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> Json:
        """Return the chunk with the usage."""
        return self._envelope(".chunk", [], usage=_usage(choices, prompts))

    def _calls(self, choice: Choice) -> tuple[str | None, tuple[tuple[str, str], ...]]:
        return (choice.text, ()) if self._read_calls is None else self._read_calls(choice.text)

    def _delta_chunk(self, delta: ChoiceDelta) -> Json:
        logprobs = self._logprobs_of(delta.index, delta.token_ids, delta.logprobs)
        if self._kind == "text":
            choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": None}
            return self._envelope("", [choice])
        return self._chunk(delta.index, {"content": delta.text}, logprobs)

    def _choice(self, index: int, choice: Choice, prompt: Sequence[int]) -> Json:
        echoed = prompt if self._echo else ()
        logprobs = self._logprobs_of(index, choice.token_ids, choice.logprobs, echoed, choice.prompt_logprobs)
        built: Json = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish}
        built["starling"] = _provenance(choice)
        if self._kind == "text":
            return {**built, "text": choice.text if self._echo is None else self._echo(prompt) + choice.text}
        text, calls = self._calls(choice)
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(*call) for call in calls]
            built["finish_reason"] = "tool_calls"
        return {**built, "message": message}

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, *, finish: str | None = None, **extra: Any
    ) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **extra}
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

    def _logprobs_of(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        prompt: Sequence[int] = (),
        scores: PromptLogprobs | None = None,
    ) -> Json | None:
        """Return the log-probabilities of the sampled tokens, and of an echoed prompt's tokens, if requested."""
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
            assert scores is not None, "echoed prompts are scored"
            texts = [*map(self._token_text, prompt), *texts]
            # The first token has no log-probability.
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
    """Return the ranges of tokens that each weight version sampled: ``[{version, start, end}, ...]``, end excluded."""
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


def _usage(choices: Sequence[Choice], prompts: Sequence[Sequence[int]]) -> Json:
    before, sampled = sum(map(len, prompts)), sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


def _provenance(choice: Choice) -> Json:
    scored = {} if choice.prompt_logprobs is None else {"prompt_version": choice.prompt_logprobs.version}
    return {"token_ids": list(choice.token_ids), "versions": spans(choice.versions), **scored}


def _call(name: str, arguments: str) -> Json:
    ident = f"call_{secrets.token_hex(CALL_ID_BYTES)}"
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


T = TypeVar("T")

DONE = event("[DONE]")


class EventStream(StreamingResponse):
    """Server-sent events, with an exit stack that is closed when they end, however they end."""

    def __init__(self, events: AsyncGenerator[bytes, None], held: contextlib.ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events, self._held = events, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with self._held:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it when the client disconnects.

    Raises:
        ClientDisconnect: the client has disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)  # both have ended when this returns


async def stream_events(
    builder: ResponseBuilder,
    options: RequestOptions,
    generation: Generation,
    first: ChoiceDelta | None,
    deltas: AsyncGenerator[ChoiceDelta, None],
    prompts: Sequence[Sequence[int]],
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a generation whose first delta has arrived already."""
    async with contextlib.aclosing(deltas):
        try:
            for chunk in builder.first_chunks(options.num_completions * len(prompts)):
                yield event(chunk)
            delta = first
            while delta is not None:
                delta_chunk = builder.delta_chunk(delta)
                if delta_chunk is not None:
                    yield event(delta_chunk)
                delta = await anext(deltas, None)
            for data in _last_events(builder, options, generation.choices, prompts):
                yield data
        except StarlingError as error:
            # The HTTP status was sent with the first event, so the error is sent as an event.
            yield event(api_error_of(error).body)


async def whole_choice_events(
    builder: ResponseBuilder, options: RequestOptions, choice: Choice, prompt: Sequence[int]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one choice that is complete."""
    for chunk in builder.first_chunks(1):
        yield event(chunk)
    for data in _last_events(builder, options, [choice], [prompt]):
        yield data


def _last_events(
    builder: ResponseBuilder, options: RequestOptions, choices: Sequence[Choice], prompts: Sequence[Sequence[int]]
) -> Iterator[bytes]:
    for index, choice in enumerate(choices):
        yield from map(event, builder.last_chunks(index, choice))
    if options.include_usage:
        yield event(builder.usage_chunk(choices, prompts))
    yield DONE


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects; its request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

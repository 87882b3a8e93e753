"""HTTP routes of the OpenAI-compatible server.

A request with an episode's key is a turn of that episode, answered by its `Recording`; any other is a group of its own.
Generation stops when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from starling.common.errors import StarlingError
from starling.rollout.api.episode_limits import RequestBody, RequestsInProgress, ServerLimits
from starling.rollout.api.errors import ApiError, Code, api_error_of
from starling.rollout.api.generation import Generation, without_tokens
from starling.rollout.api.requests import (
    CompletionRequest,
    RequestOptions,
    read_body,
    read_chat,
    read_text,
    too_deep,
)
from starling.rollout.api.responses import (
    EventStream,
    Json,
    Kind,
    ResponseBuilder,
    cancel_on_disconnect,
    stream_events,
    whole_choice_events,
)

if TYPE_CHECKING:
    from starling.rollout.api.keys import ApiKeys
    from starling.rollout.api.model import ServedModel
    from starling.rollout.api.recording import Recording
    from starling.rollout.engine.queue import EngineQueue
    from starling.rollout.settings import ApiSettings

log = structlog.get_logger(__name__)

MAX_LOGGED: Final = 1000
"""Characters of an unexpected error that are logged: it may contain what a client sent."""


class Endpoint:
    """Handlers of HTTP requests; all run in one event loop.

    Args:
        engine_queue: the request queue of the engine.
        served: the model.
        settings: limits.
        keys: the valid API keys.
    """

    def __init__(
        self, engine_queue: EngineQueue, served: ServedModel, settings: ApiSettings, keys: ApiKeys[Recording]
    ) -> None:
        self._engine_queue, self._served, self._settings, self._keys = engine_queue, served, settings, keys
        self._requests = RequestsInProgress(ServerLimits(settings.max_requests))
        """Those with the server's key."""
        self._tokenizing = asyncio.Lock()
        """The texts of one request are tokenized at a time, and other work is done between two of them."""
        self.stopping = False
        """New requests are rejected. Set from any thread."""

    def application(self) -> Starlette:
        """Return the routes."""
        return Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._model, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ],
            exception_handlers={
                HTTPException: _route_error_response,
                StarlingError: _error_response,
                ClientDisconnect: _client_disconnected,
                RecursionError: _nested_too_deeply,
                Exception: _internal_error,
            },
        )

    async def _health(self, request: Request) -> Response:
        version = self._served.version()
        state = "stopping" if self.stopping else "ok" if version >= 0 else "waiting for weights"
        return _json({"status": state, "version": version}, 200 if state == "ok" else 503)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return _json({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_model(request.path_params["model"])
        return _json(self._model_card())

    async def _chat(self, request: Request) -> Response:
        recording = self._check_key(request)
        if recording is not None:
            return await self._turn(request, recording)
        with contextlib.ExitStack() as stack:
            body = stack.enter_context(self._request_slot())
            chat = read_chat(read_body(await self._read(request, body)))
            self._served.check_conversation(chat.messages, chat.tools)
            self._check_model(chat.options.model)
            prompt_ids = self._served.chat_ids(chat.messages, chat.tools)
            self._served.check(chat.options, prompt_ids, "messages")
            body.ask(chat.options.num_completions)
            builder = self._builder("chat", chat.options, calls=bool(chat.tools))
            return await self._respond(request, chat.options, [prompt_ids], builder, stack)

    async def _turn(self, request: Request, recording: Recording) -> Response:
        """Answer with a turn of an episode. It has no time limit of its own: it ends with its episode."""
        with recording.requests.request() as body:
            chat = read_chat(read_body(await self._read(request, body)))
            self._served.check_conversation(chat.messages, chat.tools)
            turn = await cancel_on_disconnect(request, recording.turn(chat, body.size_bytes))
            builder = self._builder("chat", chat.options, calls=bool(chat.tools), buffered=True)
            if chat.options.stream:
                events = whole_choice_events(builder, chat.options, turn.choice, turn.prompt_ids)
                return EventStream(events, contextlib.ExitStack())
            return _json(builder.response([turn.choice], [turn.prompt_ids], {"overruled": list(turn.overruled)}))

    async def _completions(self, request: Request) -> Response:
        if self._check_key(request) is not None:
            raise ApiError("an episode is a conversation; use /v1/chat/completions", "not_found")
        with contextlib.ExitStack() as stack:
            body = stack.enter_context(self._request_slot())
            text = read_text(read_body(await self._read(request, body)))
            self._check_model(text.options.model)
            body.ask(len(text.prompts) * text.options.num_completions)
            prompts = await self._tokenized(text)
            echo = self._served.prompt_text if text.echo else None
            builder = self._builder("text", text.options, top_logprobs=text.top_logprobs, echo=echo)
            score = text.echo and text.options.logprobs
            return await self._respond(request, text.options, prompts, builder, stack, score=score)

    async def _tokenized(self, text: CompletionRequest) -> list[list[int]]:
        """Return the tokens of the prompts. Raises ApiError at the first that exceeds a limit."""
        prompts = []
        async with self._tokenizing:
            for prompt in text.prompts:
                prompts.append(self._served.text_ids(prompt))
                self._served.check(text.options, prompts[-1], "prompt")
                await asyncio.sleep(0)
        return prompts

    async def _respond(
        self,
        request: Request,
        options: RequestOptions,
        prompts: Sequence[list[int]],
        builder: ResponseBuilder,
        stack: contextlib.ExitStack,
        *,
        score: bool = False,
    ) -> Response:
        """Generate the answer; a streamed one takes over `stack`, which holds the slot of the request."""
        generation = Generation(
            self._engine_queue,
            [self._served.request(options, prompt_ids, score_prompt=score) for prompt_ids in prompts],
            decode=self._served.decode,
            stops=options.stop,
            ends=frozenset((*self._served.eos_token_ids, *options.stop_token_ids)),
            timeout_s=self._settings.timeout_s,
            streaming=options.stream,
        )
        if not options.stream:
            choices = await cancel_on_disconnect(request, generation.all())
            if score and any(choice.prompt_logprobs is None for choice in choices):
                raise ApiError("this engine scores no prompts; leave out echo or logprobs", parameter="echo")
            if options.max_tokens == 0:
                choices = [without_tokens(choice) for choice in choices]
            return _json(builder.response(choices, prompts))
        # Waits for the first delta, so that a request which the engine rejects fails with an HTTP status.
        deltas = generation.deltas()
        first = await cancel_on_disconnect(request, anext(deltas, None))
        events = stream_events(builder, options, generation, first, deltas, prompts)
        return EventStream(events, stack.pop_all())

    async def _read(self, request: Request, body: RequestBody) -> bytes:
        """Return the body. Raises ApiError, without reading on, when it is too large or takes too long."""
        parts, limit_s = [], self._settings.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    body.add(len(part))
                    parts.append(part)
        except TimeoutError:
            raise ApiError(
                f"the body was not complete after {limit_s:g} s; send it at once, or raise rollout.api.read_timeout_s",
                "request_timeout",
            ) from None
        return b"".join(parts)

    def _builder(self, kind: Kind, options: RequestOptions, *, calls: bool = False, **more: Any) -> ResponseBuilder:
        return ResponseBuilder(
            kind,
            self._served.name,
            self._served.token_text,
            logprobs=options.logprobs,
            read_calls=self._served.read_calls if calls else None,
            **more,
        )

    def _check_key(self, request: Request) -> Recording | None:
        return self._keys.authenticate(request.headers.get("authorization", ""))

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                f"model {name!r} is not served; this replica serves {self._served.name!r}",
                "model_not_found",
                "model",
            )

    def _model_card(self) -> Json:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created_s,
            "owned_by": "starling",
            "starling": {"version": self._served.version(), "max_model_len": self._served.max_model_len},
        }

    @contextlib.contextmanager
    def _request_slot(self) -> Iterator[RequestBody]:
        """Hold one of the concurrent requests, before its body is read. Raises ApiError when there is none left."""
        if self.stopping:
            raise ApiError("this replica is shutting down and accepts no more requests; use another one", "stopping")
        with self._requests.request() as body:
            yield body


def _json(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _error_response(request: Request, error: Exception) -> Response:
    api_error = api_error_of(error)
    if api_error.status >= 500:
        log.warning("not_answered", path=request.url.path, reason=str(api_error))
    headers = {}
    if api_error.status in (429, 503):  # clients wait this long before they retry
        headers["retry-after"] = "1"
    if api_error.status in (408, 413):  # the rest of the body must not be read as the next request
        headers["connection"] = "close"
    return _json(api_error.body, api_error.status, headers)


async def _route_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"the routes raise nothing but HTTPException, not {error!r}"
    where = f"{request.method} {request.url.path}"
    known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
    code: Code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _json(ApiError(f"{where} is not served here; there are {known}", code).body, error.status_code)


async def _client_disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _nested_too_deeply(request: Request, error: Exception) -> Response:
    return await _error_response(request, too_deep())


async def _internal_error(request: Request, error: Exception) -> Response:
    log.error("failed", path=request.url.path, error=repr(error)[:MAX_LOGGED])
    return _json(ApiError("the server failed; see the log of the replica", "generation_failed").body, 500)

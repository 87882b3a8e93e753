"""The routes: who asks, for what, and how it is answered.

Whoever hangs up has nothing generated for them any longer. A request of an episode's key is a turn of that episode, and
answered by its `Recording`; any other is a group of its own.
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
from starling.rollout.api.errors import ApiError, Code, api_error_of
from starling.rollout.api.generation import Generation, without_tokens
from starling.rollout.api.requests import RequestOptions, read_body, read_chat, read_text
from starling.rollout.api.responses import EventStream, Json, Kind, ResponseBuilder, attended, told, told_at_once

if TYPE_CHECKING:
    from starling.rollout.api.keys import ApiKeys
    from starling.rollout.api.model import ServedModel
    from starling.rollout.api.recording import Recording
    from starling.rollout.settings import ApiSettings
    from starling.rollout.shell.request_queue import EngineQueue

log = structlog.get_logger(__name__)

MAX_BODY_BYTES: Final = 32 << 20


class Endpoint:
    """What answers HTTP requests; all of it runs in one event loop.

    Args:
        door: the way to the engine.
        served: the model.
        settings: the bounds.
        keys: who may ask.
    """

    def __init__(self, door: EngineQueue, served: ServedModel, settings: ApiSettings, keys: ApiKeys[Recording]) -> None:
        self._door, self._served, self._settings, self._keys = door, served, settings, keys
        self._num_requests = 0
        self.stopping = False
        """Nothing new is taken any more. Set from any thread."""

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
                HTTPException: _refused_by_route,
                StarlingError: _refused,
                ClientDisconnect: _nobody_listens,
                Exception: _failed,
            },
        )

    async def _health(self, request: Request) -> Response:
        version = self._served.version()
        state = "stopping" if self.stopping else "ok" if version >= 0 else "waiting for weights"
        return _json({"status": state, "version": version}, 200 if state == "ok" else 503)

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_key(request)
        self._check_model(request.path_params["model"])
        return _json(self._described())

    async def _chat(self, request: Request) -> Response:
        recording = self._check_key(request)
        chat = read_chat(read_body(await self._read(request)))
        if recording is not None:
            turn = await attended(request, recording.turn(chat))  # it ends with its episode, which has a limit
            shapes = self._shapes("chat", chat.ask, calls=bool(chat.tools), at_once=True)
            if chat.ask.stream:
                return EventStream(told_at_once(shapes, chat.ask, turn.made, turn.prompt_ids), contextlib.ExitStack())
            return _json(shapes.whole([turn.made], [turn.prompt_ids], {"overruled": list(turn.overruled)}))
        self._check_model(chat.ask.model)
        prompt_ids = self._served.chat_ids(chat.messages, chat.tools)
        self._served.check(chat.ask, prompt_ids, "messages")
        shapes = self._shapes("chat", chat.ask, calls=bool(chat.tools))
        return await self._generated(request, chat.ask, [prompt_ids], shapes)

    async def _completions(self, request: Request) -> Response:
        recording = self._check_key(request)
        text = read_text(read_body(await self._read(request)))
        if recording is not None:
            raise ApiError("an episode is a conversation; use /v1/chat/completions", "not_found")
        self._check_model(text.ask.model)
        prompts = [self._served.text_ids(prompt) for prompt in text.prompts]
        for prompt_ids in prompts:
            self._served.check(text.ask, prompt_ids, "prompt")
        echo = self._served.prompt_text if text.echo else None
        shapes = self._shapes("text", text.ask, top_logprobs=text.top_logprobs, echo=echo)
        return await self._generated(request, text.ask, prompts, shapes, score=text.echo and text.ask.logprobs)

    async def _generated(
        self,
        request: Request,
        ask: RequestOptions,
        prompts: Sequence[list[int]],
        shapes: ResponseBuilder,
        *,
        score: bool = False,
    ) -> Response:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._place())
            generation = Generation(
                self._door,
                [self._served.request(ask, prompt_ids, score_prompt=score) for prompt_ids in prompts],
                decode=self._served.decode,
                stops=ask.stop,
                ends=frozenset((*self._served.eos_token_ids, *ask.stop_token_ids)),
                timeout_s=self._settings.timeout_s,
                listens=ask.stream,
            )
            if not ask.stream:
                made = await attended(request, generation.all())
                if score and any(one.prompt_logprobs is None for one in made):
                    raise ApiError("this engine scores no prompts; leave out echo or logprobs", parameter="echo")
                if ask.max_tokens == 0:
                    made = [without_tokens(one) for one in made]
                return _json(shapes.whole(made, prompts))
            # What the engine refuses is refused by the status, not in the middle of a stream.
            pieces = generation.pieces()
            first = await attended(request, anext(pieces, None))
            return EventStream(told(shapes, ask, generation, first, pieces, prompts), stack.pop_all())

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raises ApiError when it is too large, or does not come, without reading on."""
        parts, size, limit_s = [], 0, self._settings.read_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > MAX_BODY_BYTES:
                        raise ApiError(
                            f"the body has more than {MAX_BODY_BYTES} bytes; send less at a time", "request_too_large"
                        )
        except TimeoutError:
            raise ApiError(
                f"the body was not whole after {limit_s:g} s; send it at once, or raise rollout.api.read_timeout_s",
                "request_timeout",
            ) from None
        return b"".join(parts)

    def _shapes(self, kind: Kind, ask: RequestOptions, *, calls: bool = False, **options: Any) -> ResponseBuilder:
        return ResponseBuilder(
            kind,
            self._served.name,
            self._served.token_text,
            logprobs=ask.logprobs,
            read_calls=self._served.read_calls if calls else None,
            **options,
        )

    def _check_key(self, request: Request) -> Recording | None:
        return self._keys.check(request.headers.get("authorization", ""))

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                f"model {name!r} is not here; this replica serves {self._served.name!r}", "model_not_found", "model"
            )

    def _described(self) -> Json:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.since,
            "owned_by": "starling",
            "starling": {"version": self._served.version(), "max_model_len": self._served.max_model_len},
        }

    @contextlib.contextmanager
    def _place(self) -> Iterator[None]:
        """Have a place among the requests that are worked on. Raises ApiError when there is none."""
        if self.stopping:
            raise ApiError("this replica leaves and takes no more requests; ask another one", "stopping")
        if self._num_requests >= self._settings.max_requests:
            raise ApiError(
                f"{self._num_requests} requests are being worked on already; ask again later, "
                "or raise rollout.api.max_requests",
                "too_many_requests",
            )
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1


def _json(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


async def _refused(request: Request, error: Exception) -> Response:
    refusal = api_error_of(error)
    if refusal.status >= 500:
        log.warning("not_answered", path=request.url.path, reason=str(refusal))
    headers = {}
    if refusal.status in (429, 503):  # clients wait as long as they are told before they ask again
        headers["retry-after"] = "1"
    if refusal.status in (408, 413):  # what is left of the body is nobody's next request
        headers["connection"] = "close"
    return _json(refusal.body, refusal.status, headers)


async def _refused_by_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"the routes raise nothing else than {error!r}"
    where = f"{request.method} {request.url.path}"
    known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health"
    code: Code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _json(ApiError(f"{where} is not served here; there are {known}", code).body, error.status_code)


async def _nobody_listens(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("failed", path=request.url.path, error=repr(error))
    return _json(ApiError("the endpoint failed; see the log of the replica", "generation_failed").body, 500)

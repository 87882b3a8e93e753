"""Routes of the reward service's HTTP front end; FastAPI describes them in `/openapi.json`."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated, Any, Final

import structlog
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from starling.reward.http.body import Application, LimitedBodies, take_body
from starling.reward.http.cosmos.refusals import RefusalLog
from starling.reward.http.cosmos.routes import PREFIX, CosmosService, body_limits, cosmos_routes
from starling.reward.http.errors import REFUSALS, HttpError
from starling.reward.http.metrics import render
from starling.reward.http.schema import AskedRewards, RewardsReader, Wait, memory_of, render_result, rewards_schema
from starling.reward.http.settings import HttpSettings
from starling.reward.http.status import ServiceStatus
from starling.reward.http.stores.store import RequestBody
from starling.reward.http.table import RequestTable

log = structlog.get_logger(__name__)

OPEN_PATHS: Final = ("/healthz", "/readyz")
"""Answered without the token: orchestrators ask them."""
MAX_LOGGED: Final = 1000
LARGE_BYTES: Final = 1 << 20
"""A larger body is read in a thread of its own."""
JSON: Final = "application/json"
GONE: Final = 499
"""Status of an answer that no client gets."""
RequestId = Annotated[str, Path(max_length=100)]


def make_application(
    settings: HttpSettings,
    token: str,
    table: RequestTable,
    reader: RewardsReader,
    status: Callable[[], ServiceStatus],
    cosmos: CosmosService,
) -> Application:
    """Return the ASGI application.

    Args:
        settings: limits.
        token: what clients must send; empty if they need none.
        table: the requests.
        reader: of the bodies of `/v1/rewards`.
        status: returns the last report of the scoring thread.
        cosmos: answers the clients of Cosmos-RL.
    """
    app = FastAPI(title="Starling reward service", version="1", docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_routes(app, table, reader, status)
    app.include_router(cosmos_routes(cosmos))
    app.add_exception_handler(HttpError, _refusal)
    app.add_exception_handler(Exception, _failure)
    with_body = {("POST", "/v1/rewards"): settings.max_body_mb << 20, **body_limits(settings.max_media_bytes)}
    limited = LimitedBodies(app, TokenCheck(token), table, settings.read_timeout_s, with_body)
    return RefusalLog(limited, f"{PREFIX}/enqueue")


class TokenCheck:
    """Compares the token of a request, in constant time."""

    def __init__(self, token: str) -> None:
        self._digest = _digest(token) if token else None

    def __call__(self, path: str, authorization: str) -> None:
        """Raise HttpError unless `authorization`, the header, has the token, or `path` needs none."""
        if self._digest is None or path in OPEN_PATHS:
            return
        kind, _, given = authorization.partition(" ")
        is_right = hmac.compare_digest(_digest(given.strip()), self._digest)
        if kind.lower() != "bearer" or not is_right:
            raise HttpError(401, "no token, or a wrong one; send `Authorization: Bearer TOKEN`")


def _add_routes(app: FastAPI, table: RequestTable, reader: RewardsReader, status: Callable[[], ServiceStatus]) -> None:
    described = {"requestBody": {"required": True, "content": {JSON: {"schema": rewards_schema()}}}}

    @app.post("/v1/rewards", responses={202: {"description": "being scored"}, **REFUSALS}, openapi_extra=described)
    async def ask(request: Request) -> Response:
        """Score samples; the answer has the rewards if they come within `wait_s`, else the id of the request."""
        data = await take_body(request)
        asked = await _read(reader, table, data)
        await table.add(asked.request, asked.num_bytes, RequestBody("v1", data))
        id, wait_s = asked.request.id, asked.wait_s
        del data, asked  # not kept while the client waits
        answer = await _answer(request, table, id, wait_s)
        if answer is None:  # nobody knows its id, and a client that tries again sends its samples again
            with contextlib.suppress(HttpError):
                await table.remove(id)
        return answer or Response(status_code=GONE)

    @app.get("/v1/rewards/{id}", responses={202: {"description": "being scored"}, 404: {"description": "no such id"}})
    async def fetch(request: Request, id: RequestId, wait_s: Annotated[Wait, Query()] = 0.0) -> Response:
        """Return the rewards of a request, as often as asked for, until they expire."""
        return await _answer(request, table, id, wait_s) or Response(status_code=GONE)

    @app.delete("/v1/rewards/{id}", status_code=204, responses={404: {"description": "no such id"}})
    async def forget(id: RequestId) -> Response:
        """Stop scoring a request, and forget its result."""
        await table.remove(id)
        return Response(status_code=204)

    @app.get("/v1/scorers")
    async def scorers() -> list[dict[str, Any]]:
        """Return the scorers: their weights, what they are for, and what they read: `text`, `pixels` or `latents`."""
        return list(status().scorers)

    @app.get("/healthz")
    async def healthz() -> Response:
        """Whether the scoring thread is alive."""
        now = status()
        return JSONResponse({"status": "ok" if now.is_alive else "stuck"}, 200 if now.is_alive else 503)

    @app.get("/readyz")
    async def readyz() -> Response:
        """Whether requests would be scored, and the scorers of which the scores would fail, with the reasons."""
        now = status()
        if reason := now.why_not_ready or (table.problem and "the store of requests cannot be reached"):
            return JSONResponse({"status": reason}, 503)
        if now.quarantined:
            return JSONResponse({"status": "degraded", "quarantined": dict(now.quarantined)})
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics in the text format of Prometheus."""
        return PlainTextResponse(render(status(), table), media_type="text/plain; version=0.0.4")


async def _read(reader: RewardsReader, table: RequestTable, data: bytes) -> AskedRewards:
    """Read a body, for which there is room; a large one in a thread: the others are not to wait for it."""
    if len(data) <= LARGE_BYTES:
        size_bytes = memory_of(data)
        table.check_room(size_bytes)
        return reader.read(data, size_bytes)
    async with table.reading(len(data)) as count:
        size_bytes = await asyncio.to_thread(memory_of, data)
        count(size_bytes - len(data))
        return await asyncio.to_thread(reader.read, data, size_bytes)


async def _answer(request: Request, table: RequestTable, id: str, wait_s: float) -> Response | None:
    """Return the result of a request, once it is there; None if the client goes before."""
    result = asyncio.ensure_future(table.result(id, wait_s))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            return None
        found = result.result()
    finally:
        result.cancel()
        gone.cancel()
    if found is None:
        return JSONResponse({"id": id, "status": "pending"}, 202)
    return Response(render_result(found), 200, media_type=JSON)


async def _disconnected(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return JSONResponse(error.body, error.status, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    log.error("failed", path=request.url.path, error=repr(error)[:MAX_LOGGED])
    return JSONResponse({"detail": "the service failed; see its log"}, 500)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()

"""Routes of the dashboard: the page's own files, and what it asks about the runs, as JSON."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from starling.cli.dashboard import answers
from starling.cli.dashboard.control import OperatorLine
from starling.cli.dashboard.files.media import frames_of, read_media
from starling.cli.dashboard.watch import RunWatch
from starling.common.errors import StarlingError

ASSETS: Final = Path(__file__).with_name("assets")
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_STREAMS: Final = 32
"""Pages that are told of changes at a time."""
PERIOD_S: Final = 1.0
QUIET_S: Final = 15.0
"""A comment is sent after so long without a change, so that a connection that is gone is noticed."""
MAX_AT_ONCE: Final = 8
"""Requests that are answered at a time; others wait."""


@dataclass(frozen=True)
class Dashboard:
    """What the page shows, and what it may do."""

    watches: Sequence[RunWatch]
    may_control: bool
    key: Path | None
    """An operator's key; None for that of each run."""
    closing: threading.Event
    """Set when the server stops."""


def application(dashboard: Dashboard) -> Starlette:
    """Return the ASGI application; `access.Guard` has to stand in front of it."""
    return Starlette(routes=_Routes(dashboard).routes())


class _Routes:
    """The handlers, and what they share."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        self._lines = [OperatorLine(dashboard.key) for _ in dashboard.watches]
        self._views: list[bytes] = []
        self._viewed_at = float("-inf")
        self._view_lock = threading.Lock()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_streams = 0

    def routes(self) -> list[Route]:
        """Return all routes."""
        of_a_run: dict[str, Callable[[RunWatch, answers.Query], Any]] = {
            "catalog": answers.catalog,
            "series": answers.series,
            "staleness": answers.staleness,
            "events": answers.events,
            "weights": answers.weights,
            "replicas": answers.replicas,
            "completions": answers.completions,
            "tokens": answers.tokens,
            "settings": answers.settings,
        }
        return [
            Route("/", self._page),
            Route("/assets/{name}", self._asset),
            Route("/api/runs", self._runs),
            Route("/api/live", self._live),
            Route("/api/compare", self._compare),
            *(Route(f"/api/runs/{{run:int}}/{name}", self._answer(read)) for name, read in of_a_run.items()),
            Route("/api/runs/{run:int}/media", self._media),
            Route("/api/runs/{run:int}/why", self._why),
            Route("/api/runs/{run:int}/control", self._control, methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        return _file("index.html")

    async def _asset(self, request: Request) -> Response:
        return _file(request.path_params["name"])

    async def _runs(self, request: Request) -> Response:
        shown = [{"id": watch.number, "name": watch.name, "folder": str(watch.folder)} for watch in self._watches]
        return _json({"runs": shown, "may_control": self._dashboard.may_control, "plots": answers.plots()})

    @property
    def _watches(self) -> Sequence[RunWatch]:
        return self._dashboard.watches

    def _watch(self, request: Request) -> RunWatch:
        number: int = request.path_params["run"]
        if not 0 <= number < len(self._watches):
            raise HTTPException(404, "there is no such run here")
        return self._watches[number]

    def _answer(self, read: Callable[[RunWatch, answers.Query], Any]) -> Callable[[Request], Any]:
        """Return the handler that reads a run in a thread, without delaying others."""

        async def handler(request: Request) -> Response:
            watch = self._watch(request)
            async with self._slots:
                return await run_in_threadpool(_answered, read, watch, answers.Query(request.query_params))

        return handler

    async def _compare(self, request: Request) -> Response:
        async with self._slots:
            return await run_in_threadpool(lambda: _json(answers.compare(self._watches)))

    async def _media(self, request: Request) -> Response:
        watch, query = self._watch(request), answers.Query(request.query_params)
        async with self._slots:
            try:
                return await run_in_threadpool(_media, watch, query)
            except StarlingError as error:
                raise HTTPException(404, str(error)) from None

    async def _why(self, request: Request) -> Response:
        watch = self._watch(request)
        return await run_in_threadpool(self._operator, watch, lambda line, attempt: line.query(attempt, "why"))

    async def _control(self, request: Request) -> Response:
        watch = self._watch(request)
        if not self._dashboard.may_control:
            raise HTTPException(403, "this page only shows; start it with --allow-control")
        try:
            asked = msgspec.json.decode(await request.body())
        except (msgspec.DecodeError, RecursionError):
            raise HTTPException(400, "the request is no JSON") from None
        if not isinstance(asked, dict):
            raise HTTPException(400, "the request is no JSON object")
        return await run_in_threadpool(self._operator, watch, lambda line, attempt: line.act(attempt, asked))

    def _operator(self, watch: RunWatch, ask: Callable[[OperatorLine, Any], Any]) -> Response:
        attempt = watch.attempt
        try:
            if attempt is None:
                raise StarlingError(f"there is no run in {watch.folder}")
            reply = ask(self._lines[watch.number], attempt)
        except StarlingError as error:
            return _json({"ok": False, "text": str(error), "data": {}})
        return _json({"ok": reply.ok, "text": reply.text, "data": reply.data})

    async def _live(self, request: Request) -> Response:
        if self._num_streams >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} pages are open; close one")
        return StreamingResponse(self._changes(request), media_type="text/event-stream")

    async def _changes(self, request: Request) -> AsyncIterator[bytes]:
        """Yield each run's state when it has changed."""
        self._num_streams += 1
        try:
            sent: list[bytes] = [b""] * len(self._watches)
            quiet_since = time.monotonic()
            yield b"retry: 2000\n\n"
            while not self._dashboard.closing.is_set() and not await request.is_disconnected():
                views = await run_in_threadpool(self._current_views)
                changed = b"".join(
                    b"event: run\ndata: " + view + b"\n\n" for view, old in zip(views, sent, strict=True) if view != old
                )
                sent = views
                if changed or time.monotonic() > quiet_since + QUIET_S:
                    quiet_since = time.monotonic()
                    yield changed or b": \n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            self._num_streams -= 1

    def _current_views(self) -> list[bytes]:
        """Return the encoded states of all runs, made once for all pages."""
        with self._view_lock:
            if time.monotonic() > self._viewed_at + PERIOD_S / 2:
                self._views = [msgspec.json.encode(watch.view()) for watch in self._watches]
                self._viewed_at = time.monotonic()
            return self._views


def _answered(read: Callable[[RunWatch, answers.Query], Any], watch: RunWatch, query: answers.Query) -> Response:
    try:
        return _json(read(watch, query))
    except answers.BadQueryError as error:
        raise HTTPException(400, str(error)) from None
    except (StarlingError, OSError) as error:
        raise HTTPException(404, str(error)) from None


def _media(watch: RunWatch, query: answers.Query) -> Response:
    """Return an image or a video; of a folder of frames the one that is asked for, or how many there are."""
    uri = answers.media_uri(watch, query)
    frames = frames_of(uri)
    if frames is not None:
        number = int(query.number("frame", -1, -1, len(frames) - 1))
        if number < 0:
            return _json({"frames": len(frames)})
        uri = str(frames[number])
    content, kind = read_media(uri)
    return Response(content, media_type=kind)


def _file(name: str) -> Response:
    path = ASSETS / name
    if path.parent != ASSETS or path.suffix not in TYPES or not path.is_file():
        raise HTTPException(404, "there is no such file")
    return FileResponse(path, headers={"content-type": TYPES[path.suffix], "cache-control": "no-cache"})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")

"""ASGI middleware that reads the body of a request within limits of size and time, before the application sees it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import msgspec
from fastapi import Request

from starling.reward.http.errors import HttpError
from starling.reward.http.table import RequestTable

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

LARGE_BYTES: Final = 1 << 20
"""The parts of a larger body are joined in a thread of its own."""
UNAUTHORISED_DRAIN_S: Final = 2.0
"""How long the body of a request without the token is read, and dropped."""


class LimitedBodies:
    """Answers 413 to a body that is too large, 408 to one that takes too long, 429 where memory is used up, and 401.

    Args:
        application: gets whole bodies only.
        check_token: raises HttpError for headers without the token; called before the body is read.
        table: knows how much memory is used; bodies that are being read count.
        timeout_s: time limit of a body, in seconds.
        with_body: limits on the bodies that are read, in bytes, by method and path; those of other requests are not
            looked at.
    """

    def __init__(
        self,
        application: Application,
        check_token: Callable[[str, str], None],
        table: RequestTable,
        timeout_s: float,
        with_body: Mapping[tuple[str, str], int],
    ) -> None:
        self._application, self._check_token, self._table = application, check_token, table
        self._timeout_s, self._with_body = timeout_s, with_body

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = dict(scope["headers"])
        body_parts = _BodyParts(receive)
        started = time.monotonic()
        try:
            self._check_token(scope["path"], headers.get(b"authorization", b"").decode("latin-1"))
            limit = self._with_body.get((scope["method"], scope["path"]))
            body = b"" if limit is None else await self._read(headers, body_parts, limit)
        except HttpError as error:
            left_s = self._timeout_s - (time.monotonic() - started)
            await body_parts.drain(UNAUTHORISED_DRAIN_S if error.status == 401 else left_s)
            await _send_error(send, error)
            return
        if body is None:  # the client has gone
            return
        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # the application says how long it is kept

        async def replayed() -> Message:
            return parts.pop() if parts else await receive()

        await self._application(scope, replayed, send)

    async def _read(self, headers: dict[bytes, bytes], body_parts: _BodyParts, limit: int) -> bytes | None:
        declared = headers.get(b"content-length", b"0")
        # The protocol has refused what is no number.
        if int(declared) > limit:
            raise self._too_large(limit)
        self._table.check_room(int(declared))
        parts, reserved = [], 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await body_parts.receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part: bytes = message.get("body", b"")
                    if reserved + len(part) > limit:
                        raise self._too_large(limit)
                    self._table.check_room(len(part))
                    self._table.size_bytes += len(part)
                    reserved += len(part)
                    parts.append(part)
                    if not message.get("more_body", False):
                        # Others go on meanwhile.
                        return await asyncio.to_thread(b"".join, parts) if reserved > LARGE_BYTES else b"".join(parts)
        except TimeoutError:
            raise HttpError(408, f"the body was not complete after {self._timeout_s:g} s; send it at once") from None
        finally:
            self._table.size_bytes -= reserved

    def _too_large(self, limit: int) -> HttpError:
        size = f"{limit >> 20} MiB" if limit >> 20 else f"{limit >> 10} KiB"
        return HttpError(413, f"the body has more than {size}; send fewer samples at a time")


async def take_body(request: Request) -> bytes:
    """Return the body of a request, which does not keep it: it may wait for its answer long after that."""
    return b"".join([part async for part in request.stream()])


class _BodyParts:
    """The parts of a body, and whether some are left.

    Args:
        receive: of the request.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False

    async def receive(self) -> Message:
        """Return the next part, or that the client has gone."""
        message = await self._receive()
        self._is_whole = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def drain(self, limit_s: float) -> None:
        """Read the rest, for a limited time.

        Clients read the answer after they have sent the body. A connection that is closed with something unread is
        reset, which loses the answer: the client would take the refusal for a failure of the network.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self._is_whole:
                    await self.receive()


async def _send_error(send: Send, error: HttpError) -> None:
    headers = {"content-type": "application/json", **error.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": msgspec.json.encode(error.body)})

"""HTTP protocol of the server: uvicorn's, which waits for a request's headers without a limit and keeps all of them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES: Final = 64 << 10
"""Limit on the headers of one request, with its first line and what follows its body."""


class HeaderLimitProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection when the headers of a request are too many or take too long."""

    limit_s: float
    """How long headers may take."""
    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    """Of the headers of the present request."""
    _num_pending = 0
    """Received since the parser has last found anything."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # a request whose headers are complete
            self._stop_timer()
        else:
            self._start_timer()
        # The parser in Python, h11, has such a limit itself, and makes none of the calls below.
        if hasattr(self, "parser") and max(self._num_bytes, self._num_pending) > MAX_HEADER_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._num_bytes = self._num_pending = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._found(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._found(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._found(0)
        super().on_body(body)

    def _found(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_pending = 0

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limit_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_with_header_limits(limit_s: float) -> type[asyncio.Protocol]:
    """Return the protocol of connections that are closed when a request's headers are too many or take too long.

    Args:
        limit_s: how long headers may take, in seconds; `MAX_HEADER_BYTES` is how many bytes they may have.
    """
    return type(HeaderLimitProtocol.__name__, (HeaderLimitProtocol,), {"limit_s": limit_s})

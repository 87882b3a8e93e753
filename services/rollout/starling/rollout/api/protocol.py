"""HTTP protocol of the server: uvicorn's, with limits on headers and on clients that do not read.

uvicorn waits for a request's headers without a limit, keeps all of them, and waits for ever for a client to read.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES: Final = 64 << 10
"""Limit on the headers of one request, with its first line and what follows its body."""


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection when the headers of a request are too many or take too long, or the client reads nothing."""

    headers_s: float
    """How long headers may take."""
    unread_s: float
    """How long the client may take nothing of what waits for it."""
    _unread: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _num_bytes = 0
    """Of the headers of the present request."""
    _num_pending = 0
    """Received since the parser has last found anything."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing then pauses as soon as the kernel takes no more, also at the end of a response.
        transport.set_write_buffer_limits(high=0)
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
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._look_after(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

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
            self._timer = self.loop.call_later(self.headers_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_after(self, num_unsent: int) -> None:
        self._unread = self.loop.call_later(self.unread_s, self._look, num_unsent)

    def _look(self, num_before: int) -> None:
        """End the connection unless the client has read some of the `num_before` bytes that waited for it."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent < num_before:
            self._look_after(num_unsent)
        else:
            self.transport.abort()  # to close it would wait until all is sent

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def limited_protocol(headers_s: float, unread_s: float) -> type[asyncio.Protocol]:
    """Return the protocol of connections that are closed when a client sends headers, or reads, too slowly.

    Args:
        headers_s: how long headers may take, in seconds; `MAX_HEADER_BYTES` is how many bytes they may have.
        unread_s: how long a client may read nothing of a response that waits for it, in seconds.
    """
    return type(LimitedProtocol.__name__, (LimitedProtocol,), {"headers_s": headers_s, "unread_s": unread_s})

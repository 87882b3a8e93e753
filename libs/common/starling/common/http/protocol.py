"""HTTP protocol of the server: uvicorn's, with limits on headers, on clients that do not read, and on connections.

uvicorn waits for a request's headers without a limit, keeps all of them, and all requests that wait for the one before
them, waits for ever for a client to read, and accepts connections as long as the process has descriptors.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import Sequence
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES: Final = 64 << 10
"""Limit on the headers of one request, with its first line and what follows its body."""
MAX_PIPELINED: Final = 16
"""Requests of a connection that wait for the one before: uvicorn parses all that arrive at once, reads on after each
answer, and keeps some KiB for each."""
MAX_CONNECTIONS: Final = 4096
CONNECTIONS_SHARE: Final = 4
"""A server has at most one in so many of the process's descriptors: a rollout needs others to pull weights and to start
sessions of sandboxes."""


def most_connections() -> int:
    """Return how many connections may be open at a time, and let the process open as many files as that needs, if it
    may."""
    wanted = CONNECTIONS_SHARE * MAX_CONNECTIONS
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    if files < wanted:
        files = wanted if most_files == resource.RLIM_INFINITY else min(wanted, most_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))
    return min(MAX_CONNECTIONS, files // CONNECTIONS_SHARE)


class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection when the headers of a request are too many or take too long, or the client reads nothing.

    Where too many are open, the one without a request in progress that was heard least recently is closed: a client
    without a key, such as the code in a sandbox, could otherwise take all.
    """

    headers_s: float
    """How long headers may take."""
    unread_s: float
    """How long the client may take nothing of what waits for it."""
    most: int
    """How many connections may be open."""
    heard = 0
    """Number of the event by which the client has connected, or last sent anything. The loop's clock has one time for
    all events of a millisecond."""
    _next = staticmethod(itertools.count(1).__next__)
    _unread: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _cycles: Sequence[Any] = ()
    """Requests of the parser in C that are in progress or wait."""
    _num_bytes = 0
    """Of the headers of the present request."""
    _num_pending = 0
    """Received since the parser has last found anything."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Writing then pauses as soon as the kernel takes no more, also at the end of a response.
        transport.set_write_buffer_limits(high=0)
        self._start_timer()
        self.heard = self._next()
        if len(self.connections) > self.most:
            self._make_room()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress, or the client does not read its response."""
        return self.cycle is None or self.cycle.response_complete or self._unread is not None

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        self.heard = self._next()
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
        for cycle in self._cycles:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_unread()
        self._look_after(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_unread()
        super().resume_writing()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at a time")  # the parser stops, and the connection is closed
        self._num_bytes = self._num_pending = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._found(len(url))
        super().on_url(url)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._cycles = [one for one in (*self._cycles, self.cycle) if not one.response_complete]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._found(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._found(0)
        super().on_body(body)

    def _found(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._num_pending = 0

    def _make_room(self) -> None:
        """Close a connection for this one, or this one if all others have requests in progress."""
        others = [one for one in self.connections if one is not self and not one.transport.is_closing()]
        if len(others) >= self.most:
            idle = (one for one in others if one.is_idle)
            min(idle, key=lambda one: one.heard, default=self).transport.abort()

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


def limited_protocol(headers_s: float, unread_s: float, most: int = MAX_CONNECTIONS) -> type[asyncio.Protocol]:
    """Return the protocol of connections that are closed when a client sends headers, or reads, too slowly.

    Args:
        headers_s: how long headers may take, in seconds; `MAX_HEADER_BYTES` is how many bytes they may have.
        unread_s: how long a client may read nothing of a response that waits for it, in seconds.
        most: how many connections may be open at a time.
    """
    limits = {"headers_s": headers_s, "unread_s": unread_s, "most": most}
    return type(LimitedProtocol.__name__, (LimitedProtocol,), limits)

"""Connections of readers to a server with one thread: accepted, advanced and closed in that thread."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from starling.weightsync.transports.endpoints import MAX_CONNECTIONS, most_connections, surplus
from starling.weightsync.transports.sockets.listener import Listener


class ReaderConnection(Protocol):
    """One reader."""

    @property
    def reader(self) -> str:
        """The replica that has proven a ticket; empty until one has."""

    def advance(self) -> bool:
        """Make all progress that is possible without waiting. Return whether the connection is still alive."""

    def close(self) -> None:
        """Close the connection, and give its lease of a snapshot back."""


C = TypeVar("C", bound=ReaderConnection)

log = logging.getLogger(__name__)


class ReaderConnections(Generic[C]):
    """The connections of one server, from the oldest. Iteration gives those that are open.

    Args:
        make: returns the connection of a reader from its socket.
    """

    def __init__(self, make: Callable[[socket.socket], C]) -> None:
        self._make = make
        self._open: list[C] = []

    def __iter__(self) -> Iterator[C]:
        return iter(self._open)

    def accept(self, listener: Listener) -> None:
        """Accept all readers that wait; if the server is full, each in place of another one or not at all."""
        while (connection := listener.accept()) is not None:
            if len(self._open) >= most_connections(MAX_CONNECTIONS):
                index = surplus([one.reader for one in self._open])
                if index is None:
                    connection.close()
                    continue
                self._open.pop(index).close()
            self._open.append(self._make(connection))

    def advance(self) -> None:
        """Advance every connection, and close those that are no longer alive."""
        living = []
        for connection in self._open:
            if _advance(connection):
                living.append(connection)
            else:
                connection.close()
        self._open = living

    def close(self, after_each: Callable[[], object] = lambda: None) -> None:
        """Close all connections, from the newest; `after_each` is called after each one."""
        while self._open:
            self._open.pop().close()
            after_each()


def _advance(connection: ReaderConnection) -> bool:
    """Advance a connection. Return whether it is still alive."""
    try:
        return connection.advance()
    except Exception:  # a reader must not end serving for all others, whatever it has sent
        log.exception("the connection of %s has failed", connection.reader or "a reader without a ticket")
        return False

"""Listening socket of the servers, which accepts nothing for a while after a failure and serves existing readers on."""

from __future__ import annotations

import logging
import select
import socket
import time

from starling.common.errors import WeightsError
from starling.weightsync.transports.endpoints import ACCEPT_BACKOFF_S

log = logging.getLogger(__name__)


class Listener:
    """Listens on a free port of `host`. Used by one thread, which waits in `accept`, or polls `fileno` for `events`.

    Raises:
        WeightsError: `host` cannot be listened on.
    """

    def __init__(self, host: str) -> None:
        try:
            self._socket = socket.create_server((host, 0))
        except OSError as error:
            raise WeightsError(f"Cannot listen on {host}: {error.strerror or error}.") from error
        self._socket.setblocking(False)
        self._accept_at = float("-inf")
        """Monotonic time from which connections are accepted again."""
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        """Address that readers connect to."""

    @property
    def events(self) -> int:
        """The poll events to wait for: none while it accepts no connection."""
        return select.POLLIN if time.monotonic() >= self._accept_at else 0

    def fileno(self) -> int:
        """The descriptor to poll; -1 when closed."""
        return self._socket.fileno()

    def accept(self, wait_s: float = 0.0) -> socket.socket | None:
        """Return the next connection, or None when none comes within `wait_s`."""
        if wait_s:
            poll = select.poll()
            poll.register(self._socket, self.events)
            poll.poll(1000 * wait_s)
        while time.monotonic() >= self._accept_at:
            try:
                return self._socket.accept()[0]
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # closed by the reader before it was accepted
            except OSError as error:
                self.pause(error)
        return None

    def pause(self, error: Exception) -> None:
        """Accept no connection for a while, because one could not be served; existing ones are served on."""
        log.warning("a reader cannot be served now: %s", error)
        self._accept_at = time.monotonic() + ACCEPT_BACKOFF_S

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

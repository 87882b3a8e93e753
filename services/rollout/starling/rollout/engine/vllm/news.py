"""What a worker tells its replica of a pull, without being asked: an engine that answers cannot generate meanwhile.

One datagram for each; the replica listens at a path, so all workers are on its host.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

import msgspec

from starling.weightsync.execute.pull import PullReport
from starling.weightsync.execute.transfer import Progress

SEND_S: Final = 10.0
"""How long a worker tries to tell how a pull ended."""
MOST_BYTES: Final = 1 << 16


class News(msgspec.Struct, frozen=True, kw_only=True):
    """How far the pull of one worker is, or how it ended."""

    pull: int
    """Number of the pull."""
    rank: int
    progress: Progress | None = None
    report: PullReport | None = None
    problem: str = ""


class Teller:
    """A worker's end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, news: News) -> None:
        """Send `news`. Progress that nobody reads is dropped; an end is tried for a while."""
        ends = news.progress is None
        self._socket.settimeout(SEND_S if ends else 0.0)
        try:
            self._socket.sendto(msgspec.msgpack.encode(news), self._path)
        except OSError:
            pass  # nobody listens any more: the replica has given the pull up

    def close(self) -> None:
        """Tell nothing more."""
        self._socket.close()


class Listener:
    """The replica's end."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "news")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._decoder = msgspec.msgpack.Decoder(News)

    def next(self, timeout_s: float) -> News | None:
        """Return the next news, or None after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            return self._decoder.decode(self._socket.recv(MOST_BYTES))
        except TimeoutError:
            return None

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()

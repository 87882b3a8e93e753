"""Plain sockets: the transport that works everywhere, and the measure for the others.

The payload of a `Read` follows its answer on the same socket: its segments, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.sockets.channel import Channel
from starling.weightsync.transports.sockets.server import SocketClient, SocketServer
from starling.weightsync.transports.source import SnapshotSource


class _Stream:
    """A `Carrier` that is the channel itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def opened(self) -> None:
        """See `Carrier.opened`: nothing is to be made ready."""

    def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
        """See `Carrier.send`."""
        self._channel.send([answer, *(segment.data for segment in segments)])

    def receive(self, buffers: Sequence[Memory]) -> None:
        """See `Carrier.receive`."""
        for buffer in buffers:
            self._channel.receive(buffer.data)

    def close(self) -> None:
        """See `Carrier.close`: waits on a channel are ended by whoever owns it."""


def tcp_server(source: SnapshotSource, *, host: str) -> SocketServer:
    """Serve a source over plain sockets. Raises WeightsError when nobody can be served at `host`."""
    return SocketServer(source, _Stream, host=host)


def tcp_client() -> SocketClient:
    """Make a `Wire` over plain sockets."""
    return SocketClient("tcp", _Stream)

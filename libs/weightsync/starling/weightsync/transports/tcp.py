"""Plain sockets: the transport that works everywhere, and the reference for the others.

The payload of a `ReadBoxes` follows its answer on the same socket: its segments, one after the other. It is the only
transport that can encrypt.
"""

from __future__ import annotations

from collections.abc import Sequence

from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.sockets.channel import Channel
from starling.weightsync.transports.sockets.client import SocketClient
from starling.weightsync.transports.sockets.server import SocketServer
from starling.weightsync.transports.source import SnapshotSource


class _ChannelCarrier:
    """A `PayloadCarrier` that sends payloads over the channel itself."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def opened(self) -> None:
        """See `PayloadCarrier.opened`: there is nothing to set up."""

    def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
        """See `PayloadCarrier.send`."""
        self._channel.send([answer, *(segment.data for segment in segments)])

    def receive(self, buffers: Sequence[Memory]) -> None:
        """See `PayloadCarrier.receive`."""
        for buffer in buffers:
            self._channel.receive(buffer.data)

    def close(self) -> None:
        """See `PayloadCarrier.close`: the owner of the channel ends waits on it."""


def tcp_server(source: SnapshotSource, *, host: str, encrypted: bool = False) -> SocketServer:
    """Serve a source over plain sockets. Raises WeightsError when `host` cannot be listened on."""
    return SocketServer(source, _ChannelCarrier, host=host, encrypted=encrypted)


def tcp_client() -> SocketClient:
    """Return a `TransportClient` over plain sockets."""
    return SocketClient("tcp", _ChannelCarrier)

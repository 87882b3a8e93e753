"""The interface of a payload carrier: how payloads travel for a transport whose messages go over a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.sockets.channel import Channel


class PayloadCarrier(Protocol):
    """One end of the payload path of one channel. Used by one thread, except for `close`."""

    def opened(self) -> None:
        """Set up the path: the reader has proven its ticket. Called at both ends, right after the answer."""

    def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
        """Send the answer to a `ReadBoxes`, then its payload."""

    def receive(self, buffers: Sequence[Memory]) -> None:
        """Receive the payload of an answer that has arrived, one buffer for each segment."""

    def close(self) -> None:
        """Abort transfers under way; after it returns nothing is read or written. Thread-safe; may be called twice."""


MakeCarrier = Callable[[Channel], PayloadCarrier]

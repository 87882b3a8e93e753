"""Multipart messages in and out of a socket, without what pyzmq's own functions check on the way.

For the small messages of the control plane those checks cost more than the socket does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

COPY_BYTES: Final = 64 << 10
"""A smaller frame is copied: that takes less time than to keep track of its owner."""

_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST: Final = int(zmq.NOBLOCK)


def receive(socket: zmq.Socket[Any], flags: int = zmq.NOBLOCK) -> list[zmq.Frame] | None:
    """Return the next message; None when there is none yet, or without NOBLOCK none within the socket's `rcvtimeo`."""
    try:
        frame = socket.recv(flags, copy=False)
    except zmq.Again:
        return None
    frames = [frame]
    while frame.more:  # the rest of a message arrives with its first frame
        frame = socket.recv(flags, copy=False)
        frames.append(frame)
    return frames


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview]) -> None:
    """Send one message whole, or raise `zmq.Again` (no room) or another `zmq.ZMQError` and send nothing of it."""
    *leading, last = frames
    for frame in leading:
        socket.send(frame, _MORE, len(frame) < COPY_BYTES)
    socket.send(last, _LAST, len(last) < COPY_BYTES)

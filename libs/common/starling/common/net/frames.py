"""Multipart messages in and out of a socket, without what pyzmq's own functions check on the way.

For the small messages of the control plane those checks cost more than the socket does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

COPY_BYTES: Final = 64 << 10
"""A smaller frame is copied: that takes less time than to keep track of its owner."""


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
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = zmq.NOBLOCK | zmq.SNDMORE if number < last else zmq.NOBLOCK
        socket.send(frame, flags, copy=len(frame) < COPY_BYTES)

"""Multipart messages in and out of a socket, without what pyzmq's own functions check on the way.

For the small messages of the control plane those checks cost more than the socket does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

COPY_BYTES: Final = 64 << 10
"""A smaller frame is copied: that takes less time than to keep track of its owner."""

_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST: Final = int(zmq.NOBLOCK)

# As plain numbers: an operation on members of an enumeration takes half as long as the question to the socket itself.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)

_send: Final[Callable[..., object]] = zmq.backend.Socket.send
"""What `zmq.Socket.send` calls after it has looked for options of draft sockets, which takes as long again."""


def receive(socket: zmq.Socket[Any], flags: int = zmq.NOBLOCK) -> tuple[list[bytes], zmq.Frame] | None:
    """Return the frames of the next message, and the last one as libzmq gave it, which knows of the connection.

    Returns None when there is no message yet, or without NOBLOCK none within the socket's `rcvtimeo`.
    """
    try:
        frame = socket.recv(flags, False)
    except zmq.Again:
        return None
    parts = [frame.bytes]
    while frame.more:  # the rest of a message arrives with its first frame
        frame = socket.recv(flags, False)
        parts.append(frame.bytes)
    return parts, frame


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview]) -> None:
    """Send one message whole, or raise `zmq.Again` (no room) or another `zmq.ZMQError` and send nothing of it."""
    *leading, last = frames
    for frame in leading:
        _send(socket, frame, _MORE, len(frame) < COPY_BYTES)
    _send(socket, last, _LAST, len(last) < COPY_BYTES)


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Say whether there is a message. To ask costs less than half of what an attempt in vain does."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)

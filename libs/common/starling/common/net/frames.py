"""Receive and send multipart messages, without the checks of pyzmq's own functions.

For the small messages of the control plane those checks cost more than the socket does.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import zmq

from starling.common.wire.codec import MAX_BUFFERS

COPY_BYTES: Final = 64 << 10
"""Smaller frames are copied: that takes less time than tracking their owner."""

MAX_FRAMES: Final = MAX_BUFFERS + 4
"""More than any message has, with the route of its connection."""

_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST: Final = int(zmq.NOBLOCK)

# Plain numbers: an operation on enum members takes half as long as the socket option itself.
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_RCVMORE: Final = int(zmq.RCVMORE)
_NOBLOCK: Final = int(zmq.NOBLOCK)

SKIPPED_AT_ONCE: Final = 1024
"""Frames that are dropped by one call of libzmq."""

_send: Final[Callable[..., object]] = zmq.backend.Socket.send
"""The function behind `zmq.Socket.send`, whose check for options of draft sockets takes as long again."""
_recv: Final[Callable[..., Any]] = zmq.backend.Socket.recv
"""The function behind `zmq.Socket.recv`: to look up an attribute of a socket takes long."""


def receive(
    socket: zmq.Socket[Any], flags: int = zmq.NOBLOCK, most: int = MAX_FRAMES
) -> tuple[list[bytes], zmq.Frame] | None:
    """Return the frames of the next message, and its last `zmq.Frame`, which has the properties of the connection.

    Of a message with more than `most` frames only so many are returned, and the others dropped. Returns None if there
    is no message yet, or without NOBLOCK none within the socket's `rcvtimeo`.
    """
    try:
        frame = _recv(socket, flags, False)
    except zmq.Again:
        return None
    parts = [frame.bytes]
    while frame.more:  # the rest of a message arrives with its first frame
        if len(parts) == most:
            _skip_rest(socket)
            break
        frame = _recv(socket, flags, False)
        parts.append(frame.bytes)
    return parts, frame


def _load_skip() -> tuple[Callable[..., int], Callable[[int], None]] | None:
    """Return `zmq_recviov`, which receives many frames at once, and `free` for what it allocates; None without it."""
    try:
        from zmq.backend.cython import _zmq

        receive_many = ctypes.PyDLL(_zmq.__file__).zmq_recviov
        free = ctypes.PyDLL(None).free
    except (ImportError, OSError, AttributeError):  # another backend, or a libzmq whose functions are hidden
        return None
    receive_many.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    free.argtypes, free.restype = [ctypes.c_void_p], None
    return receive_many, free


_SKIP: Final = _load_skip()


def _skip_rest(socket: zmq.Socket[Any]) -> None:
    """Drop the frames that are left of the message that is being received.

    It may have millions, and must be received as a whole. pyzmq takes 1.4 µs for each, and this a quarter of that.
    """
    frames, num = (ctypes.c_size_t * (2 * SKIPPED_AT_ONCE))(), ctypes.c_size_t()
    while int(socket.getsockopt(_RCVMORE)):
        num.value = SKIPPED_AT_ONCE
        if _SKIP is None:
            _recv(socket, _NOBLOCK)
            continue
        receive_many, free = _SKIP
        result = receive_many(socket.underlying, ctypes.addressof(frames), ctypes.addressof(num), _NOBLOCK)
        deque(map(free, frames[: 2 * num.value : 2]), maxlen=0)  # each frame is an address and a length
        if result < 0:
            _recv(socket, _NOBLOCK)  # which raises the error


def receive_routed(
    socket: zmq.Socket[Any], flags: int = zmq.NOBLOCK, most: int = MAX_FRAMES
) -> tuple[bytes, list[bytes], zmq.Frame] | None:
    """Return the routing id that a ROUTER puts before a message, and the message as `receive` does."""
    try:
        # As bytes, because a `zmq.Frame` takes twice as long; that a message follows need not be asked.
        route: bytes = _recv(socket, flags)
    except zmq.Again:
        return None
    message = receive(socket, flags, most)
    assert message is not None, "a message arrives with all its frames"
    return route, *message


def send(socket: zmq.Socket[Any], frames: Sequence[bytes | memoryview]) -> None:
    """Send one message, or raise `zmq.Again` (queue full) or another `zmq.ZMQError` and send nothing."""
    *leading, last = frames
    for frame in leading:
        _send(socket, frame, _MORE, len(frame) < COPY_BYTES)
    _send(socket, last, _LAST, len(last) < COPY_BYTES)


def is_readable(socket: zmq.Socket[Any]) -> bool:
    """Whether there is a message. This costs less than half of a failed `receive`."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)

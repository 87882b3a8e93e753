"""Encoding of messages as frames, and back. Any frame that is not a valid message raises `WireError`.

    [envelope][message][buffer ...]      (after the identity frame that ROUTER adds)

Sizes are checked before anything is decoded; the buffers that a message describes must follow it, each of the stated
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from starling.common.errors import WireError
from starling.common.wire import messages
from starling.common.wire.messages import Down, Envelope, TensorMeta, Up

MAX_ENVELOPE_BYTES: Final = 4 << 10
MAX_MESSAGE_BYTES: Final = 16 << 20
MAX_BUFFER_BYTES: Final = 1 << 30
MAX_BUFFERS: Final = 1 << 16

type_names: Final = {
    "up": tuple(sorted(t.__struct_config__.tag for t in messages.Up.__args__)),
    "down": tuple(sorted(t.__struct_config__.tag for t in messages.Down.__args__)),
}
"""The tags of each direction, for documentation and tests."""

M = TypeVar("M")

Buffers = Sequence[bytes | memoryview]

_encoder: Final = msgspec.msgpack.Encoder()
_envelope: Final = msgspec.msgpack.Decoder(Envelope)
_up: Final[msgspec.msgpack.Decoder[Up]] = msgspec.msgpack.Decoder(messages.Up)
_down: Final[msgspec.msgpack.Decoder[Down]] = msgspec.msgpack.Decoder(messages.Down)


def pack(envelope: Envelope, message: Up | Down, buffers: Buffers = ()) -> list[bytes | memoryview]:
    """Encode one message as frames. Raises WireError if the receiver would refuse it."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}; "
            "make the prompts or the step smaller",
            "size",
        )
    if len(buffers) > MAX_BUFFERS:
        raise WireError(
            f"a {type(message).__name__} with {len(buffers)} buffers is over the limit of {MAX_BUFFERS}; make the step "
            "smaller",
            "size",
        )
    return [_encoder.encode(envelope), body, *buffers]


def unpack_envelope(frames: Sequence[bytes | memoryview]) -> Envelope:
    """Decode the first frame only, so that a receiver can refuse a peer before it decodes the message."""
    if len(frames) < 2:
        raise WireError(f"a message has at least 2 frames, this one has {len(frames)}")
    if len(frames) > MAX_BUFFERS + 2:
        raise WireError(f"a message of {len(frames)} frames is over the limit of {MAX_BUFFERS + 2}", "size")
    if len(frames[0]) > MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(frames[0])} bytes is over the limit of {MAX_ENVELOPE_BYTES}", "size")
    try:
        return _envelope.decode(frames[0])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"an envelope does not decode: {error}") from None


def unpack_up(frames: Sequence[bytes | memoryview]) -> Up:
    """Decode the second frame as a message to the controller, and check the buffers after it."""
    return _checked(_decode(_up, frames[1]), frames[2:])


def unpack_down(frames: Sequence[bytes | memoryview]) -> Down:
    """Decode the second frame as a message of the controller, and check the buffers after it."""
    return _checked(_decode(_down, frames[1]), frames[2:])


def _decode(decoder: msgspec.msgpack.Decoder[M], frame: bytes | memoryview) -> M:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is over the limit of {MAX_MESSAGE_BYTES}", "size")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a message does not decode: {error}") from None


def _tensors(message: Any) -> Sequence[TensorMeta]:
    tensors: Sequence[TensorMeta] = message.tensors
    return tensors


_BUFFERS_AFTER: Final[dict[type, Callable[[Any], int | Sequence[TensorMeta]]]] = {
    messages.GroupGenerated: _tensors,
    messages.GroupInterrupted: _tensors,
    messages.GenerateGroup: _tensors,
    messages.ScoreGroup: _tensors,
    messages.ScoreTokens: _tensors,
    messages.TokensScored: _tensors,
    messages.TrainStep: lambda message: [meta for group in message.groups for meta in group.tensors],
    messages.Hello: lambda message: int(message.has_layout),
    messages.WeightsPublished: lambda message: 1,
    messages.RelayOffered: lambda message: 0 if message.problem else 1,
    messages.PublishWeights: lambda message: len(message.layouts),
    messages.RoleSettings: lambda message: len(message.files),
    messages.AdoptWeights: lambda message: 2 + message.has_root_plan + len(message.relays),
}
"""What follows a message, by its type: tensors that it describes, or a number of buffers; nothing follows others."""


def _checked(message: M, buffers: Buffers) -> M:
    expected_after = _BUFFERS_AFTER.get(type(message))
    if expected_after is None and not buffers:
        return message
    expected = expected_after(message) if expected_after is not None else 0
    if isinstance(expected, int):
        if len(buffers) != expected:
            raise WireError(f"{type(message).__name__} has {len(buffers)} buffers instead of {expected}", "buffers")
    elif [len(buffer) for buffer in buffers] != [meta.nbytes for meta in expected]:
        name = type(message).__name__
        raise WireError(f"{name} does not describe the sizes of the {len(buffers)} buffers after it", "buffers")
    return message

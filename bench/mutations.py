"""Malformed messages: recorded ones with random mutations, deterministic for a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.common.errors import WireError
from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope

GOLDEN: Final = Path(__file__).parents[1] / "tests/unit/common/golden_frames.json"
HUGE: Final = (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
"""Heads of an array, a map, bytes and a text that claim 4 Gi elements."""
ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    2**63,
    -(2**63),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "\0",
    [],
    [[]],
    {},
    {"": {}},
    b"",
    b"\xff" * 100,
    "policy-0",
    "rollout-0",
)


class Mutator:
    """Generator of mutated messages."""

    def __init__(self, seed: int, run: str, sender: str) -> None:
        """Mutate messages of `sender` in `run`, valid and invalid ones."""
        self._random = random.Random(seed)
        self._run, self._sender = run, sender
        self._seq = 0
        self._bodies = [bytes.fromhex(text) for text in json.loads(GOLDEN.read_text()).values()]
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            self._flip,
            self._flip,
            self._cut,
            self._insert,
            self._splice,
            self._claim,
            self._swap_value,
            self._swap_value,
            self._noise,
            self._nest,
        )

    def next(self) -> list[bytes]:
        """Return the frames of the next message: at least one."""
        draw = self._random
        self._seq += 1
        envelope = msgspec.msgpack.encode(
            Envelope(protocol=PROTOCOL_VERSION, run=self._run, sender=self._sender, incarnation=1, seq=self._seq)
        )
        body = draw.choice(self._bodies)
        where = draw.random()
        if where < 0.7:
            body = self._mutated(body)
        if where > 0.6:
            envelope = self._mutated(envelope)
        frames = [envelope, body]
        if draw.random() < 0.3:
            frames += [draw.randbytes(draw.choice((0, 1, 4, 100))) for _ in range(draw.choice((1, 1, 2, 5, 50)))]
        if draw.random() < 0.1:
            draw.shuffle(frames)
        if draw.random() < 0.05:
            frames = frames[: draw.randint(1, len(frames))]
        return frames

    def _mutated(self, data: bytes) -> bytes:
        for _ in range(self._random.choice((1, 1, 1, 2, 4))):
            data = self._random.choice(self._ways)(data)
        return data

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.randint(1, 4) if changed else 0):
            changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        first, last = sorted(self._random.randint(0, len(data)) for _ in range(2))
        return data[:first] + data[last:]

    def _insert(self, data: bytes) -> bytes:
        at = self._random.randint(0, len(data))
        return data[:at] + self._random.randbytes(self._random.randint(1, 32)) + data[at:]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._bodies)
        return data[: self._random.randint(0, len(data))] + other[self._random.randint(0, len(other)) :]

    def _claim(self, data: bytes) -> bytes:
        at = self._random.randint(0, len(data))
        return data[:at] + self._random.choice(HUGE) + data[at:]

    def _noise(self, data: bytes) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, len(data), 4 * len(data))))

    def _nest(self, data: bytes) -> bytes:
        at = self._random.randint(0, len(data))
        return data[:at] + self._random.choice((b"\x91", b"\x81\xa1a")) * self._random.choice((3, 60, 3000)) + data[at:]

    def _swap_value(self, data: bytes) -> bytes:
        try:
            tree = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
            return self._flip(data)
        if isinstance(tree, dict) and tree:
            tree[self._random.choice(list(tree))] = self._random.choice(ODD)
        return msgspec.msgpack.encode(tree)


def decode(frames: list[bytes]) -> None:
    """Decode a message as both ends do. Raises WireError for an invalid one."""
    codec.unpack_envelope(frames)
    try:
        codec.unpack_up(frames)
    except WireError:
        codec.unpack_down(frames)

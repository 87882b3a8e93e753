"""Encoding of the journal's rows: MessagePack behind a digest, which also covers the row's place.

    0xC1  digest (8 bytes)  record

No MessagePack begins with 0xC1. The digest (xxh3, 64 bits) is of the record and its payload, seeded by the journal and
by the position or the group of the row: a row of another run, or one that was moved, does not match. Journals that an
older version has begun have rows without a place, and the oldest ones without a digest, before `Binding.since`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

from starling.controller.core.events import Buffers
from starling.controller.core.records import Record

BINDING: Final = "binding"
"""Mark with the random number of a journal."""
BOUND_SINCE: Final = "bound_since"
"""Mark with the first position whose rows are bound."""

_DIGESTED: Final = b"\xc1"
_DIGEST_BYTES: Final = 8
_ODD: Final = 0x9E3779B97F4A7C15
"""Multiplication by an odd number gives each position another seed."""
_WORD: Final = (1 << 64) - 1

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


class Place(NamedTuple):
    """What a row is bound to."""

    seed: int
    may_be_unbound: bool
    """Whether an older version may have written the row."""


class Binding(NamedTuple):
    """What the rows of one journal are bound to."""

    journal: int
    """A random number that the journal was begun with, or upgraded; 0 for one that was not upgraded yet."""
    since: int
    """The first position whose rows are bound."""

    @classmethod
    def of(cls, marks: Mapping[str, int]) -> Binding:
        """Return that of a journal with these marks."""
        return cls(marks.get(BINDING, 0), marks.get(BOUND_SINCE, _WORD))

    def of_record(self, seq: int) -> Place:
        """Return the place of the rows of record `seq`."""
        return Place(self.seed_of_record(seq), seq < self.since)

    def seed_of_record(self, seq: int) -> int:
        """Return the seed of that place."""
        return (self.journal + seq * _ODD) & _WORD

    def of_group(self, key: str, generated: int) -> Place:
        """Return the place of the rewards of a group, whose completions are record `generated`."""
        return Place(
            xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"), self.journal), generated < self.since
        )


def encode(record: Record, seed: int, payload: Buffers = ()) -> bytes:
    """Return the bytes of a record, which begin with a digest of themselves, of the payload and of the place.

    `seed`: of the place.
    """
    body = _encoder.encode(record)
    return _DIGESTED + _digest(body, payload, seed) + body


def decode(stored: bytes, place: Place, payload: Sequence[bytes] = ()) -> Record:
    """Return a record. Raises ValueError when it, or its payload, is not what was written at this place."""
    if not stored.startswith(_DIGESTED):
        if not place.may_be_unbound:
            raise ValueError("a record has no digest")
        return _decoder.decode(stored)
    begin = len(_DIGESTED) + _DIGEST_BYTES
    digest, body = stored[len(_DIGESTED) : begin], stored[begin:]
    is_intact = digest == _digest(body, payload, place.seed)
    if not is_intact and not (place.may_be_unbound and digest == _digest(body, payload, 0)):
        raise ValueError("a record does not match its digest: it was changed, moved, or copied from another journal")
    return _decoder.decode(body)


def _digest(body: bytes, payload: Sequence[bytes | memoryview], seed: int) -> bytes:
    if not payload:
        return xxhash.xxh3_64_digest(body, seed)
    digest = xxhash.xxh3_64(body, seed)
    for buffer in payload:
        digest.update(buffer)
    return digest.digest()

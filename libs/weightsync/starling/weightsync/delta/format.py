"""Wire format of a delta: header, block kinds, sections, sizes and metrics.

An encoded piece is a header of 64 bytes and, by its form, nothing (`same`: no element changed), the bytes of the piece
(`dense`), or a `delta`: sections one after another, each padded with zeros to 8 bytes, all numbers little-endian:

    directory   u32 per block of 65,536 elements: kind << 24 | number of changed elements
    run counts  u32 per block of kind RUNS: number of its runs of changed elements
    runs        u16 start, u16 length - 1, per run
    wide        u16 per changed element of the blocks of kind WIDE: its position in the block
    cells       u8 per cell of 256 elements of the blocks of kind NARROW: number of its changed elements
    narrow      u8 per changed element of the blocks of kind NARROW: its position in the cell
    bitmaps     1 bit per element of the blocks of kind BITMAP, the lowest bit first
    values      the changed elements in order of position

Within every section blocks are in order. The last block of a piece may be short: it has only the cells and the bitmap
bytes that it needs. Elements are opaque bits: NaN and -0.0 are compared like all others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError

Form = Literal["same", "delta", "dense"]
Memory = npt.NDArray[np.uint8]
Items = npt.NDArray[np.unsignedinteger[Any]]
Numbers = npt.NDArray[np.int64]
Data = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous bytes, or an array whose bytes are meant."""

ITEM_TYPES: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
"""Integer types as which elements of each size are compared and copied."""

BLOCK: Final = 65536
"""Elements of a block."""
CELL: Final = 256
"""Elements of a cell."""
CELLS: Final = BLOCK // CELL
WIDE_TYPE: Final = np.dtype("<u2")
COUNT_TYPE: Final = np.dtype("<u4")

VERSION: Final = 1
FORMS: Final[tuple[Form, ...]] = ("same", "delta", "dense")
HEADER: Final = struct.Struct("<4sBBBBQQ16s16s8x")
"""Magic, version, form, bytes per element, flags, elements, changed elements (0 unless `delta`), digest of the base,
digest of the result."""
_MAGIC: Final = b"SWDL"
_HAS_BASE_DIGEST: Final = 1
_HAS_DIGEST: Final = 2


class DeltaHeader(NamedTuple):
    """Fields of the first 64 bytes."""

    form: Form
    num_elements: int
    item_bytes: int
    num_changed: int
    base_digest: bytes | None
    digest: bytes | None


def pack_header(header: DeltaHeader) -> bytes:
    """Return the first 64 bytes of an encoded piece."""
    flags = (header.base_digest is not None) * _HAS_BASE_DIGEST | (header.digest is not None) * _HAS_DIGEST
    return HEADER.pack(
        _MAGIC,
        VERSION,
        FORMS.index(header.form),
        header.item_bytes,
        flags,
        header.num_elements,
        header.num_changed,
        header.base_digest or b"",
        header.digest or b"",
    )


def unpack_header(memory: Memory) -> DeltaHeader:
    """Read the first 64 bytes of an encoded piece.

    Raises:
        WeightsError: they are not a header that this version writes.
    """
    if len(memory) < HEADER.size:
        raise WeightsError(f"An encoded piece has at least {HEADER.size} bytes, not {len(memory)}: fetch it again.")
    data = memory[: HEADER.size].tobytes()
    magic, version, form, item_bytes, flags, num_elements, num_changed, base_digest, digest = HEADER.unpack(data)
    if magic != _MAGIC:
        raise WeightsError(f"An encoded piece begins with {_MAGIC!r}, not {magic!r}: fetch it again.")
    if version != VERSION:
        raise WeightsError(f"The delta has version {version}, this program reads {VERSION}: update both sides.")
    if form >= len(FORMS) or item_bytes not in ITEM_TYPES or flags > _HAS_BASE_DIGEST | _HAS_DIGEST:
        raise WeightsError(f"The encoded piece has form {form}, item size {item_bytes}, flags {flags}: fetch it again.")
    header = DeltaHeader(
        form=FORMS[form],
        num_elements=num_elements,
        item_bytes=item_bytes,
        num_changed=num_changed,
        base_digest=base_digest if flags & _HAS_BASE_DIGEST else None,
        digest=digest if flags & _HAS_DIGEST else None,
    )
    if pack_header(header) != data:
        raise WeightsError("The header of the encoded piece has unknown bits: fetch it again.")
    return header


def digest_bytes(digest: str | None) -> bytes | None:
    """Return a digest of 32 hex digits as bytes.

    Raises:
        WeightsError: it is not a digest.
    """
    if digest is None:
        return None
    try:
        data = bytes.fromhex(digest)
    except ValueError:
        data = b""
    if len(data) != 16:
        raise WeightsError(f"A digest has 32 hex digits, unlike {digest!r}: give `digest_of` the piece.")
    return data


def bytes_of(data: Data, what: str) -> Memory:
    """Return the bytes of `data` as a flat view.

    Raises:
        WeightsError: they are not contiguous; `what` names them in the message.
    """
    array = data if isinstance(data, np.ndarray) else np.asarray(memoryview(data))
    if not array.flags.c_contiguous:
        raise WeightsError(f"The bytes of {what} are not contiguous: pack them first.")
    return array.reshape(-1).view(np.uint8)


def items_of(data: Data, item_bytes: int, what: str) -> Items:
    """Return the elements of `data` as a flat view.

    Raises:
        WeightsError: they are not whole, or not contiguous; `what` names them.
    """
    check_items(0, item_bytes)
    memory = bytes_of(data, what)
    if len(memory) % item_bytes:
        raise WeightsError(f"The {len(memory)} bytes of {what} are not whole elements of {item_bytes} bytes.")
    items: Items = memory.view(ITEM_TYPES[item_bytes])
    return items


def check_items(num_elements: int, item_bytes: int) -> None:
    """Check the number and size of elements.

    Raises:
        WeightsError: naming the value.
    """
    if item_bytes not in ITEM_TYPES:
        raise WeightsError(f"Elements of {item_bytes} bytes have no delta: give 1, 2, 4 or 8.")
    if num_elements < 0:
        raise WeightsError(f"A piece of {num_elements} elements has no delta: give 0 or more.")


class Kind(IntEnum):
    """Encoding of the changed positions of one block."""

    SAME = 0
    RUNS = 1
    WIDE = 2
    NARROW = 3
    BITMAP = 4


class DeltaSection(NamedTuple):
    """Position and size of a section, in bytes from the start of the encoded piece."""

    offset: int
    size: int


class Sections(NamedTuple):
    """All sections of a delta, and its size."""

    directory: DeltaSection
    run_counts: DeltaSection
    runs: DeltaSection
    wide: DeltaSection
    cells: DeltaSection
    narrow: DeltaSection
    bitmaps: DeltaSection
    values: DeltaSection
    size_bytes: int


@dataclass(frozen=True)
class Directory:
    """Kinds and counts of the blocks of one piece, from which all offsets follow."""

    num_elements: int
    item_bytes: int
    kinds: Numbers
    """`Kind` of each block."""
    counts: Numbers
    """Changed elements of each block."""
    run_counts: Numbers
    """Runs of each block of kind RUNS, 0 for the others."""

    @cached_property
    def first(self) -> Numbers:
        """Changed elements in blocks of each kind before each block, shape (kinds, blocks + 1)."""
        of_kind = np.where(self.kinds == np.arange(len(Kind))[:, None], self.counts, 0)
        return sums_before(of_kind)

    @cached_property
    def first_run(self) -> Numbers:
        """Runs before each block."""
        return sums_before(self.run_counts)

    @cached_property
    def first_cell(self) -> Numbers:
        """Cells of NARROW blocks before each block."""
        return sums_before(np.where(self.kinds == Kind.NARROW, -(-block_sizes(self.num_elements) // CELL), 0))

    @cached_property
    def first_bitmap_byte(self) -> Numbers:
        """Bytes of bitmaps before each block."""
        return sums_before(np.where(self.kinds == Kind.BITMAP, -(-block_sizes(self.num_elements) // 8), 0))

    @cached_property
    def first_value(self) -> Numbers:
        """Changed elements before each block."""
        return sums_before(self.counts)

    @cached_property
    def sections(self) -> Sections:
        """All sections."""
        changed = self.first[:, -1].tolist()
        sizes = (
            COUNT_TYPE.itemsize * len(self.kinds),
            COUNT_TYPE.itemsize * int(np.count_nonzero(self.kinds == Kind.RUNS)),
            4 * int(self.first_run[-1]),
            WIDE_TYPE.itemsize * changed[Kind.WIDE],
            int(self.first_cell[-1]),
            changed[Kind.NARROW],
            int(self.first_bitmap_byte[-1]),
            self.item_bytes * self.num_changed,
        )
        offsets = np.cumsum((HEADER.size, *map(padded, sizes))).tolist()
        parts = (DeltaSection(offset, size) for offset, size in zip(offsets[:-1], sizes, strict=True))
        return Sections._make((*parts, offsets[-1]))

    @property
    def num_changed(self) -> int:
        """Changed elements of all blocks."""
        return int(self.first_value[-1])


def sums_before(numbers: npt.NDArray[Any]) -> Numbers:
    """Return the exclusive prefix sums along the last dim, and the total last."""
    sums = np.zeros((*numbers.shape[:-1], numbers.shape[-1] + 1), np.int64)
    np.cumsum(numbers, axis=-1, out=sums[..., 1:])
    return sums


def padded(size: int) -> int:
    """Return `size` rounded up to 8 bytes."""
    return -(-size // 8) * 8


def num_blocks(num_elements: int) -> int:
    """Return the number of blocks of a piece."""
    return -(-num_elements // BLOCK)


def block_sizes(num_elements: int) -> Numbers:
    """Return the number of elements of each block; only the last one may be short."""
    sizes = np.full(num_blocks(num_elements), BLOCK, np.int64)
    if num_elements % BLOCK:
        sizes[-1] = num_elements % BLOCK
    return sizes


def choose_kinds(num_elements: int, counts: Numbers, largest_cells: Numbers, runs: Numbers) -> Numbers:
    """Return the kind that takes the fewest bytes for each block.

    Args:
        num_elements: of the piece.
        counts: changed elements of each block.
        largest_cells: changed elements of the fullest cell of each block; 256 of them do not fit a NARROW count.
        runs: runs of each block; at least `counts` if they were not counted.
    """
    sizes = block_sizes(num_elements)
    costs = np.empty((len(Kind), len(counts)), np.int64)
    costs[Kind.SAME] = np.where(counts == 0, -1, 4 * BLOCK)
    costs[Kind.RUNS] = 4 + 4 * runs
    costs[Kind.WIDE] = 2 * counts
    costs[Kind.NARROW] = np.where(largest_cells < CELL, -(-sizes // CELL) + counts, 4 * BLOCK)
    costs[Kind.BITMAP] = -(-sizes // 8)
    kinds: Numbers = costs.argmin(axis=0)
    return kinds


def max_encoded_bytes(num_elements: int, item_bytes: int) -> int:
    """Return the largest size of any encoded form of a piece, composed ones included.

    That is the piece, a bit per element, 4 bytes per block, the header and padding. `encode` never writes more than
    the header and the piece; only a composed delta, which has no piece to fall back to, can need the rest.
    """
    check_items(num_elements, item_bytes)
    blocks = num_blocks(num_elements)
    return HEADER.size + padded(num_elements * item_bytes) + padded(-(-num_elements // 8)) + 4 * blocks + 7 * 8


@dataclass(frozen=True)
class DeltaMetrics:
    """Size and changes of one encoded piece."""

    form: Form
    num_elements: int
    item_bytes: int
    num_compared: int
    """Fewer than all if the comparison stopped early because too much had changed."""
    num_changed: int
    """Changed elements among those compared."""
    encoded_bytes: int

    @property
    def dense_bytes(self) -> int:
        """The bytes of the piece."""
        return self.num_elements * self.item_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by the encoding; negative by the header size for a dense piece."""
        return self.dense_bytes - self.encoded_bytes

    @property
    def share_changed(self) -> float:
        """The share of the compared elements that changed."""
        return self.num_changed / self.num_compared if self.num_compared else 0.0


@dataclass(frozen=True)
class DeltaTotal:
    """Metrics of many pieces: of one publication or one pull."""

    num_pieces: dict[Form, int]
    """Number of pieces of each form."""
    dense_bytes: int
    encoded_bytes: int
    num_compared: int
    num_changed: int

    @property
    def saved_bytes(self) -> int:
        """Bytes saved by the encoding."""
        return self.dense_bytes - self.encoded_bytes

    @property
    def share_changed(self) -> float:
        """The share of the compared elements that changed."""
        return self.num_changed / self.num_compared if self.num_compared else 0.0


def total_of(pieces: Iterable[DeltaMetrics]) -> DeltaTotal:
    """Add up the metrics of pieces."""
    num_pieces: dict[Form, int] = {"same": 0, "delta": 0, "dense": 0}
    dense_bytes = encoded_bytes = num_compared = num_changed = 0
    for piece in pieces:
        num_pieces[piece.form] += 1
        dense_bytes += piece.dense_bytes
        encoded_bytes += piece.encoded_bytes
        num_compared += piece.num_compared
        num_changed += piece.num_changed
    return DeltaTotal(num_pieces, dense_bytes, encoded_bytes, num_compared, num_changed)

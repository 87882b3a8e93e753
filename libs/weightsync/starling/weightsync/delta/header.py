"""What every encoded piece begins with, and the memory that pieces and encoded pieces are given as."""

from __future__ import annotations

import struct
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError

Form = Literal["same", "delta", "dense"]
Memory = npt.NDArray[np.uint8]
Items = npt.NDArray[np.unsignedinteger[Any]]
Data = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous bytes, or an array whose bytes are meant."""

ITEM_TYPES: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}
"""How elements of so many bytes are compared and moved."""

VERSION: Final = 1
FORMS: Final[tuple[Form, ...]] = ("same", "delta", "dense")
HEADER: Final = struct.Struct("<4sBBBBQQ16s16s8x")
"""Magic, version, form, bytes per element, flags, elements, changed elements (0 unless `delta`), digest of the base,
digest of the result."""
_MAGIC: Final = b"SWDL"
_HAS_BASE_DIGEST: Final = 1
_HAS_DIGEST: Final = 2


class Header(NamedTuple):
    """What the first 64 bytes say."""

    form: Form
    num_elements: int
    item_bytes: int
    num_changed: int
    base_digest: bytes | None
    digest: bytes | None


def pack_header(header: Header) -> bytes:
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


def unpack_header(memory: Memory) -> Header:
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
    header = Header(
        form=FORMS[form],
        num_elements=num_elements,
        item_bytes=item_bytes,
        num_changed=num_changed,
        base_digest=base_digest if flags & _HAS_BASE_DIGEST else None,
        digest=digest if flags & _HAS_DIGEST else None,
    )
    if pack_header(header) != data:
        raise WeightsError("The header of the encoded piece has bits that nobody wrote: fetch it again.")
    return header


def digest_bytes(digest: str | None) -> bytes | None:
    """Return a digest of 32 hex digits as bytes.

    Raises:
        WeightsError: it is none.
    """
    if digest is None:
        return None
    try:
        data = bytes.fromhex(digest)
    except ValueError:
        data = b""
    if len(data) != 16:
        raise WeightsError(f"A digest has 32 hex digits, which {digest!r} has not: give `digest_of` the piece.")
    return data


def bytes_of(data: Data, what: str) -> Memory:
    """Return the bytes of `data` as a flat view.

    Raises:
        WeightsError: they are not contiguous; `what` names them.
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

"""Headers of safetensors files: validated parsing, and writing.

A file is eight bytes of length N (little-endian), N bytes of JSON that give each tensor's element type, shape and first
and last byte after the header, and then the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from starling.common.errors import WeightsError
from starling.common.files import open_regular
from starling.weightsync.plan.layout import ITEM_BYTES, TensorSpec, item_bytes

MAX_HEADER_BYTES: Final = 100_000_000
MAX_NAME: Final = 4096
"""Characters of a tensor's name. The longest ones of models have about a hundred."""
MAX_DIMENSIONS: Final = 64
"""Of a tensor; torch has the same limit."""
MAX_EXTENT: Final = 1 << 48
"""Extents and offsets are below it: products of a header's numbers of thousands of digits would take hours."""

CODES: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}
"""The format's name of each supported element type."""

_TYPES: Final = {code: dtype for dtype, code in CODES.items()}

Entries: TypeAlias = tuple["HeaderEntry", ...]


class HeaderEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a file."""

    spec: TensorSpec
    offset_bytes: int
    """From the beginning of the file."""

    @property
    def size_bytes(self) -> int:
        """Size of the tensor, which is row-major."""
        return math.prod(self.spec.shape) * ITEM_BYTES[self.spec.dtype]


def read_header(path: Path) -> Entries:
    """Read the tensors of a file and their positions, in the order of their bytes.

    Raises:
        WeightsError: a file that is missing, truncated or malformed, naming it.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise WeightsError(f"{path} is not a safetensors file: no header fits its {size_bytes} bytes.")
            data = file.read(length)
        header = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path} cannot be read as a safetensors file: {error}.") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path} is not a safetensors file: its header is not a table of tensors.")
    entries = sorted(
        (_entry(path, name, item, 8 + length) for name, item in header.items() if name != "__metadata__"),
        key=lambda entry: (entry.offset_bytes, entry.size_bytes),
    )
    end = 8 + length
    for entry in entries:
        if entry.offset_bytes != end:
            raise WeightsError(f"{path}: tensor {entry.spec.name} begins at byte {entry.offset_bytes}, expected {end}.")
        end += entry.size_bytes
    if end != size_bytes:
        raise WeightsError(f"{path} has {size_bytes} bytes, its header says {end}: it is cut short or overlong.")
    return tuple(entries)


def _entry(path: Path, name: str, item: Any, base: int) -> HeaderEntry:
    if len(name) > MAX_NAME or not name.isprintable():
        raise WeightsError(f"{path}: {name!r:.100} cannot be the name of a tensor; use another checkpoint.")
    try:
        code, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise WeightsError(f"{path}: the entry of tensor {name} lacks dtype, shape or offsets.") from error
    numbers = (*shape, begin, end)
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < MAX_EXTENT for n in numbers):
        what = f"the shape {shape} and the bytes {begin} to {end}"
        raise WeightsError(f"{path}: tensor {name} has {what:.300}, which no tensor has.")
    if not isinstance(code, str) or code not in _TYPES:
        raise WeightsError(
            f"{path}: tensor {name} has element type {code!r:.100}, expected one of {', '.join(_TYPES)}."
        )
    entry = HeaderEntry(spec=TensorSpec(name=name, shape=shape, dtype=_TYPES[code]), offset_bytes=base + begin)
    if end - begin != entry.size_bytes:
        raise WeightsError(f"{path}: tensor {name} of shape {shape} and type {code} does not have {end - begin} bytes.")
    if entry.offset_bytes % ITEM_BYTES[entry.spec.dtype]:
        raise WeightsError(
            f"{path}: tensor {name} begins at byte {entry.offset_bytes}, which no {entry.spec.dtype} may; "
            "save the checkpoint again with safetensors."
        )
    return entry


def make_header(specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, Entries]:
    """Return the header of a file of these tensors, and the position of each of them.

    The widest element types come first, so that every tensor is aligned to its elements.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    placed: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in sorted(specs, key=lambda spec: (-item_bytes(spec), spec.name)):
        begin, end = end, end + math.prod(spec.shape) * item_bytes(spec)
        table[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        placed.append((spec, begin))
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, tuple(HeaderEntry(spec=spec, offset_bytes=len(header) + begin) for spec, begin in placed)

"""Strict reader of `.npy` files: arrays of known numbers in a client's bytes. Pure.

numpy's own reader is for files that one trusts: it unpickles objects, evaluates the header as Python, and allocates
what the header says. This one copies the header only, of at most `MAX_HEADER_BYTES`, and returns a view of the rest.
Written from the specification of the format, versions 1.0 to 3.0 (NEP 1):

    magic "\\x93NUMPY" | version, two bytes | length of the header, two bytes, or four from 2.0 on | header | elements

The header is a dictionary of Python, ``{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }``, padded with
spaces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from starling.reward.core.media import ITEM_BYTES

MAX_HEADER_BYTES: Final = 4096
"""numpy's are 64 to 192 bytes long."""
MAX_DIMS: Final = 8
MAX_DIM_DIGITS: Final = 15

DTYPES: Final[Mapping[str, str]] = {
    "|u1": "uint8",
    "<u1": "uint8",
    "<f2": "float16",
    "<f4": "float32",
    "<f8": "float64",
    "<i4": "int32",
    "|V2": "bfloat16",  # numpy has no such number: what its extensions have is written as two opaque bytes
    "<V2": "bfloat16",
}
"""Names of the dtypes that are read, by their descriptions in a header."""
_WRITTEN: Final[Mapping[str, str]] = {DTYPES[descr]: descr for descr in reversed([*DTYPES])}
"""Their descriptions in what is written: the first of each."""
_ITEM_BYTES: Final = {**ITEM_BYTES, "float64": 8}

_MAGIC: Final = b"\x93NUMPY"
_LENGTH_BYTES: Final = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}
"""How long the length of the header is, by the version."""
_PRELUDE_BYTES: Final = len(_MAGIC) + 2
MAX_DATA_BEGIN: Final = _PRELUDE_BYTES + 4 + MAX_HEADER_BYTES
"""The elements begin before this byte."""
_ALIGNMENT: Final = 64
_ENTRY: Final = re.compile(
    r""" *(?P<quote>['"])(?P<key>descr|fortran_order|shape)(?P=quote) *: *"""
    r"""(?:'(?P<single>[^'\\]*)'|"(?P<double>[^"\\]*)"|(?P<truth>True|False)|\((?P<tuple>[0-9, ]*)\)) *(?:,|\Z)"""
)
_VALUE_OF: Final = {"descr": ("single", "double"), "fortran_order": ("truth",), "shape": ("tuple",)}


class NpyError(ValueError):
    """What is wrong with a file, as a sentence with the remedy."""


class NpyHeader(NamedTuple):
    """What a file says about its array."""

    dtype: str
    """A value of `DTYPES`."""
    shape: tuple[int, ...]
    is_fortran: bool
    """Whether the first index changes fastest."""
    data_begin: int
    """Where the elements begin in the file."""

    @property
    def data_bytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    def check_length(self, file_bytes: int) -> None:
        """Raise NpyError unless a file of so many bytes has all elements and nothing more."""
        have, wanted = file_bytes - self.data_begin, self.data_bytes
        if have != wanted:
            raise NpyError(
                f"the .npy file has {have} bytes of elements, and shape {list(self.shape)} of {self.dtype} has "
                f"{wanted}; send the whole file, and nothing more"
            )


class NpyArray(NamedTuple):
    """The array of a file."""

    header: NpyHeader
    data: memoryview
    """Its elements, little-endian, in the bytes of the file."""


def read_npy(data: bytes | memoryview) -> NpyArray:
    """Return the array in the bytes of a whole file, without copying it. Raises NpyError."""
    view = memoryview(data).cast("B")
    header = read_header(view)
    header.check_length(len(view))
    return NpyArray(header, view[header.data_begin :])


def read_header(data: bytes | memoryview) -> NpyHeader:
    """Return the header of a file, of which `data` has the first `MAX_DATA_BEGIN` bytes, or all. Raises NpyError."""
    view = memoryview(data).cast("B")
    start = bytes(view[: _PRELUDE_BYTES + 4])
    if not start.startswith(_MAGIC):
        raise NpyError("it is no .npy file; send what numpy.save writes")
    version = start[len(_MAGIC) : _PRELUDE_BYTES]
    num_length_bytes = _LENGTH_BYTES.get(version)
    if num_length_bytes is None:
        raise NpyError(f"the .npy file has version {'.'.join(map(str, version))}; send version 1.0, 2.0 or 3.0")
    begin = _PRELUDE_BYTES + num_length_bytes
    length = int.from_bytes(start[_PRELUDE_BYTES:begin], "little")
    if length > MAX_HEADER_BYTES:
        raise NpyError(f"the .npy file has a header of {length} bytes; send one of at most {MAX_HEADER_BYTES}")
    if begin + length > len(view):
        raise NpyError("the .npy file ends in its header; send the whole file")
    try:
        text = str(view[begin : begin + length], "ascii")
    except UnicodeDecodeError:
        raise NpyError("the .npy file has a header that is no ASCII; send a plain array of numbers") from None
    return NpyHeader(*_parsed(text), begin + length)


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return what a file of an array in C order has before the elements, as numpy writes it.

    Args:
        dtype: a value of `DTYPES`.
        shape: of the array.
    """
    text = f"{{'descr': '{_WRITTEN[dtype]}', 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    num_padding = -(_PRELUDE_BYTES + 2 + len(text) + 1) % _ALIGNMENT
    text = f"{text}{' ' * num_padding}\n"
    return _MAGIC + bytes((1, 0)) + len(text).to_bytes(2, "little") + text.encode("ascii")


def _parsed(text: str) -> tuple[str, tuple[int, ...], bool]:
    """Return dtype, shape and whether the order is Fortran's, from the header's text. Raises NpyError."""
    text = text.rstrip(" \n")
    if not (text.startswith("{") and text.endswith("}")):
        raise NpyError("the .npy file's header is no dictionary; send what numpy.save writes")
    rest = text[1:-1].rstrip(" ")
    found: dict[str, str] = {}
    position = 0
    while position < len(rest):
        match = _ENTRY.match(rest, position)
        key = match["key"] if match else ""
        values = [value for group in _VALUE_OF.get(key, ()) if match and (value := match[group]) is not None]
        if match is None or not values or key in found:
            raise NpyError(
                "the .npy file's header is not one dictionary of 'descr', 'fortran_order' and 'shape'; send what "
                "numpy.save writes of a plain array of numbers"
            )
        found[key] = values[0]
        position = match.end()
    missing = [key for key in _VALUE_OF if key not in found]
    if missing:
        raise NpyError(f"the .npy file's header has no {missing[0]!r}; send what numpy.save writes")
    return _dtype(found["descr"]), _shape(found["shape"]), found["fortran_order"] == "True"


def _dtype(descr: str) -> str:
    if descr not in DTYPES:
        known = ", ".join(dict.fromkeys(DTYPES.values()))
        raise NpyError(f"the .npy file has elements of type {descr[:40]!r}; send one of little-endian {known}")
    return DTYPES[descr]


def _shape(text: str) -> tuple[int, ...]:
    """Return the shape in the text between the parentheses of a tuple."""
    *parts, last = (part.strip() for part in text.split(","))
    if last and parts:  # a comma after the last number is needed for one number only
        parts.append(last)
        last = ""
    dims = tuple(int(part) for part in parts if part.isdecimal() and len(part) <= MAX_DIM_DIGITS)
    if last or tuple(map(str, dims)) != tuple(parts) or len(dims) > MAX_DIMS:
        raise NpyError(f"the .npy file has shape ({text[:80]}); send a tuple of at most {MAX_DIMS} numbers")
    return dims

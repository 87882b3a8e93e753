"""Reader of pickles that contain numpy arrays and nothing else: no code of a pickle or of its author is run.

A pickle is a program. This one may only build lists, tuples, dicts, numbers, texts and arrays: each operation is
checked first, and the few functions of numpy that pickled arrays name are replaced by ones that only take shapes, types
and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_OPERATIONS: Final = 10_000
"""Of one file; an array takes about 30."""
_OPERATIONS: Final = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP"),
        *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
        *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
    )
)
_MEMO: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
"""Operations with a number of an entry, up to which the unpickler makes a table."""
_TYPES: Final = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})


class BadPickleError(ValueError):
    """A pickle with anything but numpy arrays; its text says what."""


class _Array:
    """An array that is being read."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _Type):
            raise BadPickleError("it has an array in a form that numpy does not write")
        _, shape, dtype, is_fortran, content = state
        self.array = _array_of(content, dtype, shape, "F" if is_fortran else "C")


class _Type:
    """A type of numpy that is being read."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise BadPickleError("it has a type in a form that numpy does not write")
        self.order = state[1]


class _Function:
    """A function or class that pickled arrays name, as far as they need it."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __setstate__(self, state: Any) -> None:
        raise BadPickleError(f"it changes {self._name}")

    def __call__(self, *arguments: Any) -> Any:
        if self._name == "_reconstruct":
            return _Array()
        if self._name == "dtype" and arguments and arguments[0] in _TYPES:
            return _Type(arguments[0])
        if self._name == "_frombuffer" and len(arguments) == 4 and isinstance(arguments[1], _Type):
            found = _Array()
            found.array = _array_of(arguments[0], arguments[1], arguments[2], arguments[3])
            return found
        if self._name == "encode" and len(arguments) == 2 and arguments[1] == "latin1":
            return str(arguments[0]).encode("latin1")
        if self._name == "bytes" and not arguments:
            return b""
        raise BadPickleError(f"it calls {self._name} with {arguments!r:.100}, and only arrays of numbers are read")


_FUNCTIONS: Final = {
    (module, name): _Function(name)
    for modules, name in (
        (("numpy",), "ndarray"),
        (("numpy",), "dtype"),
        (("numpy.core.multiarray", "numpy._core.multiarray"), "_reconstruct"),
        (("numpy.core.numeric", "numpy._core.numeric"), "_frombuffer"),
        (("_codecs",), "encode"),
        (("builtins", "__builtin__"), "bytes"),
    )
    for module in modules
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _FUNCTIONS.get((module, name))
        if found is None:
            raise BadPickleError(f"it names {module}.{name:.100}, and only arrays of numbers are read")
        return found


def read_arrays(content: bytes) -> Any:
    """Return what a pickle contains: an array, or lists, tuples and dicts of arrays, texts and numbers.

    Raises:
        BadPickleError: it is no pickle, or contains anything else.
    """
    _check_operations(content)
    try:
        return _plain(_Unpickler(io.BytesIO(content), encoding="latin1").load())
    except BadPickleError:
        raise
    except Exception as error:  # noqa: BLE001 - the unpickler raises many for a program that is none of pickle
        raise BadPickleError(f"it is no pickle of arrays: {error!r:.200}") from None


def _check_operations(content: bytes) -> None:
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if operation.name not in _OPERATIONS:
                raise BadPickleError(f"it has the operation {operation.name}, and only arrays of numbers are read")
            entry = argument if operation.name in _MEMO and isinstance(argument, int) else 0
            if number >= MAX_OPERATIONS or entry > MAX_OPERATIONS:
                raise BadPickleError(f"it has more than {MAX_OPERATIONS} operations")
    except BadPickleError:
        raise
    except Exception as error:  # noqa: BLE001 - genops raises many, too
        raise BadPickleError(f"it is no pickle: {error!r:.200}") from None


def _array_of(content: Any, dtype: _Type, shape: Any, order: Any) -> npt.NDArray[Any]:
    if not isinstance(content, bytes | bytearray) or not isinstance(shape, tuple) or order not in ("C", "F"):
        raise BadPickleError("it has an array in a form that numpy does not write")
    found = np.dtype(dtype.code).newbyteorder("=" if dtype.order == "|" else dtype.order)  # type: ignore[arg-type]
    is_shape = len(shape) <= 8 and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * found.itemsize != len(content):
        raise BadPickleError(f"it has an array of {len(content)} bytes with the shape {shape!r:.100}")
    array = np.frombuffer(content, found).reshape(shape, order=order)
    return array.astype(found.newbyteorder("="))


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value with its arrays in place of what was read for them."""
    if depth > 8:
        raise BadPickleError("it has lists in lists, deeper than any file of embeddings")
    if isinstance(value, _Array):
        if value.array is None:
            raise BadPickleError("it has an array without content")
        return value.array
    if isinstance(value, list | tuple):
        return type(value)(_all_plain(value, depth))
    if isinstance(value, dict):
        return dict(zip(_all_plain(value, depth), _all_plain(value.values(), depth), strict=True))
    if isinstance(value, _Type | _Function):
        raise BadPickleError("it has other objects than arrays")
    return value


def _all_plain(values: Iterable[Any], depth: int) -> list[Any]:
    return [_plain(value, depth + 1) for value in values]

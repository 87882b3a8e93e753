"""Pickles of arrays: those of numpy are read in every protocol, and nothing else is run."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from property_tests import examples

from starling.algo.diffusion.text.pickles import BadPickleError, read_arrays

NUMBERS = (
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | arrays.integer_dtypes(endianness="?")
    | arrays.unsigned_integer_dtypes(endianness="?")
    | arrays.boolean_dtypes()
)


@examples(60)
@given(
    arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0)), st.integers(0, 5), st.booleans()
)
def test_pickled_array_is_read_in_every_protocol(array: Any, protocol: int, is_fortran: bool) -> None:
    array = np.asfortranarray(array) if is_fortran else array
    for value in ([array], {"one": array, "other": (array, 1.5, "text", None)}):
        found = read_arrays(pickle.dumps(value, protocol))
        read = found[0] if isinstance(found, list) else found["other"][0]
        assert read.dtype == array.dtype.newbyteorder("=")
        assert read.shape == array.shape
        np.testing.assert_array_equal(read, array)


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def global_of(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


RECONSTRUCT = global_of("numpy._core.multiarray", "_reconstruct")
PROGRAMS = {
    "changes a function": RECONSTRUCT + b"}(S'__name__'\nS'other'\nub.",
    "changes a type": global_of("numpy", "dtype") + b"}(S'__call__'\nI1\nub.",
    "makes an object": global_of("numpy", "ndarray") + b"(I3\nt\x81.",
    "is an instance": b"(inumpy\nndarray\n.",
    "names a persistent object": b"Pother\n.",
    "names an extension": b"\x82\x01.",
    "makes a large table": b"]r" + struct.pack("<I", 1 << 31) + b".",
    "has no content": RECONSTRUCT + b"(t" + b"R.",
    "is a function": RECONSTRUCT + b".",
    "has a type of objects": global_of("numpy", "dtype") + b"(S'O8'\ntR.",
    "encodes by another codec": global_of("_codecs", "encode") + b"(S'x'\nS'zip'\ntR.",
    "is cut off": pickle.dumps([np.arange(4.0)])[:-9],
    "is empty": b"",
    "is a text": b"no pickle",
    "is nested": b"]" * 40 + b"a" * 39 + b".",
    "contains itself": b"]q\x00h\x00a.",
    "has many operations": b"]" * 20_000 + b".",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_that_is_no_array_is_refused(name: str) -> None:
    with pytest.raises(BadPickleError):
        read_arrays(PROGRAMS[name])


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_runs_no_function(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for function, *arguments in (
        (os.mkdir, str(mark)),
        (eval, f"__import__('os').mkdir({str(mark)!r})"),
        (np.save, str(mark), 1),
        (np.load, str(mark)),
        (getattr, "text", "upper"),
        (np.fromfile, "/dev/zero"),
        (open, str(mark), "w"),
    ):
        with pytest.raises(BadPickleError, match="it names"):
            read_arrays(pickle.dumps([np.zeros(2), Malicious(function, *arguments)], protocol))
    assert not list(tmp_path.iterdir())


def test_array_of_objects_or_of_another_size_is_refused() -> None:
    with pytest.raises(BadPickleError, match="calls dtype"):
        read_arrays(pickle.dumps(np.array([None, {}], object)))
    content = pickle.dumps(np.arange(6, dtype=np.uint8), 2)
    with pytest.raises(BadPickleError, match=r"6 bytes with the shape \(7,\)"):
        read_arrays(content.replace(b"K\x06\x85", b"K\x07\x85"))


@examples(150)
@given(st.data(), st.integers(0, 5))
def test_damaged_pickle_is_read_or_refused(data: st.DataObject, protocol: int) -> None:
    content = bytearray(pickle.dumps([np.arange(6.0).reshape(2, 3)], protocol))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read_arrays(bytes(content))
    except BadPickleError:
        return
    assert not hasattr(found, "__reduce__") or type(found).__module__ in ("builtins", "numpy")


@examples(60)
@given(st.lists(st.sampled_from([one.code for one in pickletools.opcodes]), max_size=30))
@example([".", "."])
def test_any_program_is_read_or_refused(codes: list[str]) -> None:
    try:
        read_arrays("".join(codes).encode("latin1") + b".")
    except BadPickleError:
        pass

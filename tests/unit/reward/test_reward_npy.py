"""The strict reader of .npy files against numpy's own: what it accepts is right, and it raises its own error only."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.reward.http.npy import (
    MAX_DATA_BEGIN,
    MAX_HEADER_BYTES,
    NpyArray,
    NpyError,
    npy_header,
    read_header,
    read_npy,
)

DTYPES = ("uint8", "float16", "float32", "float64", "int32")
NUMPY_DTYPE = {"bfloat16": "V2"}


def saved(array: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version, allow_pickle=False)
    return stream.getvalue()


def with_header(text: str, elements: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + elements


def array_of(found: NpyArray) -> np.ndarray:
    """Return what was read as numpy's array, with numpy's own understanding of the order."""
    header = found.header
    flat = np.frombuffer(found.data, NUMPY_DTYPE.get(header.dtype, header.dtype))
    return flat.reshape(header.shape, order="F" if header.is_fortran else "C")


@examples(200)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=5),
    st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_numpy_saves_is_read_as_numpy_reads_it(
    dtype: str, shape: list[int], version: tuple[int, int], is_fortran: bool, seed: int
) -> None:
    numbers = np.random.default_rng(seed).integers(0, 255, shape).astype(dtype)
    array = np.asfortranarray(numbers) if is_fortran else numbers
    data = saved(array, version)
    found = read_npy(data)
    assert found.header.dtype == dtype
    assert found.data.obj is data, "the elements were copied"
    np.testing.assert_array_equal(array_of(found), np.load(io.BytesIO(data)), strict=True)


def test_opaque_two_bytes_are_bfloat16() -> None:
    header, data = read_npy(saved(np.array([[1, 2]], "<u2").view("V2")))
    assert (header.dtype, header.shape, bytes(data)) == ("bfloat16", (1, 2), b"\x01\x00\x02\x00")


@pytest.mark.parametrize("dtype", [*DTYPES, "bfloat16"])
def test_written_header_is_the_one_of_numpy(dtype: str) -> None:
    array = np.zeros((3, 1, 2), NUMPY_DTYPE.get(dtype, dtype))
    assert npy_header(dtype, array.shape) + array.tobytes() == saved(array)


ONE = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }"


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        f"{ONE}      \n",
        "{'shape':(1,),'fortran_order':False,'descr':'<f4'}",
        '{ "descr" : "<f4" , "fortran_order" : False , "shape" : ( 1 , ) }',
    ],
)
def test_header_may_have_any_order_quotes_and_spaces(text: str) -> None:
    data = with_header(text, b"\0" * 4)
    np.testing.assert_array_equal(array_of(read_npy(data)), np.load(io.BytesIO(data)), strict=True)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is no .npy file; send what numpy.save writes"),
        (b"PK\x03\x04", "it is no .npy file"),
        (b"\x93NUMPY", "has version ; send"),
        (b"\x93NUMPY\x04\x00aaaa", "has version 4.0; send version 1.0, 2.0 or 3.0"),
        (b"\x93NUMPY\x01\x00v", "ends in its header; send the whole file"),
        (b"\x93NUMPY\x01\x00v\x00{", "ends in its header; send the whole file"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "has a header of 4294967295 bytes; send one of at most 4096"),
        (b"\x93NUMPY\x01\x00\x02\x00\xff\xff", "a header that is no ASCII"),
        (saved(np.zeros(3, "f4"))[:-1], "has 11 bytes of elements, and shape [3] of float32 has 12; send the whole"),
        (saved(np.zeros(3, "f4")) + b"\0", "has 13 bytes of elements, and shape [3] of float32 has 12"),
        (saved(np.zeros(1, ">f4")), "elements of type '>f4'; send one of little-endian uint8, float16, float32"),
        (saved(np.zeros(1, "c8")), "elements of type '<c8'"),
        (saved(np.zeros(1, "i8")), "elements of type '<i8'"),
        (saved(np.zeros(1, [("x", "f4")])), "header is not one dictionary of 'descr', 'fortran_order' and 'shape'"),
        (with_header("[]"), "header is no dictionary"),
        (with_header("{}"), "header has no 'descr'"),
        (with_header("{'descr': '<f4', 'shape': (), }"), "header has no 'fortran_order'"),
        (with_header(ONE[:-1] + "'shape': (1,)}"), "header is not one dictionary"),
        (with_header(ONE.replace("False", "0")), "header is not one dictionary"),
        (with_header(ONE.replace("False", "'False'")), "header is not one dictionary"),
        (with_header(ONE.replace("'<f4'", "(1,)")), "header is not one dictionary"),
        (with_header(ONE.replace("(1,)", "(-1,)")), "header is not one dictionary"),
        (with_header(ONE.replace("(1,)", "(1)")), "has shape (1); send a tuple of at most 8 numbers"),
        (with_header(ONE.replace("(1,)", "(,)")), "has shape (,)"),
        (with_header(ONE.replace("(1,)", "(1,,2)")), "has shape (1,,2)"),
        (with_header(ONE.replace("(1,)", "(1 2,)")), "has shape (1 2,)"),
        (with_header(ONE.replace("(1,)", "(01,)")), "has shape (01,)"),
        (with_header(ONE.replace("(1,)", f"({'1' * 16},)")), f"has shape ({'1' * 16},)"),
        (with_header(ONE.replace("(1,)", f"({'1,' * 9})")), "has shape (1,1,1,1,1,1,1,1,1,)"),
        (with_header(ONE.replace("(1,)", f"({'9' * 15}, {'9' * 15})")), "bytes of elements, and shape"),
    ],
)
def test_other_files_are_refused_with_a_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(NpyError) as raised:
        read_npy(data)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 400


def test_header_is_read_from_first_bytes() -> None:
    data = saved(np.zeros(1 << 20, "u1"))
    assert read_header(data[:MAX_DATA_BEGIN]) == read_npy(data).header


def test_pickled_objects_are_refused() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(NpyError, match=r"elements of type '\|O'"):
        read_npy(stream.getvalue())


def changed(data: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    """Return `data` after replacing, at places within its first bytes, some bytes by others."""
    mutable = bytearray(data)
    for place, inserted, num_deleted in changes:
        mutable[place : place + num_deleted] = inserted
    return bytes(mutable)


PIECES = (
    b"(",
    b")",
    b"{",
    b"}",
    b"'",
    b'"',
    b",",
    b":",
    b" ",
    b"\0",
    b"9" * 16,
    b"True",
    b"'shape': ",
    b"\xff",
    b"L",
    b"-",
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 140), st.sampled_from(PIECES) | st.binary(max_size=3), st.integers(0, 12)),
    min_size=1,
    max_size=4,
)


@examples(1500)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=4), st.sampled_from([(1, 0), (3, 0)]), CHANGES)
def test_changed_file_is_refused_or_read_as_numpy_reads_it(
    dtype: str, shape: list[int], version: tuple[int, int], changes: list[tuple[int, bytes, int]]
) -> None:
    data = changed(saved(np.ones(shape, dtype), version), changes)
    try:
        found = read_npy(data)
    except NpyError:
        return
    np.testing.assert_array_equal(array_of(found), np.load(io.BytesIO(data), max_header_size=1 << 20), strict=True)


@examples(300)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused(data: bytes, is_header: bool) -> None:
    with pytest.raises(NpyError):
        read_npy(b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data if is_header else data)


HUGE: list[Any] = [
    with_header(ONE.replace("(1,)", f"({'9' * 15}, {'9' * 15})")),
    b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"{" * 1000,
    b"\x93NUMPY\x03\x00" + MAX_HEADER_BYTES.to_bytes(4, "little") + b"{" + b"(" * MAX_HEADER_BYTES,
    b"\x93NUMPY\x03\x00" + MAX_HEADER_BYTES.to_bytes(4, "little") + b"{'shape': (" + b" " * MAX_HEADER_BYTES,
    b"\x93NUMPY\x03\x00" + MAX_HEADER_BYTES.to_bytes(4, "little") + b"{'shape': (" + b"9" * MAX_HEADER_BYTES,
    saved(np.zeros(1 << 20, "u1")),
]


@pytest.mark.parametrize("data", HUGE)
def test_reader_takes_no_memory_for_elements(data: bytes) -> None:
    tracemalloc.start()
    try:
        try:
            read_npy(data)
        except NpyError:
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000

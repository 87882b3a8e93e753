"""Pixels and latents as `.npy` files: written strictly, read again by numpy and by the service's own reader."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from starling.common.errors import ConfigError
from starling.reward.http.npy import read_npy
from starling.rewardclient.media import latents, npy_bytes, pixels

DTYPES = ("uint8", "<f2", "<f4")


@given(data=st.data(), dtype=st.sampled_from(DTYPES), is_fortran=st.booleans())
def test_written_files_are_read_by_numpy_and_the_service(data: st.DataObject, dtype: str, is_fortran: bool) -> None:
    array = data.draw(arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=5, max_side=4)))
    if is_fortran:
        array = np.asfortranarray(array)
    written = npy_bytes(array[::-1])
    loaded = np.load(io.BytesIO(written), allow_pickle=False)
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array[::-1])
    header, elements = read_npy(written)
    assert (header.shape, header.is_fortran) == (array.shape, False)
    assert bytes(elements) == array[::-1].tobytes()


def test_written_file_is_version_1_and_aligned() -> None:
    written = npy_bytes(np.zeros((2, 3), np.uint8))
    assert written.startswith(b"\x93NUMPY\x01\x00")
    assert (len(written) - 6) % 64 == 0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, object),
        np.zeros(2, [("a", "u1"), ("b", "u1")]),
        np.zeros(2, ">f4"),
        np.zeros(2, "f8"),
        np.zeros(2, "U3"),
        np.zeros(2, bool),
    ],
)
def test_other_dtypes_are_not_written(array: Any) -> None:
    with pytest.raises(ConfigError, match="an array has the dtype"):
        npy_bytes(array)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_pixels_are_an_image_or_a_video(make: Any) -> None:
    video = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    found = pixels(make(video), fps=8)
    assert (found.kind, found.dtype, found.fps, found.is_finite) == ("pixels", "uint8", 8.0, True)
    np.testing.assert_array_equal(found.data, video)
    np.testing.assert_array_equal(pixels(make(video[0])).data, video[:1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_latents_of_torch_keep_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.randn(16, 2, 3, 4, requires_grad=True).to(dtype).transpose(2, 3)
    found = latents(tensor)
    assert found.dtype == str(dtype).removeprefix("torch.")
    bits = tensor.detach().contiguous().view(torch.uint8).numpy()
    np.testing.assert_array_equal(np.ascontiguousarray(found.data).view(np.uint8), bits)
    assert found.is_finite


def test_bfloat16_of_numpy_is_bytes() -> None:
    tensor = torch.randn(4, 1, 2, 3).bfloat16()
    found = latents(tensor.view(torch.uint8).numpy())
    assert (found.dtype, found.data.shape) == ("bfloat16", (4, 1, 2, 6))
    np.testing.assert_array_equal(found.data, latents(tensor).data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype, value: float) -> None:
    tensor = torch.zeros(4, 1, 2, 2, dtype=dtype)
    tensor[3, 0, 1, 1] = torch.finfo(dtype).max
    assert latents(tensor).is_finite
    tensor[3, 0, 1, 1] = value
    assert not latents(tensor).is_finite


def test_big_endian_latents_are_converted() -> None:
    found = latents(np.full((1, 1, 1, 2), 1.5, ">f4"))
    assert found.data.dtype.str == "<f4"
    assert found.data.tolist() == [[[[1.5, 1.5]]]]


@pytest.mark.parametrize(
    ("make", "array", "problem"),
    [
        (pixels, np.zeros((2, 2, 3)), "pixels have the dtype float64; give uint8"),
        (pixels, np.zeros((2, 2, 4), np.uint8), r"pixels have the shape \[2, 2, 4\]; give"),
        (pixels, np.zeros((1, 2, 2, 2, 3), np.uint8), "pixels have the shape"),
        (pixels, np.zeros((0, 2, 2, 3), np.uint8), "pixels have the shape"),
        (pixels, [[1]], "media are of type list; give an array of numpy or a tensor of torch"),
        (latents, np.zeros((1, 1, 1, 1)), "latents have the dtype float64"),
        (latents, np.zeros((1, 1, 1), np.float32), r"latents have the shape \[1, 1, 1\]; give \[C, T, H, W\]"),
        (latents, torch.zeros(1, 1, 1, dtype=torch.bfloat16), r"latents have the shape \[1, 1, 1\]"),
        (latents, torch.tensor(1.0, dtype=torch.bfloat16), r"latents have the shape \[\]"),
        (latents, np.zeros((1, 1, 1, 3), np.uint8), "latents have the dtype uint8"),
    ],
)
def test_other_arrays_are_refused(make: Any, array: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(array)


@pytest.mark.parametrize("fps", [0.0, -1.0, 1001.0, float("nan"), float("inf")])
def test_frame_rates_that_are_none_are_refused(fps: float) -> None:
    with pytest.raises(ConfigError, match="give frames per second"):
        pixels(np.zeros((2, 2, 3), np.uint8), fps)

"""Deltas of boxes: a part that is cut out of a delta changes the base of the part into its new version."""

from __future__ import annotations

import numpy as np
import pytest
from delta_pieces import changed, random_piece
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.delta.boxes import apply_box, cut
from starling.weightsync.delta.changes import WINDOW
from starling.weightsync.delta.codec import encode
from starling.weightsync.delta.format import BLOCK
from starling.weightsync.delta.parse import parse
from starling.weightsync.plan.layout import Box

SHAPES = ((7,), (3, 5), (64, 1031), (5, 7, 11), (2 * BLOCK + 3,), (300, 400), (1, 1), ())


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """A shape and a box in it, empty ones included."""
    shape = draw(st.sampled_from(SHAPES))
    offset, size = [], []
    for n in shape:
        begin = draw(st.integers(0, n))
        offset.append(begin)
        size.append(draw(st.integers(0, n - begin)))
    return shape, Box(offset=tuple(offset), size=tuple(size))


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.size, strict=True))


@examples(80)
@given(
    shape_and_part=parts(),
    seed=st.integers(0, 1 << 30),
    item_bytes=st.sampled_from((1, 2, 4)),
    share=st.sampled_from((0.0, 0.001, 0.03, 0.3)),
    run=st.sampled_from((1, 300)),
)
def test_cut_of_a_delta_equals_the_delta_of_the_part(
    shape_and_part: tuple[tuple[int, ...], Box], seed: int, item_bytes: int, share: float, run: int
) -> None:
    shape, part = shape_and_part
    rng = np.random.default_rng(seed)
    num = int(np.prod(shape))
    base = random_piece(rng, num, item_bytes)
    new = changed(rng, base, share, run)
    whole = parse(encode(new, base, item_bytes).data)
    if whole.header.form == "dense":
        return
    encoded = cut(whole, Box(offset=(0,) * len(shape), size=shape), part)
    held, expected = base.reshape(shape).copy(), base.reshape(shape).copy()
    inside = index_of(part)
    expected[inside] = new.reshape(shape)[inside]
    apply_box(encoded.data, held[inside] if shape else held)
    np.testing.assert_array_equal(held, expected)
    assert encoded.metrics.num_changed == int((new != base).reshape(shape)[inside].sum())
    if encoded.form == "delta":  # nothing is wasted: as large as if the part itself had been compared
        alone = encode(np.ascontiguousarray(new.reshape(shape)[inside]), base.reshape(shape)[inside].copy(), item_bytes)
        assert alone.form == "dense" or len(encoded.data) == len(alone.data)


def test_cut_of_boxes_across_windows() -> None:
    rng = np.random.default_rng(5)
    shape = (3, WINDOW // 2 + 5)
    base = random_piece(rng, shape[0] * shape[1], 2)
    new = changed(rng, base, 0.01)
    whole = parse(encode(new, base, 2).data)
    for part in (Box(offset=(0, 3), size=(3, 1000)), Box(offset=(1, 0), size=(2, shape[1]))):
        held = base.reshape(shape).copy()
        apply_box(cut(whole, Box(offset=(0, 0), size=shape), part).data, held[index_of(part)])
        expected = base.reshape(shape).copy()
        expected[index_of(part)] = new.reshape(shape)[index_of(part)]
        np.testing.assert_array_equal(held, expected)


def test_dense_piece_fills_a_strided_box() -> None:
    rng = np.random.default_rng(1)
    new, base = random_piece(rng, 12, 2), random_piece(rng, 12, 2)
    held = np.zeros((3, 8), np.uint16)
    apply_box(encode(new, base, 2, max_share=0.0).data, held[:, 2:6])
    np.testing.assert_array_equal(held[:, 2:6], new.reshape(3, 4))
    assert not held[:, :2].any()
    assert not held[:, 6:].any()


def test_unfit_delta_is_refused_and_nothing_written() -> None:
    rng = np.random.default_rng(2)
    base = random_piece(rng, 100, 2)
    data = encode(changed(rng, base, 0.1), base, 2).data
    held = np.zeros((10, 20), np.uint16)
    with pytest.raises(WeightsError, match="elements"):
        apply_box(data, held[:, :9])
    with pytest.raises(WeightsError, match="2 bytes"):
        apply_box(data, np.zeros((10, 10), np.uint32))
    broken = data.copy()
    broken[70] ^= 0xFF
    with pytest.raises(WeightsError):
        apply_box(broken[:-8], held[:, :10])
    assert not held.any()
    with pytest.raises(WeightsError, match="cut"):
        cut(parse(data), Box(offset=(0,), size=(99,)), Box(offset=(0,), size=(5,)))

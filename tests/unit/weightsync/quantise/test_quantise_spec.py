"""Geometry of quantised tensors: packed boxes and scales of a box of the original."""

from __future__ import annotations

import itertools
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box, Layout, TensorSpec, check_layout, decode, encode
from starling.weightsync.quantise.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_GROUP,
    FP8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
    QuantFormat,
)
from starling.weightsync.quantise.spec import QuantSpec, Run


def spec_of(shape: tuple[int, ...], form: QuantFormat, dtype: str = "bfloat16") -> QuantSpec:
    return QuantSpec(tensor=TensorSpec(name="layer.weight", shape=shape, dtype=dtype), format=form)


def box(*spans: tuple[int, int]) -> Box:
    return Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))


SMALL_BLOCK = QuantFormat(
    name="small_block", element="float8_e4m3fn", rows=3, columns=4, rule="linear", scale_dtype="float32"
)
SMALL_PAIRS = QuantFormat(
    name="small_pairs", element="float4_e2m1fn", rows=1, columns=4, rule="exponent_floor", scale_dtype="float8_e8m0fnu"
)
SMALL_ROW = QuantFormat(
    name="small_row", element="float8_e4m3fn", rows=1, columns=0, rule="linear", scale_dtype="float32"
)


@pytest.mark.parametrize(
    ("form", "shape", "group", "grid", "packed_shape", "packed_dtype"),
    [
        (FP8_ROW, (6, 300), (1, 300), (6, 1), (6, 300), "float8_e4m3fn"),
        (FP8_ROW, (7,), (7,), (1,), (7,), "float8_e4m3fn"),
        (FP8_ROW, (2, 3, 5), (1, 1, 5), (2, 3, 1), (2, 3, 5), "float8_e4m3fn"),
        (FP8_ROW, (4, 0), (1, 1), (4, 0), (4, 0), "float8_e4m3fn"),
        (FP8_BLOCK, (256, 300), (128, 128), (2, 3), (256, 300), "float8_e4m3fn"),
        (FP8_BLOCK, (8, 129, 1), (1, 128, 128), (8, 2, 1), (8, 129, 1), "float8_e4m3fn"),
        (FP8_GROUP, (5, 129), (1, 128), (5, 2), (5, 129), "float8_e4m3fn"),
        (NVFP4, (3, 33), (1, 16), (3, 3), (3, 17), "uint8"),
        (MXFP4, (2, 64), (1, 32), (2, 2), (2, 32), "uint8"),
        (MXFP8, (2, 65), (1, 32), (2, 3), (2, 65), "float8_e4m3fn"),
    ],
)
def test_shapes(
    form: QuantFormat,
    shape: tuple[int, ...],
    group: tuple[int, ...],
    grid: tuple[int, ...],
    packed_shape: tuple[int, ...],
    packed_dtype: str,
) -> None:
    spec = spec_of(shape, form)
    assert (spec.group, spec.grid, spec.packed_shape, spec.packed_dtype) == (group, grid, packed_shape, packed_dtype)


def test_tensors_of_each_format() -> None:
    codes, scales = spec_of((256, 300), FP8_BLOCK).tensors()
    assert (codes.name, codes.shape, codes.dtype) == ("layer.weight", (256, 300), "float8_e4m3fn")
    assert (scales.name, scales.shape, scales.dtype) == ("layer.weight_scale_inv", (2, 3), "float32")
    names = [(t.name, t.shape, t.dtype) for t in spec_of((4, 64), NVFP4).tensors()]
    assert names == [
        ("layer.weight", (4, 32), "uint8"),
        ("layer.weight_scale", (4, 4), "float8_e4m3fn"),
        ("layer.weight_scale_2", (), "float32"),
    ]
    for form in FORMATS.values():  # every format's tensors may stand in a layout
        check_layout(Layout(replica="policy", tensors=spec_of((256, 256), form).tensors(), ranks=()))


def test_power_of_two_scales_may_be_float32() -> None:
    form = msgspec.structs.replace(FP8_BLOCK_UE8M0, scale_dtype="float32")
    assert spec_of((256, 256), form).tensors()[1].dtype == "float32"


@pytest.mark.parametrize(
    ("form", "shape", "part", "touched", "owned", "cut"),
    [
        # Whole blocks.
        (FP8_BLOCK, (512, 512), box((128, 256), (0, 512)), box((1, 2), (0, 4)), box((1, 2), (0, 4)), ()),
        # Both row sides cut.
        (
            FP8_BLOCK,
            (512, 256),
            box((100, 300), (0, 256)),
            box((0, 3), (0, 2)),
            box((1, 3), (0, 2)),
            (box((0, 1), (0, 2)), box((2, 3), (0, 2))),
        ),
        # The last block is short and whole all the same.
        (FP8_BLOCK, (300, 200), box((256, 300), (128, 200)), box((2, 3), (1, 2)), box((2, 3), (1, 2)), ()),
        # Inside one block: it is owned by the rank that holds its first element.
        (FP8_BLOCK, (256, 256), box((3, 9), (0, 4)), box((0, 1), (0, 1)), box((1, 1), (0, 1)), (box((0, 1), (0, 1)),)),
        # A row cut in two.
        (FP8_ROW, (4, 10), box((1, 3), (0, 5)), box((1, 3), (0, 1)), box((1, 3), (0, 1)), (box((1, 3), (0, 1)),)),
        (FP8_ROW, (4, 10), box((1, 3), (5, 10)), box((1, 3), (0, 1)), box((1, 3), (1, 1)), (box((1, 3), (0, 1)),)),
        # Empty.
        (NVFP4, (4, 64), box((2, 2), (0, 64)), box((2, 2), (0, 4)), box((2, 2), (0, 4)), ()),
    ],
)
def test_scales_of_a_box(
    form: QuantFormat, shape: tuple[int, int], part: Box, touched: Box, owned: Box, cut: tuple[Box, ...]
) -> None:
    spec = spec_of(shape, form)
    assert spec.scale_box(part) == touched
    assert spec.owned_scale_box(part) == owned
    assert spec.cut_groups(part) == cut
    assert spec.is_whole(part) == (not cut)


@pytest.mark.parametrize(
    ("form", "shape", "part", "packed"),
    [
        (FP8_BLOCK, (300, 301), box((7, 9), (3, 300)), box((7, 9), (3, 300))),
        (NVFP4, (3, 33), box((1, 2), (6, 20)), box((1, 2), (3, 10))),
        (NVFP4, (3, 33), box((0, 3), (16, 33)), box((0, 3), (8, 17))),
        (NVFP4, (3, 33), box((0, 3), (5, 5)), box((0, 3), (2, 2))),
    ],
)
def test_packed_box(form: QuantFormat, shape: tuple[int, int], part: Box, packed: Box) -> None:
    assert spec_of(shape, form).packed_box(part) == packed


@pytest.mark.parametrize("part", [box((0, 3), (1, 4)), box((0, 3), (0, 3)), box((0, 3), (31, 33))])
def test_box_that_cuts_a_byte_is_refused(part: Box) -> None:
    with pytest.raises(WeightsError, match=r"layer\.weight cuts through a byte of nvfp4 codes; split its last dim"):
        spec_of((3, 33), NVFP4).packed_box(part)


@pytest.mark.parametrize("part", [box((0, 4), (0, 33)), box((-1, 2), (0, 2)), box((0, 1))])
def test_box_outside_the_tensor_is_refused(part: Box) -> None:
    spec = spec_of((3, 33), NVFP4)
    for ask in (spec.packed_box, spec.scale_box, spec.owned_scale_box, spec.cut_groups):
        with pytest.raises(WeightsError, match=r"leaves tensor layer\.weight of shape \(3, 33\)"):
            ask(part)


def test_unsupported_tensor_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"layer\.weight is int8; to be quantised it must be one of bfloat16, flo"):
        spec_of((3, 4), FP8_ROW, dtype="int8")
    with pytest.raises(WeightsError, match=r"has shape \(3,\); format fp8_block needs at least 2 dims"):
        spec_of((3,), FP8_BLOCK)
    with pytest.raises(WeightsError, match=r"has shape \(\); format fp8_row needs at least 1 dims"):
        spec_of((), FP8_ROW)
    with pytest.raises(WeightsError, match="cannot have groups of 1 x 15 elements"):
        msgspec.structs.replace(NVFP4, columns=15)
    with pytest.raises(WeightsError, match="has float8_e8m0fnu scales; rule linear needs float32"):
        msgspec.structs.replace(FP8_ROW, scale_dtype="float8_e8m0fnu")
    with pytest.raises(WeightsError, match="are not a QuantSpec"):
        decode(QuantSpec, b"\x00")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_specs_are_serialisable(form: QuantFormat) -> None:
    spec = spec_of((256, 300), form)
    assert decode(QuantSpec, encode(spec)) == spec
    assert FORMATS[form.name] is form


def test_spec_needs_no_torch() -> None:
    code = "import sys, starling.weightsync.quantise.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@st.composite
def tilings(draw: st.DrawFn) -> tuple[QuantSpec, list[Box]]:
    form = draw(st.sampled_from([SMALL_BLOCK, SMALL_PAIRS, SMALL_ROW]))
    shape = draw(st.sampled_from([(9, 12), (7, 11), (3, 1), (2, 5, 9), (1, 16)]))
    sides = []
    for dim, n in enumerate(shape):
        step = form.codes_per_byte if dim == len(shape) - 1 else 1
        cuts = draw(st.sets(st.integers(1, max(1, (n - 1) // step)).map(lambda c, s=step: c * s), max_size=3))
        sides.append(list(itertools.pairwise(sorted({0, n, *(c for c in cuts if c < n)}))))
    return spec_of(shape, form), [box(*spans) for spans in itertools.product(*sides)]


def region(part: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + n) for begin, n in zip(part.offset, part.size, strict=True))


def group_ids(spec: QuantSpec) -> np.ndarray:
    """For every element of the original, the number of its group, counted one by one."""
    cells = np.indices(spec.tensor.shape).reshape(len(spec.tensor.shape), -1)
    cells //= np.array(spec.group)[:, None]
    return np.ravel_multi_index(tuple(cells), spec.grid).reshape(spec.tensor.shape)


def groups_of(spec: QuantSpec, part: Box) -> set[int]:
    return set(np.arange(int(np.prod(spec.grid))).reshape(spec.grid)[region(part)].ravel().tolist())


@given(tilings())
@examples(80)
def test_boxes_agree_with_counting_elements(case: tuple[QuantSpec, list[Box]]) -> None:
    spec, boxes = case
    ids = group_ids(spec)
    sizes = np.bincount(ids.ravel(), minlength=int(np.prod(spec.grid)))
    owned = np.zeros(spec.grid, int)
    packed = np.zeros(spec.packed_shape, int)
    for part in boxes:
        here = np.bincount(ids[region(part)].ravel(), minlength=sizes.size)
        assert groups_of(spec, spec.scale_box(part)) == set(np.flatnonzero(here).tolist())
        assert spec.owned_scale_box(part).volume <= spec.scale_box(part).volume
        cut = [groups_of(spec, one) for one in spec.cut_groups(part)]
        assert set().union(*cut) == set(np.flatnonzero((here > 0) & (here < sizes)).tolist())
        assert sum(map(len, cut)) == len(set().union(*cut))
        owned[region(spec.owned_scale_box(part))] += 1
        packed[region(spec.packed_box(part))] += 1
    assert (owned == 1).all()
    assert (packed == 1).all()


@given(tilings())
@examples(80)
def test_exchanges_bring_every_part_of_every_cut_group_once(
    case: tuple[QuantSpec, list[Box]],
) -> None:
    spec, boxes = case
    copies = boxes + boxes[:2]  # two ranks that hold what others hold
    exchanges = spec.exchanges(copies)
    ids = group_ids(spec)
    for rank, part in enumerate(copies):
        expected = {
            (source, group)
            for source, other in enumerate(boxes)
            if other != part
            for cut in spec.cut_groups(part)
            for group in groups_of(spec, cut) & set(ids[region(other)].ravel().tolist())
        }
        got = [(e.source, g) for e in exchanges if e.destination == rank for g in sorted(groups_of(spec, e.groups))]
        assert len(got) == len(set(got))
        assert set(got) == expected


@given(tilings())
@examples(60)
def test_runs_cover_the_groups_of_a_dim(case: tuple[QuantSpec, list[Box]]) -> None:
    spec, boxes = case
    for part in boxes:
        for dim in (-1, -2):
            found = [
                (run.begin + index * run.length + step, run.first_group + index)
                for run in spec.runs(part, dim)
                for index in range(run.groups)
                for step in range(run.length)
            ]
            begin, g = part.offset[dim], spec.group[dim]
            assert found == [(i, (begin + i) // g - begin // g) for i in range(part.size[dim])]


def test_runs_join_whole_groups() -> None:
    spec = spec_of((1000, 128), FP8_BLOCK)
    assert list(spec.runs(box((100, 700), (0, 128)), -2)) == [
        Run(begin=0, first_group=0, groups=1, length=28),
        Run(begin=28, first_group=1, groups=4, length=128),
        Run(begin=540, first_group=5, groups=1, length=60),
    ]

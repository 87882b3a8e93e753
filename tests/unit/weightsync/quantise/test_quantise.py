"""Quantised shards: any split gives the bits of the whole tensor, and the numbers follow the formats."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box, TensorSpec
from starling.weightsync.quantise.formats import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_GROUP,
    FP8_GROUP_UE8M0,
    FP8_ROW,
    MXFP4,
    MXFP4_CEIL,
    MXFP8,
    MXFP8_CEIL,
    NVFP4,
    QuantFormat,
)
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.codes import encode
from starling.weightsync.tensors.quantise import (
    Amax,
    Quantised,
    combine,
    dequantise,
    empty_quantised,
    partial_amax,
    quantise,
    quantise_with,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL_BLOCK = msgspec.structs.replace(FP8_BLOCK, name="small_block", rows=3, columns=4)
SMALL_FORMATS = (
    FP8_ROW,
    SMALL_BLOCK,
    msgspec.structs.replace(FP8_BLOCK_UE8M0, name="small_block_ue8m0", rows=4, columns=6, scale_dtype="float32"),
    msgspec.structs.replace(NVFP4, name="small_nvfp4", columns=4),
    msgspec.structs.replace(MXFP4, name="small_mxfp4", columns=8),
    msgspec.structs.replace(MXFP8_CEIL, name="small_mxfp8", columns=5),
)


def spec_of(tensor: torch.Tensor, form: QuantFormat) -> QuantSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return QuantSpec(tensor=TensorSpec(name="layer.weight", shape=tuple(tensor.shape), dtype=dtype), format=form)


def weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of widely different size, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn((*shape[:-1], 1), generator=generator).mul(3).exp()
    tensor = (torch.randn(shape, generator=generator) * spread * 0.02).clamp(-6e4, 6e4).to(dtype)
    if tensor.dim() > 1 and tensor.numel():
        tensor[..., 0, :] = 0
    return tensor


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.size, strict=True))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: NaNs and signs of zero count."""
    return tensor.contiguous().flatten().view(torch.uint8)


def whole(spec: QuantSpec) -> Box:
    return Box(offset=(0,) * len(spec.tensor.shape), size=spec.tensor.shape)


def quantise_in_shards(tensor: torch.Tensor, boxes: list[Box], spec: QuantSpec) -> list[Quantised]:
    """Each rank reduces its own box, and gets of the others only what `exchanges` says."""
    own = [partial_amax(tensor[region(box)], box, spec) for box in boxes]
    gets: list[list[Amax]] = [[] for _ in boxes]
    for exchange in spec.exchanges(boxes):
        gets[exchange.destination].append(own[exchange.source].part(exchange.groups))
    if spec.format.two_level:
        for got in gets:
            got.extend(amax.without_groups() for amax in own)
    return [
        quantise_with(tensor[region(box)], box, combine(amax, got), spec)
        for box, amax, got in zip(boxes, own, gets, strict=True)
    ]


@st.composite
def splits(draw: st.DrawFn) -> tuple[torch.Tensor, list[Box], QuantSpec]:
    form = draw(st.sampled_from(SMALL_FORMATS))
    shape = draw(st.sampled_from([(13, 22), (8, 24), (5, 7), (1, 16), (9, 1), (3, 7, 10), (2, 2, 4, 12), (17,)]))
    if len(shape) == 1 and form.rows > 1:
        shape = (17, 1)
    sides = []
    for dim, n in enumerate(shape):
        step = form.codes_per_byte if dim == len(shape) - 1 else 1
        cuts = {cut * step for cut in draw(st.sets(st.integers(1, max(1, n // step)), max_size=3))}
        sides.append(list(itertools.pairwise(sorted({0, n, *(cut for cut in cuts if cut < n)}))))
    boxes = [
        Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))
        for spans in itertools.product(*sides)
    ]
    tensor = weights(shape, draw(st.sampled_from(DTYPES)), seed=draw(st.integers(0, 1000)))
    return tensor, boxes, spec_of(tensor, form)


@given(splits())
@examples(120)
def test_any_split_gives_the_bits_of_the_whole(case: tuple[torch.Tensor, list[Box], QuantSpec]) -> None:
    tensor, boxes, spec = case
    full = quantise(tensor, spec)
    values = dequantise(full, spec)
    for box, part in zip(boxes, quantise_in_shards(tensor, boxes, spec), strict=True):
        assert torch.equal(raw(part.data), raw(full.data[region(spec.packed_box(box))]))
        assert torch.equal(raw(part.scales), raw(full.scales[region(spec.scale_box(box))]))
        if full.global_scale is not None:
            assert part.global_scale is not None
            assert torch.equal(raw(part.global_scale), raw(full.global_scale))
        assert torch.equal(raw(dequantise(part, spec, box)), raw(values[region(box)]))


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((2, 700, 514), (0, 100, 101, 640, 700), (0, 6, 258, 514)), ((130, 2600), (0, 50, 130), (0, 300, 2600))],
)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_uneven_shards_of_a_large_tensor(
    form: QuantFormat, shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...]
) -> None:
    tensor = weights(shape, torch.bfloat16)
    spec = spec_of(tensor, form)
    leads = shape[:-2]
    boxes = [
        Box(offset=(*(0 for _ in leads), a, c), size=(*leads, b - a, d - c))
        for (a, b), (c, d) in itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    ]
    full = quantise(tensor, spec)
    for box, part in zip(boxes, quantise_in_shards(tensor, boxes, spec), strict=True):
        assert torch.equal(raw(part.data), raw(full.data[region(spec.packed_box(box))]))
        assert torch.equal(raw(part.scales), raw(full.scales[region(spec.scale_box(box))]))


def test_bits_differ_without_the_exchange() -> None:
    tensor = torch.tensor([[1.0, 2.0, 3.0, 40.0]])
    spec = spec_of(tensor, FP8_ROW)
    left = Box(offset=(0, 0), size=(1, 2))
    alone = quantise_with(tensor[:, :2], left, partial_amax(tensor[:, :2], left, spec), spec)
    assert not torch.equal(raw(alone.scales), raw(quantise(tensor, spec).scales))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("form", "bound"),
    [
        # Half a step of the code at the group's largest magnitude, with the rounding of the scale or what is clipped.
        (FP8_ROW, 0.037),
        (FP8_BLOCK, 0.037),
        (FP8_GROUP, 0.037),
        (FP8_BLOCK_UE8M0, 0.0625),
        (FP8_GROUP_UE8M0, 0.0625),
        (NVFP4, 0.24),
        (MXFP4, 0.25),
        (MXFP8, 0.125),
        (MXFP4_CEIL, 0.34),
        (MXFP8_CEIL, 0.0625),
    ],
    ids=lambda value: value.name if isinstance(value, QuantFormat) else str(value),
)
def test_dequantised_values_are_close(form: QuantFormat, bound: float, dtype: torch.dtype) -> None:
    tensor = weights((130, 200), dtype)
    spec = spec_of(tensor, form)
    quantised = quantise(tensor, spec)
    amax = partial_amax(tensor, whole(spec), spec).groups
    for size, dim in zip(spec.group, range(2), strict=True):
        amax = amax.repeat_interleave(size, dim)
    amax = amax[:130, :200]
    error = (dequantise(quantised, spec) - tensor.float()).abs()
    # Where a group's scale is at its least, codes are coarser than the group: only in the tensor's smallest groups.
    least = float(quantised.global_scale) * 2**-6 if quantised.global_scale is not None else 0.0
    assert bool((error <= bound * amax + least).all())
    assert dequantise(quantised, spec, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_zeros(form: QuantFormat, dtype: torch.dtype) -> None:
    tensor = torch.zeros((130, 48), dtype=dtype)
    spec = spec_of(tensor, form)
    quantised = quantise(tensor, spec)
    scales = quantised.scales.float()
    assert bool((scales.isfinite() & (scales > 0)).all())
    assert quantised.global_scale is None or 0 < float(quantised.global_scale) < 1e-30
    assert not bool(raw(quantised.data).any())
    assert not bool(dequantise(quantised, spec).any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_smallest_and_largest_numbers(form: QuantFormat, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    largest = 0.75 * info.max  # a little more may be rounded up beyond float32
    for value in (info.smallest_normal, info.smallest_normal * info.eps, largest):
        tensor = torch.zeros((2, 32), dtype=dtype)
        tensor[0, :3] = torch.tensor([value, -value, value / 2], dtype=dtype)
        spec = spec_of(tensor, form)
        quantised = quantise(tensor, spec)
        values = dequantise(quantised, spec)
        assert bool(values.isfinite().all())
        assert not bool((quantised.scales.float() == 0).any())
        assert not bool(values[0, 3:].any())
        assert not bool(values[1].any())
        assert bool((values[0, :3].abs() <= 1.34 * value).all())
    assert abs(float(values[0, 0]) / largest - 1) <= 0.25


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_are_refused(value: float, dtype: torch.dtype) -> None:
    tensor = weights((300, 300), dtype)
    tensor[200, 290] = value
    cases = ((FP8_BLOCK, "[128:256, 256:300]"), (NVFP4, "[200:201, 288:300]"), (FP8_ROW, "[200:201, 0:300]"))
    for form, where in cases:
        with pytest.raises(WeightsError) as caught:
            quantise(tensor, spec_of(tensor, form))
        assert f"Tensor layer.weight has an infinite or NaN element in {where} and" in str(caught.value)
    spec, part = spec_of(tensor, FP8_BLOCK), Box(offset=(150, 270), size=(150, 30))
    with pytest.raises(WeightsError, match=r"in \[150:256, 270:300\]"):
        partial_amax(tensor[region(part)], part, spec)


def test_four_bit_codes_are_nearest() -> None:
    """Every bfloat16 up to 6, and the float32 beside every threshold: the nearest code, at a tie the even one."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    numbers = numbers[numbers.abs() <= 6]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.cat((ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0))))
    numbers = torch.cat((numbers, beside, -beside))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (numbers.double().abs()[:, None] - magnitudes).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    even = nearest & (torch.arange(8) % 2 == 0)
    expected = torch.where(even.any(1), even.int().argmax(1), nearest.int().argmax(1)) + 8 * numbers.signbit()
    packed = encode(numbers.clone(), MXFP4)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten()[: numbers.numel()]
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize("amax", [448 * 2.0**10, 448 * 2.0**-30, 3e-3, 1.0, 448 * 2.0**-127, 2.0**-140, 3e38])
def test_ceiling_exponents_are_exact(amax: float) -> None:
    """A hair above a power of two is the next power; a logarithm in float32 would not see it."""
    exact = torch.tensor(amax)
    for value in (exact, exact.nextafter(torch.tensor(float("inf"))), exact.nextafter(torch.tensor(0.0))):
        tensor = value.repeat(1, 32)
        scale = float(quantise(tensor, spec_of(tensor, MXFP8_CEIL)).scales.double())
        wanted = float((tensor[0, 0] / 448).double())
        assert scale >= wanted
        assert scale / 2 < wanted or scale == 2.0**-127


@pytest.mark.parametrize("form", [FP8_BLOCK_UE8M0, FP8_GROUP_UE8M0], ids=lambda form: form.name)
def test_power_of_two_scales_as_float32_give_the_same_numbers(form: QuantFormat) -> None:
    tensor = weights((256, 300), torch.bfloat16)
    short, long = spec_of(tensor, form), spec_of(tensor, msgspec.structs.replace(form, scale_dtype="float32"))
    one, other = quantise(tensor, short), quantise(tensor, long)
    assert torch.equal(raw(one.data), raw(other.data))
    assert other.scales.dtype == torch.float32
    used = partial_amax(tensor, whole(short), short).groups > 0
    assert torch.equal(one.scales.float()[used], other.scales[used])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_strides_do_not_matter(form: QuantFormat) -> None:
    tensor = weights((260, 48), torch.bfloat16)
    spec = spec_of(tensor, form)
    expected = quantise(tensor, spec)
    for strided in (tensor.t().contiguous().t(), tensor.repeat_interleave(2, 1)[:, ::2]):
        assert not strided.is_contiguous()
        got = quantise(strided, spec)
        assert torch.equal(raw(got.data), raw(expected.data))
        assert torch.equal(raw(got.scales), raw(expected.scales))
    strided = tensor.expand(3, 260, 48)
    stacked = quantise(strided, spec_of(strided, form))
    assert torch.equal(raw(stacked.data[2]), raw(expected.data))


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (3, 0, 4)])
@pytest.mark.parametrize("form", [FP8_ROW, FP8_BLOCK, NVFP4, MXFP8], ids=lambda form: form.name)
def test_empty_tensors(form: QuantFormat, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    spec = spec_of(tensor, form)
    quantised = quantise(tensor, spec)
    assert tuple(quantised.data.shape) == spec.packed_shape
    assert tuple(quantised.scales.shape) == spec.grid
    assert tuple(dequantise(quantised, spec).shape) == shape


def test_empty_shard_takes_part() -> None:
    """A rank without rows has no groups, but the tensor's scale all the same."""
    tensor = weights((4, 32), torch.bfloat16)
    spec = spec_of(tensor, NVFP4)
    boxes = [Box(offset=(0, 0), size=(4, 32)), Box(offset=(4, 0), size=(0, 32))]
    full, nothing = quantise_in_shards(tensor, boxes, spec)
    assert nothing.data.shape == (0, 16)
    assert full.global_scale is not None
    assert nothing.global_scale is not None
    assert torch.equal(full.global_scale, nothing.global_scale)


def test_quantise_into_given_memory() -> None:
    tensor = weights((64, 48), torch.bfloat16)
    for form in (FP8_ROW, NVFP4):
        spec = spec_of(tensor, form)
        out = empty_quantised(whole(spec), spec)
        place = out.data.data_ptr()
        assert quantise(tensor, spec, out) is out
        assert out.data.data_ptr() == place
        expected = quantise(tensor, spec)
        assert torch.equal(raw(out.data), raw(expected.data))
        assert torch.equal(raw(out.scales), raw(expected.scales))


def test_tensors_fused_under_one_scale() -> None:
    """An engine that keeps one scale for several tensors gets codes for the largest of theirs."""
    small, large = torch.full((2, 16), 0.5), torch.full((2, 16), 100.0)
    spec = spec_of(small, NVFP4)
    total = partial_amax(large, whole(spec), spec).total
    shared = dataclasses.replace(partial_amax(small, whole(spec), spec), total=total)
    quantised = quantise_with(small, whole(spec), shared, spec)
    scale = quantise(large, spec).global_scale
    assert quantised.global_scale is not None
    assert scale is not None
    assert torch.equal(quantised.global_scale, scale)
    assert torch.allclose(dequantise(quantised, spec), small, rtol=0.07)


def test_combine_takes_the_largest_in_any_order() -> None:
    tensor = weights((6, 9), torch.float32)
    spec = spec_of(tensor, SMALL_BLOCK)
    boxes = [Box(offset=(0, c), size=(6, 3)) for c in (0, 3, 6)]
    parts = [partial_amax(tensor[region(box)], box, spec) for box in boxes]
    expected = partial_amax(tensor, whole(spec), spec)
    for order in itertools.permutations(range(3)):
        got = combine(parts[order[0]], [parts[i] for i in order[1:]])
        assert torch.equal(got.groups, expected.part(got.box).groups)
    assert torch.equal(combine(parts[0], []).groups, parts[0].groups)


def test_unfit_arguments_are_refused() -> None:
    tensor = weights((8, 32), torch.bfloat16)
    spec, pairs = spec_of(tensor, FP8_ROW), spec_of(tensor, NVFP4)
    box = whole(spec)
    amax = partial_amax(tensor, box, spec)
    with pytest.raises(WeightsError, match=r"has a shard of bfloat16 \(7, 32\); box \[0:8, 0:32\] is bfloat16 \(8, 3"):
        partial_amax(tensor[1:], box, spec)
    with pytest.raises(WeightsError, match=r"has a shard of float32 \(8, 32\)"):
        quantise(tensor.float(), spec)
    with pytest.raises(WeightsError, match=r"groups \[0:8, 0:1\] were requested, but only those of \[0:4, 0:1\]"):
        quantise_with(tensor, box, amax.part(Box(offset=(0, 0), size=(4, 1))), spec)
    with pytest.raises(WeightsError, match=r"lack that of the whole tensor; nvfp4 needs it"):
        quantise_with(tensor, box, dataclasses.replace(partial_amax(tensor, box, pairs), total=None), pairs)
    with pytest.raises(WeightsError, match="are not of one tensor"):
        combine(amax, [partial_amax(tensor, box, pairs)])
    with pytest.raises(WeightsError, match=r"in nvfp4 is uint8 \(8, 16\), contiguous; got float8_e4m3fn \(8, 32\)"):
        quantise(tensor, pairs, quantise(tensor, spec))
    with pytest.raises(WeightsError, match="has a scale of the whole tensor"):
        dequantise(dataclasses.replace(quantise(tensor, pairs), global_scale=None), pairs)
    odd = Box(offset=(0, 3), size=(8, 13))
    with pytest.raises(WeightsError, match="cuts through a byte of nvfp4 codes"):
        quantise_with(tensor[region(odd)], odd, partial_amax(tensor[region(odd)], odd, pairs), pairs)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_default_dtype_of_torch_has_no_effect(form: QuantFormat) -> None:
    """Engines set it to that of their model while they make and load it."""
    tensor = weights((128, 128), torch.bfloat16)
    spec = spec_of(tensor, form)
    expected = quantise(tensor, spec)
    numbers = dequantise(expected, spec)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = quantise(tensor, spec)
        assert torch.equal(raw(found.data), raw(expected.data))
        assert torch.equal(raw(found.scales), raw(expected.scales))
        assert torch.equal(raw(dequantise(found, spec)), raw(numbers))
    finally:
        torch.set_default_dtype(torch.float32)

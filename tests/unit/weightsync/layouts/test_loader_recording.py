"""Recorded copies against the same operations on tensors with values, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.weightsync.layouts.strided import Strided, boxes_of, merged, row_major
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.tensors.recording import ComputedError, Recorder, Recording

NOTHING = -1

View = Callable[[torch.Tensor], torch.Tensor]


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    """Return the specification of a tensor."""
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def replayed(recording: Recording, specs: list[TensorSpec], parameters: dict[str, torch.Tensor]) -> None:
    """Fill `parameters` by what was recorded, with the number of each element of all tensors."""
    begin = 0
    for one in specs:
        values = numbered(one, begin)
        begin += values.numel()
        for name, copies in recording.copies.items():
            for copy in copies.get(one.name, ()):
                box = tuple(slice(o, o + n) for o, n in zip(copy.box.offset, copy.box.size, strict=True))
                offset = parameters[name].storage_offset() + copy.place.offset
                view = parameters[name].as_strided(copy.box.size, copy.place.strides, offset)
                assert (view == NOTHING).all(), "an element is filled twice"
                view.copy_(values[box])


def numbered(one: TensorSpec, begin: int) -> torch.Tensor:
    """Return a tensor of consecutive numbers."""
    count = math.prod(one.shape)
    return torch.arange(begin, begin + count, dtype=torch.float32).reshape(one.shape)


def compare(
    load: Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None],
    specs: list[TensorSpec],
    shapes: dict[str, tuple[int, ...]],
) -> Recording:
    """Let `load` fill parameters with values, and record it; assert that both fill the same elements alike."""
    expected = {name: torch.full(shape, float(NOTHING)) for name, shape in shapes.items()}
    values, begin = {}, 0
    for one in specs:
        values[one.name] = numbered(one, begin)
        begin += values[one.name].numel()
    load(expected, values)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    recorder = Recorder(empty)
    with recorder:
        load(empty, {one.name: recorder.stand_in(one) for one in specs})
    recording = recorder.recording()
    assert not recording.computed, recording.reasons
    found = {name: torch.full(shape, float(NOTHING)) for name, shape in shapes.items()}
    replayed(recording, specs, found)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    return recording


# --- views -----------------------------------------------------------------------------------------------------------


def factors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[list[tuple[Any, ...]], tuple[int, ...]]:
    """Draw operations on a tensor of a shape; return them, and the shape of the result."""
    steps: list[tuple[Any, ...]] = []
    meta = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 5))):
        kinds = ["reshape", "unsqueeze", "clone", "flatten"]
        if meta.ndim:
            kinds += ["narrow", "narrow", "transpose", "permute", "select", "step", "chunk", "flip", "gather", "cat"]
        kind = draw(st.sampled_from(kinds))
        dim = draw(st.integers(0, meta.ndim - 1)) if meta.ndim else 0
        length = meta.shape[dim] if meta.ndim else 1
        step: tuple[Any, ...]
        match kind:
            case "reshape":
                left, sizes = meta.numel(), []
                while left > 1 and len(sizes) < 4:
                    sizes.append(draw(st.sampled_from(factors(left))))
                    left //= sizes[-1]
                step = ("reshape", (*sizes, left))
            case "narrow":
                begin = draw(st.integers(0, length - 1))
                step = ("narrow", dim, begin, draw(st.integers(1, length - begin)))
            case "step":
                step = ("step", dim, draw(st.integers(0, length - 1)), draw(st.integers(2, 3)))
            case "select":
                step = ("select", dim, draw(st.integers(0, length - 1)))
            case "transpose":
                step = ("transpose", dim, draw(st.integers(0, meta.ndim - 1)))
            case "permute":
                step = ("permute", tuple(draw(st.permutations(range(meta.ndim)))))
            case "chunk":
                step = ("chunk", draw(st.integers(1, 3)), dim)
            case "flip" | "gather":
                order = draw(st.permutations(range(length))) if kind == "flip" else list(range(length))[::2]
                step = ("gather", dim, tuple(order))
            case "cat":
                step = ("cat", draw(st.booleans()), dim)
            case "unsqueeze":
                step = ("unsqueeze", draw(st.integers(0, meta.ndim)))
            case _:
                step = (kind,)
        changed = applied(meta, step)
        if 0 < changed.numel() <= 4000 and changed.ndim <= 6:
            steps.append(step)
            meta = changed
    return steps, tuple(meta.shape)


def applied(tensor: torch.Tensor, step: tuple[Any, ...]) -> torch.Tensor:
    """Apply one of the drawn operations."""
    kind, *rest = step
    match kind:
        case "step":
            dim, begin, by = rest
            return tensor[(slice(None),) * dim + (slice(begin, None, by),)]
        case "chunk":
            return tensor.chunk(rest[0], rest[1])[-1]
        case "gather":
            return tensor.index_select(rest[0], torch.tensor(rest[1], device="meta" if tensor.is_meta else "cpu"))
        case "cat":
            join = torch.stack if rest[0] else torch.cat
            return join([tensor, tensor.clone()], rest[1])
        case "clone":
            return tensor.clone()
        case _:
            changed: torch.Tensor = getattr(tensor, kind)(*rest)
            return changed


@st.composite
def loads(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, ...]], tuple[int, ...], int]:
    """Draw a tensor's shape, operations on it, and a parameter with the dim along which it has room for more."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4)))
    steps, made = draw(views(shape))
    return shape, steps, made, draw(st.integers(0, 2))


@given(loads())
@examples(400, deadline=None)
def test_recorded_views_equal_the_same_views_of_values(
    drawn: tuple[tuple[int, ...], list[tuple[Any, ...]], tuple[int, ...], int],
) -> None:
    shape, steps, made, padding = drawn

    def load(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors["a"]
        for step in steps:
            tensor = applied(tensor, step)
        target = parameters["p"]
        target.data[padding : padding + 1].squeeze(0).copy_(tensor)

    compare(load, [spec("a", *shape)], {"p": (padding + 2, *made)})


@given(st.data())
@examples(200, deadline=None)
def test_boxes_of_any_strides_cover_each_element_once(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    total = math.prod(shape)
    sizes = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    strides: list[int] = []
    left = total - 1
    for length in sizes:
        stride = data.draw(st.integers(0, left // max(length - 1, 1)))
        strides.append(stride)
        left -= stride * (length - 1)
    view = Strided(data.draw(st.integers(0, left)), tuple(strides))
    to = Strided(0, row_major(sizes))
    values = torch.arange(total).reshape(shape)
    expected = values.flatten().as_strided(sizes, view.strides, view.offset)
    found = torch.full((math.prod(sizes),), NOTHING)
    for copy in merged(boxes_of(shape, sizes, view, to)):
        box = tuple(slice(o, o + n) for o, n in zip(copy.box.offset, copy.box.size, strict=True))
        target = found.as_strided(copy.box.size, copy.place.strides, copy.place.offset)
        assert (target == NOTHING).all()
        target.copy_(values[box])
    assert torch.equal(found.reshape(sizes), expected)


# --- numbers of boxes ------------------------------------------------------------------------------------------------


def test_views_are_few_boxes_whatever_their_size() -> None:
    """What loaders do with the tensors of the largest models, without their elements."""
    experts, inner, hidden, heads, head = 384, 2048, 7168, 128, 128

    def load(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        for e in range(experts):
            gate, up = tensors["gate_up"][e].chunk(2)
            parameters["w13"].data[e, : inner // 2].copy_(gate[inner // 2 :])
            parameters["w13"].data[e, inner // 2 :].copy_(up[inner // 2 :])
            parameters["w2"].data[e].copy_(tensors["down"][e].narrow(1, inner // 2, inner // 2))
        joined = tensors["qkv"].view(heads, 3, head, hidden).transpose(0, 1).reshape(3 * heads * head, hidden)
        parameters["qkv"].data.copy_(joined)

    specs = [
        spec("gate_up", experts, 2 * inner, hidden),
        spec("down", experts, hidden, inner),
        spec("qkv", 3 * heads * head, hidden),
    ]
    shapes = {"w13": (experts, inner, hidden), "w2": (experts, hidden, inner // 2), "qkv": (3 * heads * head, hidden)}
    parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    recorder = Recorder(parameters)
    with recorder:
        load(parameters, {one.name: recorder.stand_in(one) for one in specs})
    copies = recorder.recording().copies
    assert {name: {tensor: len(boxes) for tensor, boxes in of.items()} for name, of in copies.items()} == {
        "w13": {"gate_up": 2},  # the rows of gate and up, for all experts at once
        "w2": {"down": 1},
        "qkv": {"qkv": 3 * heads},
    }


# --- what is not a copy ----------------------------------------------------------------------------------------------


def reasons(load: Callable[[torch.Tensor, torch.Tensor], Any], dtype: str = "float32") -> Recording:
    """Record a loader of one tensor of shape 4 x 6 into a float32 parameter of this shape."""
    parameter = torch.empty((4, 6), device="meta")
    recorder = Recorder({"p": parameter})
    with recorder:
        load(parameter, recorder.stand_in(spec("a", 4, 6, dtype=dtype)))
    return recorder.recording()


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, a: p.data.copy_(a + 1), "computes"),
        (lambda p, a: p.data.copy_(-torch.exp(a.float())), "computes"),
        (lambda p, a: p.data.copy_(a.contiguous().mul_(2)), "computes"),
        (lambda p, a: p.data.add_(a), "computes"),
        (lambda p, a: (p.data.copy_(a), p.data.copy_(-torch.exp(p.float()))), "computes in place"),
        (lambda p, a: (p.data.copy_(a), p.data[1].add_(1.0)), "computes in place"),
        (lambda p, a: p.data.copy_(a.to(torch.bfloat16)), "rounds to torch.bfloat16"),
        (lambda p, a: (p.data[:3].copy_(a[1:]), p.data[2:].copy_(a[:2])), "several tensors into the same"),
        (lambda p, a: p.data.copy_(torch.where(a > 0, a, 0.0)), "computes"),
        (lambda p, a: p.data.copy_(torch.zeros(4, 6).copy_(a)), "computes"),
    ],
)
def test_computations_are_recognised(load: Callable[[torch.Tensor, torch.Tensor], Any], reason: str) -> None:
    found = reasons(load)
    assert found.copies == {}
    assert found.computed == {"p": frozenset({"a"})}
    assert reason in found.reasons["p"]


def test_a_cast_between_element_types_is_no_copy() -> None:
    assert "converts torch.bfloat16" in reasons(lambda p, a: p.data.copy_(a), "bfloat16").reasons["p"]
    assert not reasons(lambda p, a: p.data.copy_(a.double().float())).computed, "nothing is rounded"


def test_bits_viewed_as_another_type_of_their_size_are_copied() -> None:
    """Scales that are powers of two are bytes in checkpoints."""
    empty = {"p": torch.empty(3, 2, device="meta", dtype=torch.uint8)}
    recorder = Recorder(empty)
    with recorder:
        scales = recorder.stand_in(spec("a", 4, 2, dtype="float8_e8m0fnu"))
        empty["p"].copy_(scales.view(torch.uint8)[1:])
    recording = recorder.recording()
    assert not recording.computed
    ((box, place),) = recording.copies["p"]["a"]
    assert (box.offset, box.size, place) == ((1, 0), (3, 2), Strided(0, (2, 1)))


def test_bits_viewed_as_a_wider_type_are_no_copy() -> None:
    empty = {"p": torch.empty(4, 1, device="meta", dtype=torch.int16)}
    recorder = Recorder(empty)
    with recorder:
        empty["p"].copy_(recorder.stand_in(spec("a", 4, 2, dtype="uint8")).view(torch.int16))
    assert recorder.recording().computed == {"p": frozenset({"a"})}


@pytest.mark.parametrize("read", [lambda a: a[0, 0].item(), lambda a: bool(a.sum() > 0), lambda a: a.max().tolist()])
def test_reading_values_names_the_tensor(read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ComputedError) as caught:
        reasons(lambda _, a: read(a))
    assert caught.value.tensors == {"a"}


def test_padding_and_later_copies_are_no_computations() -> None:
    def load(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        p = parameters["p"]
        p.data.fill_(NOTHING)
        p.data[:3].copy_(tensors["a"])
        p.data[:3].copy_(tensors["b"])  # a second tensor for the same rows, as of a tied head
        p.data[3:].fill_(NOTHING)

    assert set(compare(load, [spec("a", 3, 2), spec("b", 3, 2)], {"p": (5, 2)}).copies["p"]) == {"b"}


def test_a_part_of_padding_alone_takes_no_tensor() -> None:
    """As a worker's rows of an embedding that has fewer than the workers before it hold."""

    def load(parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
        p, none = parameters["p"], tensors["a"].narrow(0, 3, 0)
        p[: len(none)].data.copy_(none)
        p[len(none) :].data.fill_(NOTHING)

    assert compare(load, [spec("a", 3, 2)], {"p": (5, 2)}).copies == {"p": {}}


def test_tensors_that_are_set_to_zero_fill_nothing() -> None:
    """As the bias that only the first rank adds: the checkpoint's tensor is set to zero on the others."""

    def load(p: torch.Tensor, a: torch.Tensor) -> None:
        a.zero_()
        p.data.copy_(a)

    found = reasons(load)
    assert (found.copies, found.computed, found.zeros) == ({}, {}, {"p"})
    assert not reasons(lambda p, a: (p.data.copy_(a), a.zero_())).zeros, "it was copied before"
    in_part = reasons(lambda p, a: (a[:2].zero_(), p.data.copy_(a)))
    assert "a part that was set to zero" in in_part.reasons["p"]

"""The planner: every destination element is delivered exactly once, from the right source, for any splits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.plan import layout as layout_module
from starling.weightsync.plan import planner as planner_module
from starling.weightsync.plan.boxes import (
    BoxIndex,
    PairBudget,
    contains,
    cut,
    first_gap,
    first_overlap,
    intersecting_pairs,
    intersection,
)
from starling.weightsync.plan.layout import (
    FEW_SHARDS,
    ITEM_BYTES,
    MAX_COPIES,
    MAX_LAYOUT_BOXES,
    MAX_LAYOUT_RAILS,
    MAX_LAYOUT_RANKS,
    MAX_LAYOUT_TENSORS,
    MAX_OTHER_BYTES,
    MAX_OVERLAP,
    MAX_RANK_RAILS,
    MIN_RUN_BYTES,
    Box,
    Layout,
    Place,
    RankLayout,
    Shard,
    TensorSpec,
    aligned,
    decode,
    decode_layout,
    encode,
    pieces_of,
)
from starling.weightsync.plan.planner import MAX_CLASSES, Bucket, Plan, Transfer, check_plan, decode_plan, make_plan
from starling.weightsync.plan.shard_columns import dims_of, shard_columns
from starling.weightsync.plan.validation import check_buckets

HOSTS = (Place(host="a", device="cuda:0"), Place(host="a", device="cuda:1"), Place(host="b"), Place())


def shard(tensor: int, box: Box) -> Shard:
    return Shard(tensor=tensor, box=box, storage="", offset_bytes=0, strides=(1,) * len(box.size))


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile `shape`: uneven cuts along every dim."""
    sides = []
    for n in shape:
        cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=3))) if n > 1 else []
        sides.append(list(itertools.pairwise([0, *cuts, n])))
    return [
        Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))
        for spans in itertools.product(*sides)
    ]


@st.composite
def replicas(draw: st.DrawFn, name: str, specs: tuple[TensorSpec, ...], max_copies: int) -> Layout:
    """A replica of a few ranks that holds every tensor in some tiling, each box up to `max_copies` times."""
    num_ranks = draw(st.integers(1, 4))
    shards: list[list[Shard]] = [[] for _ in range(num_ranks)]
    for index, spec in enumerate(specs):
        for box in draw(grids(spec.shape)):
            ranks = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=max_copies))
            for rank in ranks:
                shards[rank].append(shard(index, box))
    places = [draw(st.sampled_from(HOSTS)) for _ in shards]
    ranks = tuple(RankLayout(place=p, shards=tuple(held)) for p, held in zip(places, shards, strict=True))
    return Layout(replica=name, tensors=specs, ranks=ranks)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shapes = draw(
        st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8, 11]), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    specs = tuple(
        TensorSpec(name=f"t{i}", shape=shape, dtype=draw(st.sampled_from(["uint8", "bfloat16", "float32", "int64"])))
        for i, shape in enumerate(shapes)
    )
    return draw(replicas("policy-0", specs, 3)), draw(replicas("rollout-0", specs, 2))


def carry_out(plan: Plan, source: Layout, destination: Layout) -> None:
    """Move every element by the plan; assert that each arrives once and is the right one."""
    whole = [np.arange(int(np.prod(s.shape, dtype=int))).reshape(s.shape) for s in destination.tensors]

    def part(array: np.ndarray, outer: Box, inner: Box) -> np.ndarray:
        spans = zip(outer.offset, inner.offset, inner.size, strict=True)
        return array[(..., *(slice(b - o, b - o + n) for o, b, n in spans))]

    def origin(shape: tuple[int, ...]) -> Box:
        return Box(offset=(0,) * len(shape), size=shape)

    held = [[part(whole[s.tensor], origin(whole[s.tensor].shape), s.box) for s in rank.shards] for rank in source.ranks]
    got = [[np.full(s.box.size, -1) for s in rank.shards] for rank in destination.ranks]
    for bucket in plan.buckets:
        for move in bucket.transfers:
            sent = source.ranks[bucket.source_rank].shards[move.source_shard]
            into = destination.ranks[bucket.destination_rank].shards[move.destination_shard]
            target = got[bucket.destination_rank][move.destination_shard]
            spot = part(target, into.box, move.box)
            assert (spot == -1).all(), "an element was delivered twice"
            spot[...] = part(held[bucket.source_rank][move.source_shard], sent.box, move.box)
    for rank, arrays in zip(destination.ranks, got, strict=True):
        for wanted, array in zip(rank.shards, arrays, strict=True):
            np.testing.assert_array_equal(
                array, part(whole[wanted.tensor], origin(whole[wanted.tensor].shape), wanted.box)
            )


@given(pairs(), st.integers(64, 400))
@examples(100)
def test_every_destination_element_arrives_once(pair: tuple[Layout, Layout], bucket_bytes: int) -> None:
    source, destination = pair
    plan = make_plan(source, destination, bucket_bytes=bucket_bytes)
    carry_out(plan, source, destination)
    needed = [[piece.size_bytes for piece in pieces_of(destination, rank)] for rank in range(len(destination.ranks))]
    assert plan.total_bytes == sum(map(sum, needed))
    pieces = {rank: pieces_of(source, rank) for rank in range(len(source.ranks))}
    for rank, sizes in enumerate(needed):
        check_plan(plan, pieces, destination, rank)
        buckets = plan.of_destination(rank)
        assert all(0 < bucket.extent_bytes <= bucket_bytes for bucket in buckets)
        assert plan.peak_staging_bytes >= sum(map(aligned, sizes)) + max((b.extent_bytes for b in buckets), default=0)


@given(pairs())
@examples(50)
def test_plans_are_deterministic_and_serialisable(pair: tuple[Layout, Layout]) -> None:
    source, destination = pair
    plan = make_plan(source, destination, bucket_bytes=256)
    again = make_plan(decode_layout(encode(source)), decode_layout(encode(destination)), bucket_bytes=256)
    assert encode(plan) == encode(again)
    assert decode_plan(encode(plan)) == plan


def shifted(move: Transfer) -> tuple[Transfer, ...]:
    offset = (move.box.offset[0] + 1, *move.box.offset[1:])
    return (msgspec.structs.replace(move, box=Box(offset=offset, size=move.box.size)),)


def shortened(move: Transfer) -> tuple[Transfer, ...]:
    size = (move.box.size[0] - 1, *move.box.size[1:])
    return (msgspec.structs.replace(move, box=Box(offset=move.box.offset, size=size)),)


MUTATIONS: dict[str, Callable[[Transfer], tuple[Transfer, ...]]] = {
    "dropped": lambda move: (),
    "doubled": lambda move: (move, move),
    "shifted": shifted,
    "shortened": shortened,
    "other source": lambda move: (msgspec.structs.replace(move, source_shard=move.source_shard + 1),),
    "other destination": lambda move: (msgspec.structs.replace(move, destination_shard=move.destination_shard + 1),),
    "negative shard": lambda move: (msgspec.structs.replace(move, source_shard=-1),),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("mutation", MUTATIONS)
@given(pairs(), st.data())
@examples(40)
def test_mutated_plan_is_detected(mutation: str, pair: tuple[Layout, Layout], data: st.DataObject) -> None:
    source, destination = pair
    plan = make_plan(source, destination, bucket_bytes=128)
    spots = [
        (b, t) for b, bucket in enumerate(plan.buckets) for t, move in enumerate(bucket.transfers) if move.box.size
    ]
    if not spots:
        return
    at, index = data.draw(st.sampled_from(spots))
    bucket: Bucket = plan.buckets[at]
    moves = (*bucket.transfers[:index], *MUTATIONS[mutation](bucket.transfers[index]), *bucket.transfers[index + 1 :])
    buckets = list(plan.buckets)
    buckets[at] = msgspec.structs.replace(bucket, transfers=moves)
    mine = [other for other in buckets if other.destination_rank == bucket.destination_rank]
    pieces = {rank: pieces_of(source, rank) for rank in range(len(source.ranks))}
    with pytest.raises(WeightsError):
        check_buckets(mine, pieces, destination, bucket.destination_rank, names=(plan.source, plan.destination))


def whole(name: str, shape: tuple[int, ...], *, dtype: str = "float32", rows: tuple[int, ...] = ()) -> Layout:
    """One tensor, its rows split among as many ranks as `rows` has entries, or whole on one rank."""
    spec = TensorSpec(name="w", shape=shape, dtype=dtype)
    begins = list(itertools.accumulate(rows, initial=0)) if rows else [0, shape[0]]
    ranks = tuple(
        RankLayout(place=Place(), shards=(shard(0, Box(offset=(a, 0), size=(b - a, shape[1]))),))
        for a, b in itertools.pairwise(begins)
    )
    return Layout(replica=name, tensors=(spec,), ranks=ranks)


def test_missing_bytes_are_named() -> None:
    with pytest.raises(WeightsError, match=r"Tensor w: no rank of policy-0 holds box \[4:6, 0:3\]"):
        make_plan(whole("policy-0", (6, 3), rows=(2, 2)), whole("rollout-0", (6, 3)))


def test_overlapping_source_boxes_are_named() -> None:
    source = whole("policy-0", (6, 3), rows=(3, 3))
    overlapping = RankLayout(place=Place(), shards=(shard(0, Box(offset=(2, 0), size=(2, 3))),))
    source = msgspec.structs.replace(source, ranks=(*source.ranks, overlapping))
    with pytest.raises(WeightsError, match=r"Tensor w: box \[2:3, 0:3\] lies in two different shards of policy-0"):
        make_plan(source, whole("rollout-0", (6, 3)))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (whole("rollout-0", (6, 4)), r"w is float32 \(6, 4\) in rollout-0 but float32 \(6, 3\) in policy-0"),
        (whole("rollout-0", (6, 3), dtype="bfloat16"), "w is bfloat16 .* but float32"),
    ],
)
def test_tensors_of_different_shape_or_type_are_named(other: Layout, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        make_plan(whole("policy-0", (6, 3)), other)


def test_unknown_tensor_is_named() -> None:
    source = msgspec.structs.replace(
        whole("policy-0", (6, 3)), tensors=(TensorSpec(name="v", shape=(6, 3), dtype="float32"),)
    )
    with pytest.raises(WeightsError, match="Tensor w of rollout-0 is unknown to policy-0"):
        make_plan(source, whole("rollout-0", (6, 3)))


def test_the_nearest_source_serves_then_the_least_busy() -> None:
    specs = tuple(TensorSpec(name=f"t{i}", shape=(8,), dtype="float32") for i in range(4))
    shards = tuple(shard(i, Box(offset=(0,), size=(8,))) for i in range(4))
    far, near, nearer = Place(host="b"), Place(host="a", device="cuda:1"), Place(host="a", device="cuda:0")

    def sent(*places: Place) -> list[int]:
        source = Layout(replica="p", tensors=specs, ranks=tuple(RankLayout(place=p, shards=shards) for p in places))
        destination = Layout(replica="r", tensors=specs, ranks=(RankLayout(place=nearer, shards=shards),))
        buckets = make_plan(source, destination).buckets
        return [sum(b.size_bytes for b in buckets if b.source_rank == rank) // 32 for rank in range(len(places))]

    assert sent(far, near, nearer) == [0, 0, 4]
    assert sent(far, near, far) == [0, 4, 0]
    assert sent(near, far, near) == [2, 0, 2]
    assert sent(far, Place(), far, far) == [1, 1, 1, 1]


def tied(name: str, owner: str, other: str | None, *, same: bool) -> Layout:
    specs = [TensorSpec(name=owner, shape=(4,), dtype="float32")]
    shards = [shard(0, Box(offset=(0,), size=(4,)))]
    if other is not None:
        specs.append(TensorSpec(name=other, shape=(4,), dtype="float32", same_as=owner if same else ""))
        if not same:
            shards.append(shard(1, Box(offset=(0,), size=(4,))))
    return Layout(replica=name, tensors=tuple(specs), ranks=(RankLayout(place=Place(), shards=tuple(shards)),))


@pytest.mark.parametrize(
    ("source", "destination", "num_bytes"),
    [
        (tied("p", "embed", "head", same=True), tied("r", "embed", "head", same=True), 16),
        (tied("p", "embed", "head", same=True), tied("r", "head", "embed", same=True), 16),
        (tied("p", "embed", "head", same=True), tied("r", "embed", "head", same=False), 32),
        (tied("p", "embed", "head", same=True), tied("r", "head", None, same=False), 16),
        (tied("p", "embed", None, same=False), tied("r", "head", "embed", same=True), 16),
        (tied("p", "embed", "head", same=False), tied("r", "head", None, same=False), 16),
    ],
)
def test_either_name_of_tied_tensors_is_delivered(source: Layout, destination: Layout, num_bytes: int) -> None:
    plan = make_plan(source, destination)
    check_plan(plan, {0: pieces_of(source, 0)}, destination, 0)
    assert plan.total_bytes == num_bytes


def test_two_source_tensors_cannot_fill_one_memory() -> None:
    with pytest.raises(WeightsError, match="embed and head in one memory"):
        make_plan(tied("p", "embed", "head", same=False), tied("r", "embed", "head", same=True))


@pytest.mark.parametrize("bucket_bytes", [0, 63, (1 << 30) + 1])
def test_buckets_are_bounded(bucket_bytes: int) -> None:
    with pytest.raises(WeightsError, match=f"bucket_bytes is {bucket_bytes}, expected 64 to"):
        make_plan(whole("p", (2, 2)), whole("r", (2, 2)), bucket_bytes=bucket_bytes)


def broken(**changes: object) -> Layout:
    layout = whole("policy-0", (6, 3))
    return msgspec.structs.replace(layout, **changes)


def with_shard(**changes: object) -> Layout:
    changed = msgspec.structs.replace(shard(0, Box(offset=(0, 0), size=(6, 3))), **changes)
    return broken(ranks=(RankLayout(place=Place(), shards=(changed,)),))


def with_box_of_one(stride: int) -> Layout:
    return with_shard(box=Box(offset=(0, 0), size=(1, 1)), strides=(stride, 1))


def one_rank(shape: tuple[int, ...], num: int = 1) -> Layout:
    """Return a layout of one rank that holds a float32 tensor `num` times."""
    held = (shard(0, Box(offset=(0,) * len(shape), size=shape)),) * num
    spec = TensorSpec(name="w", shape=shape, dtype="float32")
    return Layout(replica="r", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=held),))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (broken(tensors=(TensorSpec(name="w", shape=(6, 3), dtype="float32"),) * 2), "twice"),
        (broken(tensors=(TensorSpec(name="w", shape=(6, 3), dtype="float33"),)), "element type float33"),
        (broken(tensors=(TensorSpec(name="w", shape=(-6, 3), dtype="float32"),)), "negative shape"),
        (broken(tensors=(TensorSpec(name="w", shape=(6, 3), dtype="float32", same_as="x"),)), "tied to x"),
        (with_shard(tensor=1), "names tensor 1 of 1"),
        (with_shard(box=Box(offset=(1, 0), size=(6, 3))), "leaves shape"),
        (with_shard(box=Box(offset=(0,), size=(6,))), "does not fit"),
        (with_shard(box=Box(offset=(0, 0), size=(6,))), r"box of offset \(0, 0\) and size \(6,\) does not fit"),
        (with_shard(box=Box(offset=(), size=(6, 3))), "does not fit"),
        (with_shard(box=Box(offset=(0, 0), size=(6, 3)), strides=(1,)), "does not fit"),
        (with_shard(offset_bytes=2), "negative or broken offset"),
        (with_shard(strides=(-3, 1)), "negative or broken offset"),
        (one_rank((1 << 63,)), r"has shape \(9223372036854775808,\), expected at most"),
        (one_rank((1 << 62, 1 << 62)), "expected at most 281474976710656 bytes"),
        (one_rank((1 << 62, 1 << 62, 0)), "expected at most 281474976710656 bytes"),
        (one_rank((1,) * 33), "has 33 dims, expected at most 32"),
        (with_shard(offset_bytes=1 << 62), "ends beyond 281474976710656 bytes"),
        (with_shard(strides=(1 << 62, 1)), "ends beyond 281474976710656 bytes"),
        (with_box_of_one(stride=1 << 63), "ends beyond 281474976710656 bytes"),
        (one_rank((1 << 46,), 257), "have 72339069014638592 bytes in all, expected at most"),
    ],
)
@pytest.mark.parametrize("few", [0, FEW_SHARDS], ids=["by columns", "one by one"])
def test_invalid_layout_is_refused(layout: Layout, sentence: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "FEW_SHARDS", few)
    with pytest.raises(WeightsError, match=sentence):
        decode_layout(encode(layout))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", encode(HOSTS[0])])
def test_garbage_is_not_a_layout(data: bytes) -> None:
    with pytest.raises(WeightsError, match="not a Layout"):
        decode_layout(data)


TENSOR = {"name": "w", "shape": [], "dtype": "bool"}
DEEP = msgspec.Raw(b"\x91" * 200_000 + b"\xc0")


@pytest.mark.parametrize(
    "content",
    [
        {"replica": "r", "tensors": [], "ranks": [], "new": DEEP},
        {"replica": "r", "tensors": [{**TENSOR, "new": DEEP}], "ranks": []},
        {"replica": "r", "tensors": [], "ranks": [{"place": {"new": DEEP}, "shards": []}]},
    ],
    ids=["layout", "tensor", "rank"],
)
def test_deeply_nested_layout_is_refused(content: dict[str, object]) -> None:
    """A decoder passes over unknown keys, in as many calls as their values have levels."""
    with pytest.raises(WeightsError, match=r"not a (Layout|RankLayout): maximum recursion depth"):
        decode_layout(msgspec.msgpack.encode(content))


boxes_in_8 = st.tuples(st.integers(0, 7), st.integers(1, 8)).map(lambda s: (s[0], min(s[1], 8 - s[0])))


@st.composite
def small_boxes(draw: st.DrawFn) -> Box:
    sides = [draw(boxes_in_8) for _ in range(2)]
    return Box(offset=tuple(a for a, _ in sides), size=tuple(n for _, n in sides))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.offset, box.size, strict=True))))


@given(small_boxes(), small_boxes())
def test_intersection_agrees_with_element_sets(a: Box, b: Box) -> None:
    shared = intersection(a, b)
    assert (cells(shared) if shared else set()) == cells(a) & cells(b)
    assert contains(a, b) == (cells(b) <= cells(a))


@given(small_boxes(), st.integers(1, 20))
def test_cut_parts_cover_the_box(box: Box, limit: int) -> None:
    parts = list(cut(box, limit))
    assert sorted(cell for part in parts for cell in cells(part)) == sorted(cells(box))
    assert max(part.volume for part in parts) <= limit


@given(small_boxes(), st.lists(small_boxes(), max_size=6))
def test_first_gap_is_uncovered(box: Box, covers: list[Box]) -> None:
    open_cells = cells(box).difference(*map(cells, covers))
    gap = first_gap(box, covers)
    assert (gap is None) == (not open_cells)
    assert gap is None or cells(gap) <= open_cells


def corners(boxes: list[Box]) -> tuple[np.ndarray, np.ndarray]:
    begin = np.array([box.offset for box in boxes])
    return begin, begin + np.array([box.size for box in boxes])


@given(st.lists(small_boxes(), min_size=1, max_size=12, unique=True), small_boxes())
def test_sweep_agrees_with_comparing_all_pairs(boxes: list[Box], box: Box) -> None:
    index = BoxIndex(boxes)
    assert {index.boxes[i]: shared for i, shared in index.intersecting(box)} == {
        other: shared for other in boxes if (shared := intersection(other, box))
    }
    begin, end = corners(boxes)
    pairs = [(i, j) for i, j in itertools.product(range(len(boxes)), repeat=2) if cells(boxes[i]) & cells(boxes[j])]
    assert (
        list(zip(*(found.tolist() for found in intersecting_pairs(begin, end, begin, end, PairBudget())), strict=True))
        == pairs
    )
    overlap = first_overlap(begin, end)
    assert overlap in pairs if overlap else all(i == j for i, j in pairs)
    apart = np.arange(len(boxes))
    assert first_overlap(begin, end, apart) is None


def test_item_sizes_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES


# --- layouts of peers -------------------------------------------------------------------------------------------------


def ranks_of(num: int, num_boxes: int) -> bytes:
    """Return an encoded layout with `num` ranks that hold the same scalar `num_boxes` times."""
    scalar = shard(0, Box(offset=(), size=()))
    held = RankLayout(place=Place(), shards=(scalar,) * num_boxes)
    tensors = (TensorSpec(name="t", shape=(), dtype="int8"),)
    return encode(Layout(replica="r", tensors=tensors, ranks=(held,) * num))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (ranks_of(4, MAX_LAYOUT_BOXES // 4 + 1), f"A layout has {MAX_LAYOUT_BOXES + 4} boxes or more"),
        (ranks_of(1, MAX_LAYOUT_BOXES + 1), f"length <= {MAX_LAYOUT_BOXES} - at `$.shards`"),
        (ranks_of(MAX_LAYOUT_RANKS + 1, 0), f"length <= {MAX_LAYOUT_RANKS} - at `$.ranks`"),
        (
            msgspec.msgpack.encode({"replica": "r", "tensors": [0] * (MAX_LAYOUT_TENSORS + 1), "ranks": []}),
            f"length <= {MAX_LAYOUT_TENSORS} - at `$.tensors`",
        ),
        (encode(Layout(replica="r" * (MAX_OTHER_BYTES + 1), tensors=(), ranks=())), "bytes besides its tensors and"),
    ],
    ids=["boxes", "boxes of a rank", "ranks", "tensors", "other"],
)
def test_layout_of_too_many_parts_is_not_decoded(data: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part would become several objects: 38 MiB of boxes took 18 s. An object for each to count them is too much,
    too: 8 MiB of bytes took 640 MiB."""
    decoded: list[object] = []
    monkeypatch.setattr(layout_module, "check_layout", decoded.append)
    with pytest.raises(WeightsError, match=re.escape(complaint)):
        decode_layout(data)
    assert not decoded


def test_layout_of_many_parts_is_decoded() -> None:
    assert len(decode_layout(ranks_of(64, 500)).ranks) == 64


def test_layout_has_no_more_boxes_than_a_model_of_its_size_can_be_split_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "FREE_BOXES", 8)
    monkeypatch.setattr(layout_module, "BYTES_PER_BOX", 16)
    monkeypatch.setattr(layout_module, "BOXES_PER_TENSOR", 0)
    assert decode_layout(encode(strips("r", 1 << 12, 0))), "16 MiB"
    assert decode_layout(ranks_of(2, 4)), "a byte"
    with pytest.raises(WeightsError, match=r"has 9 boxes or more, expected at most 8 of a model of its size"):
        decode_layout(ranks_of(3, 3))
    with pytest.raises(WeightsError, match=r"has 9 boxes or more, expected at most 8\."):
        decode_layout(encode(strips("r", 9, 0)), model=())


def test_check_of_boxes_looks_at_their_tensors_only() -> None:
    """With boxes of 33 numbers of dims, 262,144 tensors took 7 s."""
    shapes: Any = {0: (), 1: (), 2: (4,)}  # and none of the other tensors
    shards = [
        shard(0, Box(offset=(), size=())),
        shard(1, Box(offset=(), size=())),
        shard(2, Box(offset=(1,), size=(3,))),
        shard(2, Box(offset=(2,), size=(3,))),
    ]
    found: list[int] = []
    for columns in shard_columns(shards, dims_of(shards, [0, 0, 1, *[2] * 100])):
        found += columns.unsound(shapes, np.ones(103, np.int64), 1 << 20).tolist()
    assert found == [3]


def strips(replica: str, num: int, dim: int, num_tensors: int = 1) -> Layout:
    """Return a layout of one rank with each tensor cut into `num` strips along `dim`; each in a different way."""
    length = 1 << 12
    shards = []
    for tensor in range(num_tensors):
        cuts = [part * length // num + (tensor if 0 < part < num else 0) for part in range(num + 1)]
        for begin, end in itertools.pairwise(cuts):
            offset, size = [0, 0], [length, length]
            offset[dim], size[dim] = begin, end - begin
            shards.append(shard(tensor, Box(offset=tuple(offset), size=tuple(size))))
    specs = tuple(TensorSpec(name=f"t{n}", shape=(length, length), dtype="int8") for n in range(num_tensors))
    return Layout(replica=replica, tensors=specs, ranks=(RankLayout(place=Place(), shards=tuple(shards)),))


def test_layouts_whose_boxes_all_cross_each_other_are_refused() -> None:
    """A planner that went on would take a minute, and gigabytes."""
    with pytest.raises(WeightsError, match="boxes of the two layouts cross each other 16781312 times or more"):
        make_plan(strips("a", 4096, 0), strips("b", 4096, 1))
    assert make_plan(strips("a", 256, 0), strips("b", 256, 1)).total_bytes == 1 << 24


def test_layouts_that_split_each_tensor_in_another_way_are_refused() -> None:
    source, destination = strips("a", 1, 0, MAX_CLASSES + 1), strips("b", 2, 0, MAX_CLASSES + 1)
    with pytest.raises(WeightsError, match=f"split tensors in {MAX_CLASSES + 1} different ways, expected at most"):
        make_plan(source, destination)


def test_layout_of_many_ranks_and_splits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = strips("a", 1, 0, 3), strips("b", 2, 0, 3)
    monkeypatch.setattr(planner_module, "MAX_DESTINATION_COUNTS", 2)
    with pytest.raises(WeightsError, match="b splits its tensors in 3 ways over 1 ranks"):
        make_plan(source, destination)
    assert make_plan(destination, source)
    monkeypatch.setattr(planner_module, "MAX_COUNTS", 2)
    with pytest.raises(WeightsError, match="b splits its tensors in 3 ways over 1 ranks"):
        make_plan(destination, source)


def overlapping(num: int) -> bytes:
    """Return a layout with `num` distinct boxes that each hold nearly a whole tensor of 1,000 elements."""
    boxes = [Box(offset=(number,), size=(900,)) for number in range(num)]
    shards = tuple(Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1,)) for box in (*boxes, boxes[0]))
    spec = TensorSpec(name="w", shape=(1000,), dtype="float32")
    return encode(Layout(replica="rollout-0", tensors=(spec,), ranks=(RankLayout(place=Place(), shards=shards),)))


def test_layout_whose_boxes_hold_the_model_many_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy would digest each of them at each version."""
    monkeypatch.setattr(layout_module, "FREE_BYTES", 0)
    assert len(decode_layout(overlapping(4)).ranks[0].shards) == 5, "copies count once"
    with pytest.raises(WeightsError, match="The distinct boxes of rollout-0 take as long to digest as 18000 bytes"):
        decode_layout(overlapping(5))


def columns_of(num: int, width: int, num_copies: int = 1, dtype: str = "bfloat16") -> bytes:
    """Return a layout of `num_copies` ranks that each hold a tensor of 256 rows in `num` boxes of `width` columns."""
    boxes = [Box(offset=(0, number * width), size=(256, width)) for number in range(num)]
    shards = tuple(Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(width, 1)) for box in boxes)
    spec = TensorSpec(name="w", shape=(256, num * width), dtype=dtype)
    ranks = (RankLayout(place=Place(), shards=shards),) * num_copies
    return encode(Layout(replica="rollout-0", tensors=(spec,), ranks=ranks))


def test_layout_of_many_short_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy digests a short row in the time of a longer one: a layout of columns took it minutes."""
    monkeypatch.setattr(layout_module, "FREE_BYTES", 0)
    short = MIN_RUN_BYTES // 2 // MAX_OVERLAP
    assert decode_layout(columns_of(64, short))
    assert decode_layout(columns_of(1, 1)), "rows without gaps"
    complaint = f"take as long to digest as {256 * 64 * MIN_RUN_BYTES} bytes, and the model has {256 * 64 * 2}"
    with pytest.raises(WeightsError, match=complaint):
        decode_layout(columns_of(64, 1))
    monkeypatch.undo()
    assert decode_layout(columns_of(64, 1)), "a small model"


def test_layout_of_many_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket would allow it to read as many."""
    monkeypatch.setattr(layout_module, "FREE_BYTES", 0)
    assert decode_layout(columns_of(40, 512, MAX_COPIES))
    with pytest.raises(WeightsError, match=r"The shards of rollout-0 have 89128960 bytes in all, .* at most 16 times"):
        decode_layout(columns_of(20, 512, MAX_COPIES + 1))


def with_tensor(data: bytes, name: str, *boxes: Box) -> bytes:
    """Return a layout with one more tensor, a very large one, of which the first rank has `boxes`."""
    layout = decode(Layout, data)
    spec = TensorSpec(name=name, shape=(1 << 40,), dtype="uint8")
    shards = tuple(shard(len(layout.tensors), box) for box in boxes)
    first = msgspec.structs.replace(layout.ranks[0], shards=(*layout.ranks[0].shards, *shards))
    ranks = (first, *layout.ranks[1:])
    return encode(msgspec.structs.replace(layout, tensors=(*layout.tensors, spec), ranks=ranks))


@pytest.mark.parametrize("boxes", [(), (Box(offset=(0,), size=(0,)),), (Box(offset=(7,), size=(1,)),)])
def test_tensor_with_hardly_any_boxes_allows_no_more_copies_or_overlaps(
    boxes: tuple[Box, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout may name any tensors; one that nobody has would make the model as large as a peer likes."""
    monkeypatch.setattr(layout_module, "FREE_BYTES", 0)
    assert decode_layout(with_tensor(columns_of(40, 512, MAX_COPIES - 1), "phantom", *boxes))
    with pytest.raises(WeightsError, match="bytes in all, and the model has"):
        decode_layout(with_tensor(columns_of(20, 512, MAX_COPIES + 1), "phantom", *boxes))
    with pytest.raises(WeightsError, match="take as long to digest as"):
        decode_layout(with_tensor(overlapping(5), "phantom", *boxes))


def test_layout_has_no_more_copies_or_overlaps_than_the_model_that_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "FREE_BYTES", 0)
    whole = Box(offset=(0,), size=(1 << 40,))
    for data in (columns_of(20, 512, MAX_COPIES + 1), overlapping(5)):
        data = with_tensor(data, "phantom", whole)
        assert decode_layout(data)
        with pytest.raises(WeightsError, match="expected at most"):
            decode_layout(data, decode(Layout, data).tensors[:1])


@pytest.mark.parametrize(
    ("num_ranks", "num_rails", "complaint"),
    [
        (1, MAX_RANK_RAILS + 1, f"Rank 0 of r names {MAX_RANK_RAILS + 1} rails"),
        (MAX_LAYOUT_RAILS // MAX_RANK_RAILS + 1, MAX_RANK_RAILS, f"names {MAX_LAYOUT_RAILS + MAX_RANK_RAILS} rails"),
    ],
)
def test_layout_with_more_rails_than_a_cluster_has_is_refused(num_ranks: int, num_rails: int, complaint: str) -> None:
    """The controller compares the rails of each rank with those of each other."""

    def encoded(rails: Callable[[int], Iterable[str]]) -> bytes:
        ranks = [RankLayout(place=Place(rails=tuple(rails(rank))), shards=()) for rank in range(num_ranks)]
        return encode(Layout(replica="r", tensors=(), ranks=tuple(ranks)))

    assert decode_layout(encoded(lambda _: map(str, range(MAX_RANK_RAILS))))
    with pytest.raises(WeightsError, match=complaint):
        decode_layout(encoded(lambda rank: (f"{rank}.{rail}" for rail in range(num_rails))))


def test_plan_counts_each_box_that_it_moves_and_the_distinct_ones() -> None:
    source = decode_layout(columns_of(1, 512))
    plan = make_plan(source, decode_layout(columns_of(4, 128, 3)))
    assert (plan.num_boxes, plan.total_bytes) == (12, 3 * 512 * 512)
    assert (plan.num_distinct_boxes, plan.distinct_bytes) == (4, 512 * 512)

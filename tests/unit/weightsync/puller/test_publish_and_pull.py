"""Snapshots, layouts of modules, and several ranks, in one process."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from typing import cast

import msgspec
import pytest
import torch
from transport_peers import local_offer, needs_nixl, proof_for, served_transports
from weights_peers import blank, same, weights

from starling.common.errors import WeightsError
from starling.weightsync.costs.estimate import PAGE_BYTES
from starling.weightsync.memory.arena import Arena, ArenaMapping
from starling.weightsync.memory.huge_pages import HUGE_BYTES
from starling.weightsync.offers.offer import Offer, Transport, decode_offer, make_offer
from starling.weightsync.plan.layout import (
    Box,
    Layout,
    Place,
    RankLayout,
    Shard,
    ShardPiece,
    TensorSpec,
    decode_layout,
    encode,
)
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

torch.set_num_threads(1)
DEADLINE_S = 30.0
PIECES = (ShardPiece(names=("a",), dtype="uint8", box=Box(offset=(0,), size=(64,))),)


def test_tied_tensors_are_published_under_both_names() -> None:
    tensors = weights(0)
    layout = decode_layout(encode(layout_of(tensors, "policy-0")))
    assert [(spec.name, spec.same_as) for spec in layout.tensors if spec.same_as] == [("head", "embed")]
    assert "head" not in {layout.tensors[shard.tensor].name for shard in layout.ranks[0].shards}
    untied = layout_of(blank(), "rollout-0")
    assert not any(spec.same_as for spec in untied.tensors)


def test_layout_of_accepts_a_state_dict() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False), torch.nn.BatchNorm1d(5))
    module[1].weight = module[0].weight
    layout = layout_of(module.state_dict(), "policy-0", Place(host="h"))
    names = {spec.name: spec.same_as for spec in layout.tensors}
    assert names["1.weight"] == "0.weight"
    assert {"2.running_mean", "2.num_batches_tracked"} <= names.keys()


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, device="meta"), torch.eye(3).to_sparse(), torch.zeros(2).to(torch.cdouble)]
)
def test_layout_of_refuses_tensors_without_dense_memory(tensor: torch.Tensor) -> None:
    with pytest.raises(WeightsError, match="Tensor w"):
        layout_of({"w": tensor}, "policy-0")


def test_publisher_refuses_a_version_that_does_not_grow() -> None:
    tensors = weights(0)
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        publisher.publish(3, tensors)
        with pytest.raises(WeightsError, match="Version 3 cannot follow version 3"):
            publisher.publish(3, tensors)
    with pytest.raises(WeightsError, match="closed"):
        publisher.publish(4, tensors)
    publisher.close()


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("odd", None, "odd of policy-0 is in the layout but was not given"),
        ("odd", torch.zeros(7, 13, 11, dtype=torch.float64), "odd is torch.float64 but float32"),
        ("odd", torch.zeros(3), "does not fit tensor odd of shape"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_named(name: str, tensor: torch.Tensor | None, sentence: str) -> None:
    tensors = weights(0)
    with Publisher(layout_of(tensors, "policy-0"), transport="local") as publisher:
        publisher.publish(0, tensors)
        changed = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(WeightsError, match=sentence):
            publisher.publish(1, changed if tensor is None else {**changed, name: tensor})
        publisher.publish(1, tensors)


def test_leased_snapshot_is_revoked_only_after_the_timeout() -> None:
    arena = Arena(PIECES)
    first, secret = arena.commit(arena.claim(0.0))
    reader, other = ArenaMapping(arena.address), ArenaMapping(arena.address)
    with pytest.raises(WeightsError, match="wrong"):
        reader.open(first, "")
    memory = reader.open(first, proof_for(local_offer(first, secret)))
    assert not memory.flags.writeable
    begin = PAGE_BYTES + arena.slots[first & 1].ctypes.data - arena.slots[0].ctypes.data
    assert (memory.ctypes.data - begin) % HUGE_BYTES == 0
    second, secret = arena.commit(arena.claim(0.0))
    third, _ = arena.commit(arena.claim(0.0))  # the newer slot: the older one is being read
    assert second & 1 == third & 1 != first & 1
    assert reader.valid()
    with pytest.raises(WeightsError, match="is gone"):
        other.open(second, proof_for(local_offer(second, secret)))
    arena.claim(0.0)
    assert reader.valid()
    arena.close()
    assert not reader.valid()
    reader.close()
    other.close()


def test_arena_close_is_idempotent() -> None:
    arena = Arena(PIECES)
    arena.close()
    ends = os.pipe()  # the lowest free descriptors: the arena's is among them
    arena.close()
    assert os.write(ends[1], b"x") == len(os.read(ends[0], 1))
    for end in ends:
        os.close(end)


def test_claim_with_both_slots_leased_revokes_the_older() -> None:
    arena = Arena(PIECES)
    readers = []
    for _ in range(2):
        snapshot, secret = arena.commit(arena.claim(0.0))
        readers.append(ArenaMapping(arena.address))
        readers[-1].open(snapshot, proof_for(local_offer(snapshot, secret)))
    arena.commit(arena.claim(0.0))
    assert [reader.valid() for reader in readers] == [False, True]
    readers[1].release()
    arena.claim(0.0)
    arena.close()
    for reader in readers:
        reader.close()


@pytest.mark.parametrize("address", ["/etc/passwd", "/proc/self/fd/0", "/proc/1/fd/../../../etc/passwd", ""])
def test_mapping_refuses_other_addresses(address: str) -> None:
    with pytest.raises(WeightsError, match="not the address of an arena"):
        ArenaMapping(address)


def test_mapping_refuses_other_files() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # as an arena has it
    try:
        with pytest.raises(WeightsError, match="not an arena of this version"):
            ArenaMapping(f"/proc/{os.getpid()}/fd/{fd}")
    finally:
        os.close(fd)


def split(layout: Layout, parts: list[list[tuple[str, Box]]]) -> Layout:
    """Spread the tensors of a one-rank layout over ranks that hold boxes of the same storages."""
    shards = {layout.tensors[shard.tensor].name: shard for shard in layout.ranks[0].shards}
    ranks = []
    for part in parts:
        held = []
        for name, box in part:
            whole = shards[name]
            item = getattr(torch, layout.tensors[whole.tensor].dtype).itemsize
            start = sum(o * s for o, s in zip(box.offset, whole.strides, strict=True)) * item
            held.append(msgspec.structs.replace(whole, box=box, offset_bytes=start))
        ranks.append(RankLayout(place=layout.ranks[0].place, shards=tuple(held)))
    return msgspec.structs.replace(layout, ranks=tuple(ranks))


def box(*spans: tuple[int, int]) -> Box:
    return Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))


@pytest.mark.parametrize("transport", ["local", "ucx", "tcp", "gloo", pytest.param("nixl", marks=needs_nixl)])
def test_puller_assembles_tensors_from_two_ranks(transport: Transport) -> None:
    if transport == "ucx":
        pytest.importorskip("ucxx")
    tensors = {"a": torch.randn(37, 19), "b": torch.randn(12, 10).to(torch.bfloat16).t(), "c": torch.arange(9)}
    layout = split(
        layout_of(tensors, "policy-0"),
        [
            [("a", box((0, 37), (0, 7))), ("b", box((0, 3), (0, 12))), ("c", box((0, 9)))],
            [("b", box((3, 10), (0, 12))), ("a", box((0, 37), (7, 19))), ("c", box((0, 9)))],
        ],
    )
    publishers = [Publisher(layout, transport=transport, rank=rank) for rank in range(2)]
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    mine = layout_of(live, "rollout-0")
    plan = make_plan(layout, mine, bucket_bytes=1024)
    puller = Puller(mine)
    try:
        for version in range(2):
            tensors["c"] += version
            offers = [publisher.publish(version, tensors) for publisher in publishers]
            offer = decode_offer(encode(make_offer(version, [rank for each in offers for rank in each.ranks])))
            puller.pull(offer, plan, deadline_s=DEADLINE_S)
            puller.switch(live)
            assert same(live, tensors)
            assert puller.attest(live, offer) == offer.root
    finally:
        puller.close()
        for publisher in publishers:
            publisher.close()


def test_rank_may_hold_several_boxes_of_a_tensor_or_none() -> None:
    tensors = {"w": torch.arange(48, dtype=torch.bfloat16).view(6, 8)}
    whole = layout_of(tensors, "policy-0")
    source = split(whole, [[("w", box((0, 2), (0, 8))), ("w", box((4, 6), (0, 8)))], [("w", box((2, 4), (0, 8)))]])
    mine = split(whole, [[("w", box((0, 6), (0, 8)))], [("w", box((6, 6), (0, 8)))]])
    publishers = [Publisher(source, transport="local", rank=rank) for rank in range(2)]
    pullers = [Puller(mine, rank=rank) for rank in range(2)]
    live = [{"w": torch.zeros(6, 8, dtype=torch.bfloat16)} for _ in pullers]
    try:
        offer = make_offer(0, [publisher.publish(0, tensors).ranks[0] for publisher in publishers])
        for puller, held in zip(pullers, live, strict=True):
            puller.pull(offer, make_plan(source, mine), deadline_s=DEADLINE_S)
            puller.switch(held)
            assert puller.attest(held, offer) == offer.root
    finally:
        for each in (*publishers, *pullers):
            each.close()
    assert same(live[0], tensors)
    assert not live[1]["w"].any()


def test_diverged_copies_cannot_be_offered_together() -> None:
    tensors = {"c": torch.arange(9)}
    layout = split(layout_of(tensors, "policy-0"), [[("c", box((0, 9)))], [("c", box((0, 9)))]])
    with Publisher(layout, transport="local") as one, Publisher(layout, transport="local", rank=1) as two:
        offers = [one.publish(0, tensors), two.publish(0, {"c": torch.arange(9) + 1})]
    with pytest.raises(WeightsError, match=r"Ranks 0 and 1 of version 0 hold the same boxes, but other bits in them"):
        make_offer(0, [rank for each in offers for rank in each.ranks])


def adopt_from(tensors: dict[str, torch.Tensor], live: dict[str, torch.Tensor], mine: Layout) -> tuple[Puller, Offer]:
    layout = layout_of(tensors, "policy-0")
    puller = Puller(mine)
    with Publisher(layout, transport="local") as publisher:
        offer = publisher.publish(0, tensors)
        puller.pull(offer, make_plan(layout, mine), deadline_s=DEADLINE_S)
        puller.switch(live)
    return puller, offer


def test_fused_parameter_is_filled_from_several_tensors() -> None:
    tensors = {"q": torch.randn(6, 5), "k": torch.randn(2, 5), "extra": torch.randn(3)}
    specs = tuple(TensorSpec(name=name, shape=tuple(tensors[name].shape), dtype="float32") for name in ("q", "k"))
    shards = (
        Shard(tensor=0, box=box((0, 6), (0, 5)), storage="qk", offset_bytes=0, strides=(5, 1)),
        Shard(tensor=1, box=box((0, 2), (0, 5)), storage="qk", offset_bytes=120, strides=(5, 1)),
    )
    mine = Layout(replica="r", tensors=specs, ranks=(RankLayout(place=Place(), shards=shards),))
    live = {"qk": torch.zeros(8, 5)}
    puller, offer = adopt_from(tensors, live, mine)
    assert live["qk"].equal(torch.cat([tensors["q"], tensors["k"]]))
    assert puller.attest(live, offer) == offer.root
    live["qk"][7, 4] += 1
    assert puller.attest(live, offer) != offer.root
    puller.close()


def test_pull_in_place_fills_the_given_tensors() -> None:
    """The schedule of one pull is reused by the next only where the tensors are the same."""
    tensors = {"w": torch.randn(6, 5)}
    layout = layout_of(tensors, "policy-0")
    plan = make_plan(layout, layout)
    one, other, moved = torch.zeros(6, 5), torch.zeros(6, 5), torch.zeros(12, 5)
    puller = Puller(layout)
    with Publisher(layout, transport="local") as publisher:
        for version, live in enumerate([one, one, other, None, moved[:6], moved[6:], one]):
            tensors["w"] += 1
            offer = publisher.publish(version, tensors)
            into = None if live is None else {"w": live}
            puller.pull(offer, plan, deadline_s=DEADLINE_S, into=into)
            if live is None:
                live = torch.zeros(6, 5)
                puller.switch({"w": live})
            assert live.equal(tensors["w"])
            assert puller.attest({"w": live}, offer) == offer.root
    assert not other.equal(one)
    puller.close()


def test_switch_writes_parameters_that_require_gradients() -> None:
    module = torch.nn.Linear(3, 2)
    address = module.weight.data_ptr()
    tensors = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    live = dict(module.named_parameters())
    puller, _ = adopt_from(tensors, live, layout_of(live, "rollout-0"))
    assert module.weight.data_ptr() == address
    assert module.weight.requires_grad
    assert module.weight.equal(tensors["weight"])
    with pytest.raises(WeightsError, match="no staged version"):
        puller.switch(live)
    puller.close()


def test_close_frees_descriptors_and_mappings() -> None:
    def cycle(transport: Transport) -> None:
        tensors, live = weights(0), blank()
        layout, mine = layout_of(tensors, "policy-0"), layout_of(live, "rollout-0")
        with Publisher(layout, transport=transport) as publisher:
            puller = Puller(mine)
            puller.pull(publisher.publish(0, tensors), make_plan(layout, mine), deadline_s=DEADLINE_S)
            puller.close()

    def serving() -> tuple[int, int, int]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            arenas = sum("starling-snapshots" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), arenas

    transports: tuple[Transport, ...] = ("local", *served_transports())
    for transport in transports:
        cycle(transport)  # what the libraries keep for the life of the process
    before = serving()
    for transport in transports:
        for _ in range(3):
            cycle(transport)
    assert serving() == before
    assert before[2] == 0


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def test_publisher_of_an_unknown_transport_is_refused() -> None:
    layout = layout_of({"a": torch.ones(3)}, "p")
    with pytest.raises(WeightsError, match=r"no transport 'tpc' of a publisher; choose one of ucx, tcp, local"):
        Publisher(layout, transport=cast(Transport, "tpc"))


def test_planning_needs_no_torch() -> None:
    imports = "import sys, starling.weightsync.plan.planner, starling.weightsync.offers.offer"
    code = f"{imports}; print(sorted({{'torch', 'ucxx'}} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_missing_ucxx_names_the_remedy() -> None:
    code = (
        "import sys; sys.modules['ucxx'] = None\n"
        "from starling.common.errors import WeightsError\n"
        "from starling.weightsync.transports.ucx.worker import load_ucxx\n"
        "try: load_ucxx()\n"
        "except WeightsError as error: print(error)"
    )
    assert "install starling-weightsync[ucx] or choose transport 'tcp' or 'local'" in run_python(code)


@pytest.mark.campaign
def test_unclosed_publisher_does_not_block_process_exit() -> None:
    pytest.importorskip("ucxx")
    code = (
        "import torch; from starling.weightsync.tensors.modules import layout_of\n"
        "from starling.weightsync.publisher.publisher import Publisher\n"
        "tensors = {'a': torch.ones(3)}\n"
        "publisher = Publisher(layout_of(tensors, 'p'), transport='ucx')\n"
        "print(publisher.publish(0, tensors).version)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "0")

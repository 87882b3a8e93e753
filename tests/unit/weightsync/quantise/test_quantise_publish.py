"""Quantised versions through real publishers and pullers: the bits of the quantised full tensors arrive."""

from __future__ import annotations

import random
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from property_tests import examples
from quantised_models import (
    WAIT_S,
    ThreadExchange,
    Threads,
    destination_layout,
    differing,
    full_tensors,
    layout,
    local,
    quantised,
    rows,
    source_layout,
    storages,
)
from quantised_ranks import SPECS, WEIGHT, Ranks
from test_quantise import SMALL_FORMATS, weights
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.granularity import PerBlock
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
from transport_peers import proof_for

from starling.common.errors import WeightsError
from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.memory.arena import ArenaMapping, SnapshotsBusyError
from starling.weightsync.offers.offer import Offer, decode_offer, make_offer
from starling.weightsync.plan.layout import Box, Layout, Shard, TensorSpec, check_layout, decode_layout, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.quantise.formats import FP8_BLOCK, FP8_ROW, NVFP4
from starling.weightsync.quantise.layouts import received_layout
from starling.weightsync.quantise.recipe import QuantRecipe, QuantRule, linear_weights

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((13, 22), (8, 24), (5, 7), (9, 1), (3, 7, 10), (17,))
ANY = (QuantRule(pattern=r"\.kept$", format=None),)


def offer_of(version: int, publications: list) -> Offer:
    return make_offer(version, [rank for each in publications for rank in each.offer().ranks])


def publishers(
    stack: ExitStack, source: Layout, recipe: QuantRecipe, threads: Threads, **options: object
) -> list[Publisher]:
    return [
        stack.enter_context(
            Publisher(
                source, transport="local", rank=rank, quantise=recipe, exchange=ThreadExchange(threads, rank), **options
            )  # type: ignore[arg-type]
        )
        for rank in range(threads.num_ranks)
    ]


@examples(30, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 1 << 30), num_sources=st.integers(1, 4), num_destinations=st.integers(1, 3))
@example(seed=386, num_sources=1, num_destinations=1)  # a vector, which is not quantised, shares a pattern
def test_any_layout_receives_the_quantised_full_tensors(seed: int, num_sources: int, num_destinations: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice(("bfloat16", "float16", "float32"))
    names = ["a.weight", "b.weight", "c.weight", "d.kept"]
    specs = [TensorSpec(name=name, shape=draw.choice(SHAPES), dtype=dtype) for name in names]
    form = draw.choice(SMALL_FORMATS)
    together = (r"^(a|b)\.weight",) if draw.random() < 0.5 else ()
    recipe = QuantRecipe(rules=(*ANY, QuantRule(pattern="weight", format=form)), together=together)
    source = source_layout(draw, specs, num_sources)
    # A kept tensor in a quantised storage is an error, tested elsewhere: it is given memory of its own by its type.
    wanted = received_layout(apart(destination_layout(draw, specs, num_destinations)), recipe)
    check_layout(wanted)
    threads = Threads(num_sources)
    with ExitStack() as stack:
        made = publishers(stack, source, recipe, threads)
        assert all(each.layout == made[0].layout for each in made)
        plan = make_plan(made[0].layout, wanted, bucket_bytes=256)
        pullers = [stack.enter_context(closing(Puller(wanted, rank=rank))) for rank in range(num_destinations)]
        for version in range(2):
            full = full_tensors(specs, seed=100 * version)
            tensors = [local(source, rank, full) for rank in range(num_sources)]
            offer = offer_of(version, threads.each(lambda r: made[r].snapshot(version, tensors[r])))  # noqa: B023
            expected = quantised(specs, recipe, full)
            for rank, puller in enumerate(pullers):
                live = storages(wanted, rank)
                puller.pull(offer, plan, deadline_s=WAIT_S)
                puller.switch(live)
                assert list(differing(wanted, rank, live, expected)) == []
                assert puller.attest(live, offer) == offer.root


def apart(layout: Layout) -> Layout:
    """Give kept tensors and vectors storages of their own."""
    ranks = []
    for held in layout.ranks:
        shards = []
        for shard in held.shards:
            spec = layout.tensors[shard.tensor]
            if spec.name.endswith("kept") or len(spec.shape) < 2:
                shard = msgspec.structs.replace(shard, storage=spec.name + "/own", offset_bytes=0)
            shards.append(shard)
        ranks.append(msgspec.structs.replace(held, shards=tuple(shards)))
    return msgspec.structs.replace(layout, ranks=tuple(ranks))


def torchaos(form: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales, and the tensor's scale by torchao, of the full tensor."""
    if form == "nvfp4":
        total = per_tensor_amax_to_scale(tensor.abs().amax())
        found = NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=total)
        return [found.qdata, found.scale, total]
    made = Float8Tensor.from_hp(tensor, granularity=PerBlock([128, 128]))
    return [made.qdata, made.scale]


@pytest.mark.parametrize("form", ["fp8_block", "nvfp4"])
def test_uneven_ranks_agree_with_torchao_on_the_full_tensor(form: str) -> None:
    recipe = linear_weights(form)
    source = rows([WEIGHT], [0, 100, 101, 256])
    wanted = received_layout(rows([WEIGHT], [0, 256], "rollout-0"), recipe)
    threads = Threads(3)
    full = {WEIGHT.name: weights(WEIGHT.shape, torch.bfloat16)[1:].repeat(2, 1)[:256].contiguous()}
    with ExitStack() as stack:
        made = publishers(stack, source, recipe, threads)
        tensors = [{name: t.to(DEVICE) for name, t in local(source, rank, full).items()} for rank in range(3)]
        offer = offer_of(0, threads.each(lambda rank: made[rank].snapshot(0, tensors[rank])))
        puller = stack.enter_context(closing(Puller(wanted)))
        live = storages(wanted, 0)
        puller.pull(offer, make_plan(made[0].layout, wanted), deadline_s=WAIT_S)
        puller.switch(live)
    expected = torchaos(form, full[WEIGHT.name])
    names = [shard.storage for shard in wanted.ranks[0].shards]
    assert len(names) == len(expected)
    for name, tensor in zip(names, expected, strict=True):
        assert torch.equal(live[name].view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


def test_whole_groups_need_no_exchange() -> None:
    source = rows([WEIGHT], [0, 128, 256])
    with Publisher(source, transport="local", rank=1, quantise=linear_weights("fp8_block")) as publisher:
        assert [str(shard.box) for shard in publisher.layout.ranks[1].shards] == ["[128:256, 0:384]", "[1:2, 0:3]"]


@pytest.mark.parametrize("form", [FP8_BLOCK, NVFP4], ids=lambda form: form.name)
def test_cut_groups_and_tensors_with_one_scale_need_an_exchange(form: object) -> None:
    with pytest.raises(WeightsError, match=r"hold parts of the same scale groups.*give an exchange"):
        Publisher(rows([WEIGHT], [0, 100, 256]), transport="local", quantise=linear_weights(form))  # type: ignore[arg-type]


def test_exchange_between_other_ranks_is_refused() -> None:
    source, recipe, threads = rows([WEIGHT], [0, 100, 256]), linear_weights("fp8_block"), Threads(3)
    with pytest.raises(
        WeightsError, match=r"between 3 ranks, of which this is 0, but policy-0 has 2, of which this is 1"
    ):
        Publisher(source, transport="local", rank=1, quantise=recipe, exchange=ThreadExchange(threads, 0))


@pytest.mark.parametrize("form", ["fp8_block", "nvfp4"])
def test_layout_of_a_single_rank_is_refused(form: str) -> None:
    source = rows([WEIGHT], [0, 100, 256])
    alone = msgspec.structs.replace(source, ranks=source.ranks[:1])
    with pytest.raises(WeightsError, match=r"No rank of policy-0 holds \[100:.*layer.weight.*the layout of all ranks"):
        Publisher(alone, transport="local", quantise=linear_weights(form))


def test_published_box_that_cuts_a_byte_is_refused() -> None:
    spec = TensorSpec(name="layer.weight", shape=(4, 32), dtype="bfloat16")
    boxes = [Box(offset=(0, 0), size=(4, 15)), Box(offset=(0, 15), size=(4, 17))]
    held = [[Shard(tensor=0, box=b, storage="w", offset_bytes=0, strides=contiguous(b.size))] for b in boxes]
    with pytest.raises(WeightsError, match=r"\[0:4, 0:15\] of tensor layer.weight cuts through a byte of mxfp4 codes"):
        Publisher(layout("policy-0", [spec], held), transport="local", quantise=linear_weights("mxfp4"))


@pytest.mark.parametrize("form", [FP8_ROW, FP8_BLOCK, NVFP4], ids=lambda form: form.name)
def test_nan_fails_ranks_that_share_its_scales_and_not_the_next_version(form: object) -> None:
    recipe = linear_weights(form)  # type: ignore[arg-type]
    source = rows([WEIGHT], [0, 100, 200, 256])
    full = {WEIGHT.name: weights(WEIGHT.shape, torch.bfloat16)}
    broken = {WEIGHT.name: full[WEIGHT.name].clone()}
    broken[WEIGHT.name][50, 3] = torch.nan
    threads = Threads(3)

    def outcome(rank: int, version: int, model: dict[str, torch.Tensor]) -> str:
        try:
            made[rank].snapshot(version, local(source, rank, model))
        except WeightsError as error:
            return str(error)
        return "published"

    with ExitStack() as stack:
        made = publishers(stack, source, recipe, threads)
        offer = offer_of(0, threads.each(lambda rank: made[rank].snapshot(0, local(source, rank, full))))
        found = threads.each(lambda rank: outcome(rank, 1, broken))
        assert "layer.weight has an infinite or NaN element in [" in found[0]
        shared = {"fp8_row": (), "fp8_block": (1,), "nvfp4": (1, 2)}[form.name]  # type: ignore[attr-defined]
        for rank in (1, 2):
            assert ("Another rank cannot quantise its part of tensor layer.weight" in found[rank]) == (rank in shared)
            assert (found[rank] == "published") == (rank not in shared)
        again = offer_of(2, threads.each(lambda rank: made[rank].snapshot(2, local(source, rank, full))))
        assert [rank.root for rank in again.ranks] == [rank.root for rank in offer.ranks]


def test_rank_with_busy_snapshots_does_not_block_others() -> None:
    source = rows([WEIGHT], [0, 100, 256])
    full = {WEIGHT.name: weights(WEIGHT.shape, torch.bfloat16)}
    threads = Threads(2)
    with ExitStack() as stack:
        made = publishers(stack, source, linear_weights("fp8_block"), threads, when_busy="skip")
        arena = made[0]._arena
        assert arena is not None
        for version in range(2):
            offer = offer_of(version, threads.each(lambda r: made[r].snapshot(version, local(source, r, full))))  # noqa: B023
            reader = stack.enter_context(closing(ArenaMapping(arena.address)))
            reader.open(offer.ranks[0].snapshot, proof_for(offer.ranks[0]))

        def attempt(rank: int) -> bool:
            try:
                made[rank].snapshot(2, local(source, rank, full))
            except SnapshotsBusyError:
                return False
            return True

        assert threads.each(attempt) == [False, True]


# --- real processes over gloo --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["fp8_block", "nvfp4"])
def test_processes_exchange_over_gloo(form: str, tmp_path: Path) -> None:
    specs = list(SPECS)
    recipe = linear_weights(form)
    wanted = received_layout(rows(specs, [0, 200, 256], "rollout-0"), recipe)
    with Ranks(tmp_path / "store", form, deadline_s=60.0) as ranks:
        published = decode_layout(ranks.answer(0))
        assert encode(published) == ranks.answer(1)
        plan = make_plan(published, wanted)
        for version in range(2):
            for pipe in ranks.pipes:
                pipe.send(version)
            parts = [decode_offer(ranks.answer(rank)) for rank in range(2)]
            offer = make_offer(version, [part for each in parts for part in each.ranks])
            expected = quantised(specs, recipe, full_tensors(specs, seed=version))
            for rank in range(2):
                live = storages(wanted, rank)
                with closing(Puller(wanted, rank=rank)) as puller:
                    puller.pull(offer, plan, deadline_s=WAIT_S, into=live)
                    assert puller.attest(live, offer) == offer.root
                assert list(differing(wanted, rank, live, expected)) == []


def test_missing_rank_fails_at_the_deadline(tmp_path: Path) -> None:
    with Ranks(tmp_path / "store", "fp8_block", deadline_s=1.0) as ranks:
        for rank in range(2):
            ranks.answer(rank)
        ranks.pipes[0].send(0)
        assert b"The maxima of the other ranks did not arrive within 1 s" in ranks.answer(0)

"""Layout roots: the publisher's equals that of a destination that holds its bits, from whichever source they came."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from puller_models import Model, Storages, local, publish, publishers, zeros

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import Offer, layout_root, make_offer, root_of_parts
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import Bucket, Plan, PlanCache, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller

torch.set_num_threads(1)
DEADLINE_S = 30.0


class Destination:
    """A replica of one or more ranks."""

    def __init__(self, layout: Layout, digests: DigestMode = "full") -> None:
        self.layout = layout
        self.pullers = [Puller(layout, rank=rank, digests=digests) for rank in range(len(layout.ranks))]
        self.lives = [zeros(layout, rank) for rank in range(len(layout.ranks))]

    def pull(self, offer: Offer, plan: Plan) -> None:
        """Pull a version, and switch to it."""
        for puller, live in zip(self.pullers, self.lives, strict=True):
            puller.pull(offer, plan, deadline_s=DEADLINE_S)
            puller.switch(live)

    def root(self, offer: Offer, root_plan: Plan | None = None) -> str:
        """Return the layout root of what it holds; it must hold what its source sent."""
        ranks = zip(self.pullers, self.lives, strict=True)
        roots = [puller.attest_roots(live, offer, root_plan) for puller, live in ranks]
        assert {one.root for one in roots} == {offer.root}
        return layout_root([one.rank_root for one in roots])

    def close(self) -> None:
        """Close its pullers."""
        for puller in self.pullers:
            puller.close()


@contextmanager
def policy(
    layout: Layout, digests: DigestMode = "full", delta_versions: int = 0, *, rank: int = 0
) -> Iterator[Publisher]:
    """Run the publisher of one rank in this process."""
    with Publisher(layout, transport="local", rank=rank, digests=digests, delta_versions=delta_versions) as publisher:
        yield publisher


def flipped(draw: random.Random, full: Storages) -> Storages:
    """Return the tensors with one flipped bit in one of them."""
    made = {name: tensor.clone() for name, tensor in full.items()}
    raw = draw.choice(list(made.values())).view(-1).view(torch.uint8)
    raw[draw.randrange(raw.numel())] ^= 1
    return made


@examples(20, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1 << 30),
    num_source_ranks=st.integers(1, 3),
    num_relay_ranks=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
    bucket_bytes=st.sampled_from((256, 4096, 1 << 20)),
)
def test_layout_root_of_random_layouts_is_that_of_the_published_bits_alone(
    seed: int, num_source_ranks: int, num_relay_ranks: int, num_ranks: int, bucket_bytes: int
) -> None:
    draw = random.Random(seed)
    model = Model(draw, num_tensors=draw.randint(1, 8))
    source, between = model.layout("policy-0", num_source_ranks), model.layout("rollout-0", num_relay_ranks)
    layout = model.layout("rollout-1", num_ranks)
    direct = make_plan(source, layout, bucket_bytes=bucket_bytes)
    passed_on = make_plan(between, layout, bucket_bytes=draw.choice((256, 4096)))
    full = model.full(0)
    with ExitStack() as stack:
        snapshots = [
            stack.enter_context(policy(source, rank=rank)).snapshot(0, local(source, rank, full), {"it": direct})
            for rank in range(num_source_ranks)
        ]
        root = root_of_parts([snapshot.layout_parts()["it"] for snapshot in snapshots])
        published = make_offer(0, [rank for snapshot in snapshots for rank in snapshot.offer().ranks])
        destination = stack.enter_context(closing(Destination(layout)))
        destination.pull(published, direct)
        assert destination.root(published) == root
        if num_source_ranks == 1:
            assert snapshots[0].layout_roots() == {"it": root}
        # A rollout that holds the same bits passes them on, cut otherwise; and one that holds another bit.
        for version, content in enumerate((full, flipped(draw, full))):
            relays = stack.enter_context(publishers(between, ["local"] * num_relay_ranks))
            offer = publish(relays, between, version, content)
            destination.pull(offer, passed_on)
            assert (destination.root(offer, direct) == root) is (version == 0)


@pytest.mark.parametrize("digests", ["full", "sampled", "off"])
def test_layout_roots_follow_the_digest_mode(digests: DigestMode) -> None:
    model = Model(random.Random(3), num_tensors=6)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    plan = make_plan(source, layout)
    with policy(source, digests) as publisher, closing(Destination(layout, digests)) as destination:
        roots = []
        for version in range(2):
            snapshot = publisher.snapshot(version, local(source, 0, model.full(version)), {"it": plan})
            destination.pull(snapshot.offer(), plan)
            roots.append(destination.root(snapshot.offer()))
            assert snapshot.layout_roots() == {"it": roots[-1]}
        assert (roots[0] == roots[1]) is (digests == "off")


def test_deltas_lead_to_the_same_layout_root() -> None:
    model = Model(random.Random(4), num_tensors=6)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    plan, full = make_plan(source, layout), model.full(0)
    with policy(source, delta_versions=2) as publisher, closing(Destination(layout)) as destination:
        for version in range(3):
            snapshot = publisher.snapshot(version, local(source, 0, full), {"it": plan})
            destination.pull(snapshot.offer(), plan)
            assert destination.root(snapshot.offer()) == snapshot.layout_roots()["it"]
            full = flipped(random.Random(version), full)


def test_layout_root_can_be_asked_for_later_and_is_computed_once() -> None:
    model = Model(random.Random(5), num_tensors=6)
    source, layouts = model.layout("policy-0", 1), [model.layout(f"rollout-{num}", num) for num in (1, 2)]
    plans = {str(index): make_plan(source, layout) for index, layout in enumerate(layouts)}
    with policy(source) as publisher:
        with pytest.raises(WeightsError, match="no version"):
            publisher.add_layout_roots(plans)
        for version in range(3):  # a later snapshot takes the place of one whose roots were asked for
            tensors = local(source, 0, model.full(version))
            snapshot = publisher.snapshot(version, tensors, {"0": plans["0"]})
            publisher.add_layout_roots(plans)
            late = snapshot.layout_roots()
        assert late.keys() == plans.keys()
        publisher.add_layout_roots(plans)
        assert snapshot.layout_roots() == late
    with policy(source) as publisher:
        assert publisher.snapshot(0, tensors, plans).layout_roots() == late


def test_layout_root_of_a_plan_that_does_not_fit_is_left_out() -> None:
    model = Model(random.Random(6), num_tensors=3)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    of_two_ranks = make_plan(model.layout("policy-0", 2), layout)
    other = Model(random.Random(7), num_tensors=9)
    of_another_model = make_plan(other.layout("policy-0", 1), other.layout("rollout-0", 1))
    plans = {"fits": make_plan(source, layout), "two ranks": of_two_ranks, "another model": of_another_model}
    with policy(source) as publisher:
        snapshot = publisher.snapshot(0, local(source, 0, model.full(0)), plans)
        assert snapshot.layout_roots().keys() == {"fits"}
        assert snapshot.offer().version == 0


class EndlessPlan:
    """A plan whose ranks do not end, as one of very many small boxes."""

    destination = "rollout-9"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.begun = threading.Event()

    @property
    def ranks(self) -> Iterator[int]:
        """Return the first rank again and again."""
        self.begun.set()
        return itertools.repeat(0)

    def of_destination(self, rank: int) -> Sequence[Bucket]:
        """See `Plan.of_destination`."""
        return self._plan.of_destination(rank)


def test_layout_root_that_takes_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.weightsync.publisher.publisher.MIN_ROOT_S", 0.1)
    model = Model(random.Random(9), num_tensors=3)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    plan = make_plan(source, layout)
    plans = {"endless": cast("Plan", EndlessPlan(plan)), "it": plan}
    with policy(source) as publisher:
        assert publisher.snapshot(0, local(source, 0, model.full(0)), plans).layout_roots(DEADLINE_S).keys() == {"it"}


def test_snapshot_ends_the_layout_roots_of_the_one_in_whose_place_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of `snapshot` trains: it does not wait for them."""
    monkeypatch.setattr("starling.weightsync.publisher.publisher.MIN_ROOT_S", 10 * DEADLINE_S)
    monkeypatch.setattr("starling.weightsync.publisher.publisher.DIGEST_TIMEOUT_S", DEADLINE_S)
    model = Model(random.Random(10), num_tensors=3)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    endless = EndlessPlan(make_plan(source, layout))
    with policy(source) as publisher:
        first = publisher.snapshot(0, local(source, 0, model.full(0)), {"endless": cast("Plan", endless)})
        assert endless.begun.wait(DEADLINE_S)
        for version in (1, 2):
            newest = publisher.snapshot(
                version, local(source, 0, model.full(version)), {"it": make_plan(source, layout)}
            )
        assert first.layout_roots(DEADLINE_S) == {}
        assert newest.layout_roots(DEADLINE_S).keys() == {"it"}


def test_closing_ends_layout_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.weightsync.publisher.publisher.MIN_ROOT_S", 10 * DEADLINE_S)
    model = Model(random.Random(11), num_tensors=3)
    source, layout = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    endless = EndlessPlan(make_plan(source, layout))
    with policy(source) as publisher:
        snapshot = publisher.snapshot(0, local(source, 0, model.full(0)), {"endless": cast("Plan", endless)})
        assert endless.begun.wait(DEADLINE_S)
    assert snapshot.layout_roots(DEADLINE_S) == {}


def test_layout_key_depends_on_the_boxes_alone() -> None:
    model, cache = Model(random.Random(8), num_tensors=3), PlanCache()
    source, two = model.layout("policy-0", 1), model.layout("rollout-0", 2)
    renamed = Layout(replica="rollout-7", tensors=two.tensors, ranks=two.ranks)
    assert cache.key(source, two) == cache.key(source, renamed)
    assert len({cache.key(source, two), cache.key(source, source), cache.key(two, source)}) == 3

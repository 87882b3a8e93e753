"""Relays: rollouts on other hosts than the policy read a version from each other while it arrives."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from test_controller_offers import enters
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Send
from starling.controller.core.replicas.membership import Member
from starling.controller.core.weights.publications import Publications
from starling.controller.core.weights.relays import ANNOUNCE_S, Relays
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer, offer_of
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.offers.tickets import accept, prove


class Fleet(Script):
    """A script that keeps the commands to adopt."""

    @property
    def orders_to_adopt(self) -> list[Any]:
        """All that were sent so far, in order."""
        return [send for send in self.commands_sent.values() if isinstance(send.message, wire.AdoptWeights)]


def fleet(num: int = 4, *, hosts: str = "bcdefgh", **settings: Any) -> Fleet:
    """Return a run in which version 0 was just published on host `a`, for `num` rollouts on the hosts `hosts`."""
    script = Fleet(**{"relay_from_bytes": 0, **settings})
    for number in range(num):
        enters(script, f"rollout-{number}", hosts[number % len(hosts)])
    enters(script, "policy-0", "a")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    return script


def orders(script: Fleet) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return who was told to pull, from where, and by which relays, of all that has been sent so far."""
    return [(send.peer, send.message.source, send.message.relays) for send in script.orders_to_adopt]


def order_of(script: Fleet, name: str) -> Send:
    """Return the last command to pull that `name` got."""
    return [send for send in script.orders_to_adopt if send.peer == name][-1]


def announces(script: Fleet, name: str, *, data: bytes | None = None, **changes: Any) -> list[str]:
    """`name` says that it serves what it pulls."""
    message = order_of(script, name).message
    said = replace(wire.RelayOffered(lease=message.lease, version=message.version), **changes)
    buffers = () if said.problem else (encoded_offer(message.version) if data is None else data,)
    return script.receive(name, said, *buffers)


def takes(script: Fleet, name: str, content: bytes | None = None) -> list[str]:
    """`name` has adopted the version of its last command, or other `content`."""
    send = order_of(script, name)
    return script.receive(name, adopted(send.message, send.buffers, content))


def test_each_rollout_reads_from_the_one_before_it_as_soon_as_that_serves() -> None:
    script = fleet()
    assert orders(script) == [("rollout-0", "policy-0", ())], "the others wait for it"
    announces(script, "rollout-0")
    assert orders(script)[1:] == [("rollout-1", "policy-0", ("rollout-0",))]
    announces(script, "rollout-1")
    announces(script, "rollout-2")
    assert orders(script)[2:] == [
        ("rollout-2", "policy-0", ("rollout-1",)),
        ("rollout-3", "policy-0", ("rollout-2",)),
    ]


def test_reader_of_a_relay_has_a_ticket_for_it_and_for_the_policy() -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    send = order_of(script, "rollout-1")
    assert len(send.buffers) == 3, "the offer of the policy, the plan, the offer of the relay"
    for encoded in (send.buffers[0], send.buffers[2]):
        [rank] = decode_offer(encoded).ranks
        assert rank.secret == ""
        proof = accept(offer_of(0).ranks[0].secret, prove(rank, rank=0, nonce="0").text, snapshot=rank.snapshot)
        assert proof.claims.startswith(f"rollout-1 {send.message.lease} ")


@pytest.mark.parametrize("late", ["silent", "problem"])
def test_rollouts_do_not_wait_for_one_that_serves_nothing(late: str) -> None:
    script = fleet(2)
    if late == "problem":
        announces(script, "rollout-0", problem="nothing is staged")
    else:
        script.heartbeats("rollout-0", version=-1)
        script.advance_time(ANNOUNCE_S - 0.1)
        assert len(orders(script)) == 1
        script.advance_time(0.2)
    assert orders(script)[1:] == [("rollout-1", "policy-0", ())]


def test_small_weights_and_rollouts_on_the_host_of_the_policy_need_no_relay() -> None:
    assert {order[1:] for order in orders(fleet(3, relay_from_bytes=1 << 20))} == {("policy-0", ())}
    script = fleet(3, hosts="a")
    assert orders(script) == [(f"rollout-{number}", "policy-0", ()) for number in range(3)]
    assert not any(order_of(script, f"rollout-{number}").message.announce for number in range(3))


def test_rollouts_on_the_host_of_a_relay_all_read_from_it() -> None:
    script = fleet(4, hosts="bbbc")
    announces(script, "rollout-0")
    assert orders(script)[1:] == [(f"rollout-{number}", "policy-0", ("rollout-0",)) for number in (1, 2, 3)]


def test_rollout_that_joins_later_reads_from_one_that_nobody_reads_from() -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    takes(script, "rollout-0")
    announces(script, "rollout-1")
    takes(script, "rollout-1")
    enters(script, "rollout-2", "x")
    assert orders(script)[2:] in (
        [("rollout-2", "policy-0", ("rollout-0",))],
        [("rollout-2", "policy-0", ("rollout-1",))],
    )
    enters(script, "rollout-3", "y")
    [(_, _, third), (_, _, fourth)] = orders(script)[2:]
    assert {*third, *fourth} == {"rollout-0", "rollout-1"}, "each serves one at a time"


@pytest.mark.parametrize("how", ["leaves", "fails"])
def test_relay_that_is_gone_is_read_no_more(how: str) -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    if how == "leaves":
        script.receive("rollout-0", wire.Leave(reason="stopped"))
    else:
        lease = order_of(script, "rollout-0").message.lease
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="the connection broke")
        script.receive("rollout-0", failed)
    enters(script, "rollout-2", "x")
    assert ("rollout-2", "policy-0", ("rollout-0",)) not in orders(script)


def test_relay_serves_a_version_only_until_it_pulls_the_next() -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    for name in ("rollout-0", "rollout-1"):
        takes(script, name)
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    assert orders(script)[2:] == [("rollout-0", "policy-0", ())]
    assert "rollout-0" not in script.state.weights.relays.offers


def test_relay_that_passed_on_what_it_got_is_not_accused() -> None:
    """`rollout-0` lies; `rollout-1` has passed its bytes on before it could prove them."""
    script = fleet(3)
    announces(script, "rollout-0")
    announces(script, "rollout-1")
    takes(script, "rollout-0")
    takes(script, "rollout-2", b"other".ljust(16, b"\0"))
    assert "rollout-1" in script.state.replicas.membership.members
    assert not script.state.replicas.membership.accused
    takes(script, "rollout-1", b"other".ljust(16, b"\0"))
    script.advance_time(1.1)
    assert order_of(script, "rollout-2").message.relays == (), "it reads this version from the policy"
    takes(script, "rollout-2")
    takes(script, "rollout-1")
    assert "rollout-0" not in script.state.replicas.membership.members, "whose word was the policy's bytes"
    assert "rollout-1" in script.state.replicas.membership.members


def test_relay_that_has_proven_a_version_and_sends_another_is_evicted() -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    takes(script, "rollout-0")
    takes(script, "rollout-1", b"other".ljust(16, b"\0"))
    script.advance_time(1.1)
    assert order_of(script, "rollout-1").message.relays == ()
    takes(script, "rollout-1")
    assert "rollout-0" in script.state.replicas.membership.accused
    enters(script, "rollout-0", "b", incarnation=2)
    assert not script.state.replicas.membership.members["rollout-0"].may_relay


FALSE = b"other".ljust(16, b"\0")


def test_relay_is_not_accused_of_a_pull_that_it_has_never_proven() -> None:
    """It has proven a later one, from the policy, when its reader finds out what the first one brought."""
    script = fleet(3)
    announces(script, "rollout-0")
    announces(script, "rollout-1")
    takes(script, "rollout-0")
    takes(script, "rollout-1", FALSE)
    assert "rollout-1" not in script.state.weights.relays.offers, "nobody reads any more what it has got"
    script.advance_time(1.1)
    assert order_of(script, "rollout-1").message.relays == ()
    takes(script, "rollout-1")
    takes(script, "rollout-2", FALSE)
    assert "rollout-1" in script.state.replicas.membership.members
    assert list(script.state.replicas.membership.accused) == ["rollout-0"]


@pytest.mark.parametrize("answered", ["before", "after"])
def test_relay_that_answers_only_after_its_reader_is_accused_nevertheless(answered: str) -> None:
    """Before or after its reader has got the version from the policy."""
    script = fleet(2)
    announces(script, "rollout-0")
    takes(script, "rollout-1", FALSE)
    assert "rollout-0" in script.state.replicas.membership.members
    if answered == "before":
        takes(script, "rollout-0")
    script.advance_time(1.1)
    assert order_of(script, "rollout-1").message.relays == ()
    takes(script, "rollout-1")
    if answered == "after":
        takes(script, "rollout-0")
    assert "rollout-0" in script.state.replicas.membership.accused
    assert "rollout-1" in script.state.replicas.membership.members


def test_reader_accuses_one_rollout_at_most() -> None:
    """Also if it complains of pulls of two versions before either is over."""
    script = fleet(4)
    announces(script, "rollout-0")
    takes(script, "rollout-1", FALSE)
    script.advance_time(1.1)
    takes(script, "rollout-1")
    announces(script, "rollout-2")
    for name in ("rollout-2", "rollout-3"):
        takes(script, name)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    script.trains(1)
    script.publishes(1)
    script.fails("rollout-1", order_of(script, "rollout-1").message.lease)
    for name in ("rollout-2", "rollout-3"):
        announces(script, name)
    script.advance_time(1.1)
    assert order_of(script, "rollout-1").message.relays == ("rollout-3",)
    takes(script, "rollout-1", FALSE)
    script.advance_time(1.1)
    takes(script, "rollout-1")
    for name in ("rollout-3", "rollout-0"):
        takes(script, name)
    membership = script.state.replicas.membership
    assert list(membership.accused) == ["rollout-3"]
    assert membership.members["rollout-0"].may_relay


def test_failed_pulls_from_a_rollout_are_known_after_it_has_left() -> None:
    """It would leave in time, and lie again."""
    weights, pairs = Publications(), [("rollout-0", "rollout-1"), ("rollout-0", "")]
    weights.num_bad_pulls.update(pairs)
    weights.forget("rollout-0", None)
    assert sorted(weights.num_bad_pulls) == sorted(pairs)
    weights.forget("rollout-1", None)
    assert list(weights.num_bad_pulls) == [("rollout-0", "")]


def test_what_a_relay_sent_costs_its_reader_no_count() -> None:
    script = fleet(2)
    announces(script, "rollout-0")
    balance = script.state.replicas.membership.conduct["rollout-1"].balance_s
    script.advance_time(100.0)
    for name in ("rollout-0", "rollout-1", "reward-0", "policy-0"):
        script.heartbeats(name)
    takes(script, "rollout-1", FALSE)
    assert script.state.replicas.membership.conduct["rollout-1"].balance_s == balance


def test_layout_roots_are_of_the_buckets_of_this_setting() -> None:
    """A controller that is started again with another one asks for them anew."""
    keys = set()
    for size in (0, 1 << 20):
        script = fleet(1, relay_from_bytes=size)
        keys |= set(script.state.weights.layout_roots[0])
    assert len(keys) == 2


def test_rollouts_that_share_memory_form_no_chain() -> None:
    """Readers of shared memory do not wait for what has not arrived."""
    assert {order[2] for order in orders(fleet(3, rollout_transport="local"))} == {()}
    assert not order_of(fleet(3, rollout_transport="local"), "rollout-0").message.announce


@pytest.mark.parametrize("data", [b"junk", encoded_offer(1000), b""])
def test_offer_of_a_relay_that_is_not_usable_costs_the_relay_its_membership(data: bytes) -> None:
    script = fleet(2)
    announces(script, "rollout-0", data=data)
    assert "rollout-0" not in script.state.replicas.membership.members
    script.heartbeats("rollout-1", version=-1)
    assert orders(script)[1:] == [("rollout-1", "policy-0", ())]


def test_announcements_without_an_order_change_nothing() -> None:
    script = fleet(2)
    message = order_of(script, "rollout-0").message
    said = wire.RelayOffered(lease=message.lease, version=0)
    assert script.receive("rollout-1", said, encoded_offer(0)) == [], "the lease of another"
    assert script.receive("rollout-0", replace(said, version=7), encoded_offer(7)) == []
    assert script.receive("rollout-0", replace(said, lease="adopt:0:9.9"), encoded_offer(0)) == []
    announces(script, "rollout-0")
    announces(script, "rollout-0", data=b"junk")
    assert list(script.state.weights.relays.offers) == ["rollout-0"], "once for each order"
    takes(script, "rollout-0")
    assert script.receive("rollout-0", said, b"junk") == []


def test_layouts_of_other_boxes_have_chains_of_their_own() -> None:
    script = Fleet(relay_from_bytes=0)
    for number in range(4):
        name = f"rollout-{number}"
        enters(script, name, "bcde"[number], encoded_layout(name, num_ranks=1 + number % 2))
    enters(script, "policy-0", "a")
    script.publishes(0)
    assert orders(script) == [("rollout-0", "policy-0", ()), ("rollout-1", "policy-0", ())]
    announces(script, "rollout-0")
    assert orders(script)[2:] == [("rollout-2", "policy-0", ("rollout-0",))]


def member(name: str, host: str) -> Member:
    """Return a rollout."""
    return Member(name=name, role="rollout", incarnation=1, num_slots=1, heard_at=0.0, version=-1, host=host)


def test_nothing_is_left_of_relays_that_are_gone() -> None:
    relays, chain = Relays(), (0, "key")
    for number in range(3):
        one = member(f"rollout-{number}", f"h{number}")
        found = relays.choose(one, chain)
        assert (found.holder if found else "policy-0") == (f"rollout-{number - 1}" if number else "policy-0")
        relays.begin(one, "policy-0", found, chain, 0.0)
        assert relays.is_expected(chain, 1.0)
        relays.announce(one, chain, f"adopt:0:{number}", offer_of(0))
        assert not relays.is_expected(chain, 1.0)
    for number in (1, 0, 2):
        relays.forget(f"rollout-{number}")
    assert relays == Relays()

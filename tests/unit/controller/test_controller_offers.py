"""Offers and adoptions of replicas that lie: only policies bring versions and roots; a bad rollout costs itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.compaction import compact
from starling.controller.core.events import Note, Send
from starling.controller.core.machine import Controller
from starling.controller.core.plan import LeaseTimeouts
from starling.controller.core.records import JournalEntry, VersionPublished
from starling.controller.core.weights import publications
from starling.controller.core.weights.accusations import MAX_BAD_PULLS, MAX_STOPPED
from starling.controller.core.weights.distribution import MAX_OFFER_BYTES, source_of
from starling.controller.core.weights.publications import RETRY_S, Publications
from starling.sim.replicas.weights import adopted, content_of, encoded_layout, encoded_offer, layout_of, offer_of
from starling.weightsync.offers.offer import Offer, decode_offer, digest_of, make_offer
from starling.weightsync.offers.tickets import accept, prove
from starling.weightsync.plan.layout import encode


def enters(script: Script, name: str, host: str, layout: bytes | None = None, *, incarnation: int = 1) -> list[str]:
    """`name` joins on `host`, able to offer."""
    role: Any = name.rpartition("-")[0]
    version = 0 if role == "policy" else -1
    hello = wire.Hello(role=role, host=host, pid=1, num_slots=2, version=version, has_layout=True, serves=True,
                       peer="h:1" if role == "policy" else "")  # fmt: skip
    return script.receive(name, hello, layout or encoded_layout(name), incarnation=incarnation)


def offering(*, num_policies: int = 1, **settings: Any) -> Script:
    """Return a run in which `rollout-0` is asked to offer version 0, to `rollout-1` on its host."""
    script = Script(num_policies=num_policies, **settings)
    enters(script, "rollout-0", "b")  # before the policy publishes, which computes its layout root
    for number in range(num_policies):
        enters(script, f"policy-{number}", "a")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    enters(script, "rollout-1", "b")
    assert script.state.replicas.leases.num("rollout-0", "publish") == 1
    return script


def other_offer(version: int = 0) -> Offer:
    """Return an offer of other bytes, or of ones that are split otherwise."""
    [rank] = offer_of(version).ranks
    return make_offer(version, [replace(rank, root=digest_of(b"other"))])


def offers(script: Script, version: int, data: bytes, name: str = "rollout-0") -> list[str]:
    """`name` answers that it offers `version`."""
    lease = next(held.id for held in script.state.replicas.leases.all_of(name) if held.kind == "publish")
    return script.receive(name, wire.WeightsPublished(lease=lease, version=version, publish_s=0.0), data)


def test_each_pull_of_each_rollout_has_a_ticket_of_its_own_and_none_has_the_secret() -> None:
    """Tickets of adoptions: a stolen one opens nothing for another reader, and nothing again."""
    script = Script()
    for name in ("policy-0", "rollout-0", "rollout-1"):
        enters(script, name, name)
    script.publishes(0)
    lease = next(held.id for held in script.state.replicas.leases.all_of("rollout-0") if held.kind == "adopt")
    sent = [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="the connection broke")
    script.receive("rollout-0", failed)
    script.advance_time(RETRY_S)
    sent += [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    ranks = [decode_offer(send.buffers[0]).ranks[0] for send in sent]
    assert [send.peer for send in sent] == ["rollout-0", "rollout-1", "rollout-0"]
    assert len({rank.ticket for rank in ranks}) == 3
    assert {rank.secret for rank in ranks} == {""}
    secret = offer_of(0).ranks[0].secret
    for send, rank in zip(sent, ranks, strict=True):
        proof = accept(secret, prove(rank, rank=0, nonce="0").text, snapshot=rank.snapshot)
        assert proof.claims.startswith(f"{send.peer} {send.message.lease} ")


def test_offer_that_arrives_after_the_next_adoption_is_ignored() -> None:
    script = offering()
    script.heartbeats("rollout-0", version=-1)
    offers(script, 0, encoded_offer(0))
    assert "rollout-0" not in script.state.weights.offers
    assert "rollout-0" in script.state.replicas.membership.members


def published(script: Script) -> list[tuple[int, str]]:
    """Return the versions and roots that the journal holds."""
    return [
        (write.record.version, write.record.root)
        for write in script.journal
        if isinstance(write.record, VersionPublished)
    ]


@pytest.mark.parametrize(
    ("version", "data"),
    [
        (1000, encoded_offer(1000)),
        (0, encoded_offer(1000)),
        (1000, encoded_offer(0)),
        (0, b"junk"),
        (-1, encoded_offer(0)),
        (0, encode(replace(offer_of(0), root="0" * 32))),
    ],
)
def test_rollout_with_a_false_offer_is_evicted_and_the_run_continues(version: int, data: bytes) -> None:
    script = offering()
    lines = offers(script, version, data)
    assert "(invalid rollout-0)" in lines
    assert "rollout-0" not in script.state.replicas.membership.members
    assert published(script) == [(0, offer_of(0).root)]
    assert script.state.weights.version == 0
    assert not script.state.lifecycle.failure
    [adopt] = [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    assert (adopt.peer, adopt.message.source, adopt.message.version) == ("rollout-1", "policy-0", 0)


def test_rollout_can_not_bring_a_root_into_being() -> None:
    script = offering()
    offer = other_offer()
    offers(script, 0, encode(offer))
    assert published(script) == [(0, offer_of(0).root)]
    assert not script.state.weights.is_root(0, offer.root)


def version_of(script: Script, name: str) -> int:
    """Return the version that `name` is believed to hold."""
    return script.state.replicas.membership.members[name].version


def test_bytes_of_a_rollout_prove_themselves_whatever_root_it_offers() -> None:
    script = offering()
    offers(script, 0, encode(other_offer()))  # it splits tensors otherwise than the policy
    assert pulling(script) == "rollout-0"
    script.adopts("rollout-1", 0, 1)
    assert version_of(script, "rollout-1") == 0


LIE = b"\x01" + content_of(0)[1:]
"""Version 0 with a flipped bit."""


def accusing() -> Script:
    """Return a run in which `rollout-0` offers version 0, under the policy's root, and sent `LIE` to `rollout-1`."""
    script = offering()
    offers(script, 0, encoded_offer(0))
    script.adopts("rollout-1", 0, 1, content=LIE)
    assert version_of(script, "rollout-1") == -1
    assert "rollout-0" not in script.state.weights.offers
    script.advance_time(1.1)
    assert pulling(script) == "policy-0"
    return script


def test_rollout_that_sends_other_bits_under_the_root_of_the_policy_is_evicted_and_counted() -> None:
    script = accusing()
    lines = script.adopts("rollout-1", 0, 2)
    assert "(invalid rollout-0)" in lines
    assert "rollout-0" not in script.state.replicas.membership.members
    assert script.state.replicas.membership.num_invalid["rollout-0"] == 1
    assert version_of(script, "rollout-1") == 0
    assert not script.state.lifecycle.failure
    enters(script, "rollout-0", "b", incarnation=2)
    assert not script.state.replicas.membership.members["rollout-0"].can_offer


@pytest.mark.parametrize("compacted", [False, True])
def test_rollout_is_evicted_on_the_word_of_others_once_although_the_controller_restarts(compacted: bool) -> None:
    """Counted once each time, an honest rollout would be refused for ever."""
    script = accusing()
    script.adopts("rollout-1", 0, 2)
    script.restart(compacted=compacted)
    enters(script, "rollout-0", "b", incarnation=2)
    members = script.state.replicas.membership
    assert not members.members["rollout-0"].can_offer
    assert members.num_invalid["rollout-0"] == 1
    assert "rollout-1" in members.accusers


def test_rollout_that_was_evicted_on_the_word_of_another_may_offer_when_the_run_is_resumed() -> None:
    script = accusing()
    script.adopts("rollout-1", 0, 2)
    script.restart(stopped=True)
    enters(script, "rollout-0", "b", incarnation=2)
    assert script.state.replicas.membership.members["rollout-0"].can_offer


def test_rollout_that_fails_its_proof_from_a_policy_too_is_at_fault_itself() -> None:
    script = accusing()
    script.adopts("rollout-1", 0, 2, content=LIE)
    assert version_of(script, "rollout-1") == -1
    assert script.state.replicas.membership.members["rollout-0"].can_offer
    assert not script.state.replicas.membership.num_invalid["rollout-0"]


def test_rollout_can_accuse_only_one_other() -> None:
    script = accusing()
    script.adopts("rollout-1", 0, 2)
    enters(script, "rollout-2", "b")
    offers(script, 0, encoded_offer(0), "rollout-1")
    script.adopts("rollout-2", 0, 3)
    script.disconnect("rollout-1")
    enters(script, "rollout-1", "b")
    assert pulling(script) == "policy-0"
    assert not script.state.replicas.leases.num("rollout-2", "publish")
    enters(script, "rollout-3", "b")
    assert script.state.replicas.leases.num("rollout-2", "publish") == 1, "others still pull from a rollout"


def test_word_of_a_rollout_about_its_source_does_not_replace_the_proof() -> None:
    script = offering()
    offers(script, 0, encoded_offer(0))
    lease = next(held.id for held in script.state.replicas.leases.all_of("rollout-1") if held.kind == "adopt")
    answer = wire.WeightsAdopted(lease=lease, version=0, root=offer_of(0).root, pull_s=0.0, pause_s=0.0,
                                 size_bytes=16, transport="local", source="policy-0", layout="x")  # fmt: skip
    script.receive("rollout-1", answer)
    assert version_of(script, "rollout-1") == -1


def test_rollout_whose_layout_no_policy_has_digested_pulls_from_policies_until_one_has() -> None:
    script = Script()
    enters(script, "policy-0", "a")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    enters(script, "rollout-0", "b")
    assert pulling(script) == "policy-0"
    script.adopts("rollout-0", 0)
    lines = enters(script, "rollout-1", "b")
    assert pulling(script) == "policy-0"
    assert "policy-0 <- publish:0:1" in lines, "the policy computes the missing layout root"
    script.publishes(0, "publish:0:1")
    script.adopts("rollout-1", 0, 1)
    lines = enters(script, "rollout-2", "b")
    assert "rollout-0 <- publish:0:2" in lines


def test_policy_is_asked_once_for_a_layout_root_that_it_does_not_compute() -> None:
    script = Script()
    enters(script, "policy-0", "a")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    enters(script, "rollout-0", "b")
    script.adopts("rollout-0", 0)
    assert "policy-0 <- publish:0:1" in enters(script, "rollout-1", "b")
    offers(script, 0, encoded_offer(0), "policy-0")
    script.adopts("rollout-1", 0, 1)
    assert not [line for line in enters(script, "rollout-2", "b") if "publish" in line]
    assert pulling(script) == "policy-0"


def test_journaled_layout_roots_hold_after_a_restart_of_the_controller() -> None:
    script = offering()
    entries = [JournalEntry(write.record, write.payload) for write in script.journal]
    streams, summary = (Stream("train"), Stream("sft")), compact(script.state)
    assert summary is not None
    for journal in (entries, [entries[0], JournalEntry(summary)]):
        after = Controller(script.plan, *streams, script.held_out, journal=journal, incarnation=2).state
        assert after.weights.layout_roots == script.state.weights.layout_roots
        assert list(after.weights.layout_roots) == [0]


def test_rollout_pulls_from_policies_where_a_policy_made_a_version_again_with_other_bits() -> None:
    weights = Publications()
    weights.add_roots(3, "one", {"key": "root"})
    assert weights.known_layout_roots(3, "key") == ("root",)
    weights.add_roots(3, "other", {})
    assert weights.known_layout_roots(3, "key") == (), "holders of the other bits could not prove them"
    weights.add_roots(3, "other", {"key": "another root"})
    assert weights.known_layout_roots(3, "key") == ("another root", "root")
    assert weights.known_layout_roots(2, "key") == ()


def test_policy_computes_the_roots_of_the_most_frequent_layouts() -> None:
    weights, layouts = Publications(), [layout_of("rollout-0", num_ranks=num) for num in (1, 2, 4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publications, "MAX_LAYOUTS", 2)
        plans = weights.root_plans(layouts[0], [layouts[0], layouts[2], layouts[2], layouts[1], layouts[1]])
    assert list(plans) == [weights.plans.key(layouts[0], layout) for layout in (layouts[2], layouts[1])]
    misfit = layout_of("rollout-9", (8,))
    assert weights.root_plans(layouts[0], [misfit, layouts[1]]).keys() == {weights.plans.key(layouts[0], layouts[1])}


def test_adoption_of_an_older_version_proves_nothing() -> None:
    """It is the true root of a version that was published, and not the one of the lease."""
    script = Script()
    enters(script, "rollout-0", "b")
    enters(script, "policy-0", "a")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    [first] = [one for one in script.sent if isinstance(one.message, wire.AdoptWeights)]
    script.adopts("rollout-0", 0)
    script.generate_and_score(0, 1)
    script.trains(1)
    script.publishes(1)
    second = [one for one in script.sent if isinstance(one.message, wire.AdoptWeights)][-1]
    assert second.message.version == 1
    script.receive("rollout-0", replace(adopted(first.message, first.buffers), lease=second.message.lease))
    assert script.state.replicas.membership.members["rollout-0"].version == -1


@pytest.mark.parametrize("version", [1, 5, -1])
def test_adoption_of_another_version_than_the_one_of_the_lease_proves_nothing(version: int) -> None:
    script = offering()
    script.receive("rollout-0", wire.Leave(reason="drained"))
    lease = next(held.id for held in script.state.replicas.leases.all_of("rollout-1") if held.kind == "adopt")
    answer = wire.WeightsAdopted(lease=lease, version=version, root=offer_of(0).root, pull_s=0.0, pause_s=0.0,
                                 size_bytes=16, transport="local")  # fmt: skip
    script.receive("rollout-1", answer)
    assert script.state.replicas.membership.members["rollout-1"].version == -1


def pulling(script: Script) -> str:
    """Return the replica that `rollout-1` pulls from."""
    adopts = [c for c in script.commands if isinstance(c, Send) and isinstance(c.message, wire.AdoptWeights)]
    return adopts[-1].message.source if adopts else ""


def test_rollout_from_which_pulls_keep_failing_offers_no_more() -> None:
    script = offering()
    offers(script, 0, encoded_offer(0))
    for attempt in range(1, 4):
        assert pulling(script) == "rollout-0"
        script.fails("rollout-1", f"adopt:0:{attempt}", "another digest")
        script.advance_time(1.1)
    assert pulling(script) == "policy-0"
    member = script.state.replicas.membership.members["rollout-0"]
    assert not member.can_offer
    assert member.version == 0, "it may not be at fault, and keeps generating"


def test_reader_that_a_rollout_keeps_failing_pulls_elsewhere_although_others_succeed() -> None:
    script = offering()
    offers(script, 0, encoded_offer(0))
    script.fails("rollout-1", "adopt:0:1", "the connection broke")
    for number in (2, 3):  # pulls of others from the same rollout in between
        enters(script, f"rollout-{number}", "b")
        assert pulling(script) == "rollout-0"
        script.adopts(f"rollout-{number}", 0, script.attempt_of(f"rollout-{number}", "adopt:0"))
        script.advance_time(1.1)
        script.fails("rollout-1", f"adopt:0:{script.attempt_of('rollout-1', 'adopt:0')}", "the connection broke")
    assert not script.state.replicas.membership.members["rollout-0"].can_offer


def test_reader_can_end_the_offers_of_a_few_rollouts_only() -> None:
    """It fails its pulls from all of them: they would all pull from the policy."""
    script, num = Script(), 3 * MAX_STOPPED
    for number in range(num):
        enters(script, f"rollout-{number}", f"h{number}")
    enters(script, "policy-0", "a")
    script.publishes(0)
    for number in range(num):
        script.adopts(f"rollout-{number}", 0, number)
    ended = set[str]()
    for number in range(num):
        name = f"rollout-{number}"
        enters(script, "rollout-99", f"h{number}", incarnation=number + 1)
        if script.state.replicas.leases.num(name, "publish"):
            offers(script, 0, encoded_offer(0), name)
        for _ in range(MAX_BAD_PULLS):
            for lease in script.state.replicas.leases.of("rollout-99", "adopt"):
                failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="the connection broke")
                script.receive("rollout-99", failed, incarnation=number + 1)
            ended |= {
                c.fields["replica"] for c in script.commands if isinstance(c, Note) and c.kind == "offers_no_more"
            }
            script.advance_time(RETRY_S)
    assert len(ended) == MAX_STOPPED
    assert "rollout-99" in script.state.replicas.membership.accusers


def hangs(script: Script, incarnation: int) -> None:
    """Let `rollout-0` do nothing."""


def adopts_as_told(script: Script, incarnation: int) -> None:
    """Let `rollout-0` adopt what it was just told to."""
    for send in script.sent:
        if isinstance(send.message, wire.AdoptWeights) and send.peer == "rollout-0":
            script.receive("rollout-0", adopted(send.message, send.buffers), incarnation=incarnation)


def fails_and_adopts(script: Script, incarnation: int) -> None:
    """Let `rollout-0` report that it cannot offer, and then that its weights are torn, so that it adopts them again."""
    for lease in script.state.replicas.leases.of("rollout-0", "publish"):
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="no room")
        script.receive("rollout-0", failed, incarnation=incarnation)
    script.heartbeats("rollout-0", version=-1, incarnation=incarnation)
    script.advance_time(1.1)
    adopts_as_told(script, incarnation)


def restarts(script: Script, incarnation: int) -> None:
    """Let `rollout-0` be started again, and adopt version 0 from the policy."""
    enters(script, "rollout-0", "b", incarnation=incarnation + 1)
    adopts_as_told(script, incarnation + 1)


@pytest.mark.parametrize("gives_up", [hangs, fails_and_adopts, restarts])
def test_rollout_that_never_offers_delays_those_of_its_host_a_few_times(
    gives_up: Callable[[Script, int], None],
) -> None:
    timeouts = LeaseTimeouts(generate_s=1e6, score_s=1e6, adopt_s=1e6, publish_s=100.0)
    script = offering(lease_s=1e6, timeouts=timeouts)
    waited_s, members = 0, script.state.replicas.membership.members
    for number in range(2, 22):
        for _ in range(20):
            if script.state.replicas.leases.num("rollout-1", "adopt"):
                break
            waited_s += 1
            script.advance_time(1.0)
        gives_up(script, members["rollout-0"].incarnation if "rollout-0" in members else number)
        enters(script, "rollout-1", "b", incarnation=number)
    assert 20 <= waited_s <= 80
    assert script.state.replicas.leases.num("rollout-1", "adopt") == 1


def test_rollout_with_an_impossible_layout_costs_no_other_its_membership() -> None:
    """As a source it is passed over; when it pulls it is refused."""
    script = offering()
    script.disconnect("rollout-0")
    hello = wire.Hello(role="rollout", host="b", pid=1, num_slots=2, version=0, has_layout=True, serves=True)
    script.fails("rollout-1", "adopt:0:1")
    script.receive("rollout-0", hello, encoded_layout("rollout-0", (8,)))
    script.heartbeats("rollout-0", version=0)
    script.advance_time(1.1)
    assert pulling(script) == "policy-0"
    script.heartbeats("rollout-0", version=-1)  # it has lost what it held
    assert "rollout-0" not in script.state.replicas.membership.members
    assert "rollout-1" in script.state.replicas.membership.members
    assert not script.state.replicas.membership.num_invalid


def layout_with(replica: str, *tensors: str) -> bytes:
    """Return an encoded layout of these tensors, of the form of `layout_of`."""
    layout = layout_of(replica)
    [rank], [spec] = layout.ranks, layout.tensors
    specs = tuple(replace(spec, name=name) for name in tensors)
    shards = tuple(replace(rank.shards[0], tensor=number, storage=name) for number, name in enumerate(tensors))
    return encode(replace(layout, tensors=specs, ranks=(replace(rank, shards=shards),)))


@pytest.mark.parametrize(
    ("odd", "holder", "reader"),
    [
        (("w", "x"), "rollout-0", "rollout-9"),
        (("x",), "rollout-0", "rollout-9"),
        (("x",), "rollout-9", "rollout-0"),
    ],
)
def test_rollout_without_a_plan_from_another_pulls_from_the_policy(
    odd: tuple[str, ...], holder: str, reader: str
) -> None:
    """By its layout, of which a policy has all and other rollouts have not, one had those of its host evicted."""
    script = Script(num_steps=10)
    enters(script, "rollout-9", "b", layout_with("rollout-9", *odd))
    for honest in ("rollout-0", "rollout-1"):
        enters(script, honest, "b", layout_with(honest, "w"))
    enters(script, "policy-0", "a", layout_with("policy-0", "w", "x"))
    script.joins("reward-0", slots=8)
    script.publishes(0)
    members, leases = script.state.replicas.membership, script.state.replicas.leases

    def sources(name: str) -> list[str]:
        return [source_of(lease) for lease in leases.all_of(name) if lease.kind == "adopt"]

    script.adopts(holder, 0, script.attempt_of(holder, "adopt"))
    script.fails(reader, f"adopt:0:{script.attempt_of(reader, 'adopt')}")
    script.advance_time(1.1)
    assert not leases.num(holder, "publish"), "it would offer in vain"
    assert sources(reader) == ["policy-0"]
    if holder == "rollout-0":  # it has offered to another one of its host
        script.fails("rollout-1", f"adopt:0:{script.attempt_of('rollout-1', 'adopt')}")
        script.advance_time(1.1)
        offers(script, 0, encoded_offer(0))
        assert sources("rollout-1") == ["rollout-0"]
        script.fails(reader, f"adopt:0:{script.attempt_of(reader, 'adopt')}")
        script.advance_time(4.1)
        assert sources(reader) == ["policy-0"]
    assert {"rollout-0", "rollout-1", "rollout-9"} <= members.members.keys()
    assert not members.num_invalid


def test_rollout_to_which_a_policy_has_no_plan_is_refused_and_not_those_that_offer() -> None:
    script = offering()
    offers(script, 0, encoded_offer(0))
    lines = enters(script, "rollout-9", "b", layout_with("rollout-9", "w", "x"))
    assert any("rollout-9 <- refused: There is no plan from policy-0 to rollout-9." in line for line in lines), lines
    assert {"rollout-0", "rollout-1"} <= script.state.replicas.membership.members.keys()


def test_run_fails_by_the_offer_of_its_only_policy() -> None:
    script = Script()
    enters(script, "policy-0", "a")
    script.receive(
        "policy-0",
        wire.WeightsPublished(lease="publish:0:0", version=3, publish_s=0.0),
        encoded_offer(3),
    )
    assert "the offer of version 3 by policy-0 is not usable" in script.state.lifecycle.failure


def test_run_continues_after_a_false_offer_of_one_of_two_policies() -> None:
    script = Script(num_policies=2)
    enters(script, "policy-0", "a")
    enters(script, "policy-1", "a")
    enters(script, "rollout-0", "b")
    offers(script, 7, encoded_offer(7), "policy-0")
    assert "policy-0" not in script.state.replicas.membership.members
    assert not script.state.lifecycle.failure
    assert script.state.replicas.leases.num("policy-1", "publish") == 1


@pytest.mark.parametrize(
    ("transport", "address", "encrypted", "settings", "is_taken"),
    [
        ("ucx", "10.0.0.1:9", False, {"host": "10.0.0.1"}, False),
        ("tcp", "10.0.0.1:9", False, {"host": "10.0.0.1"}, False),
        ("gloo", "127.0.0.1:9", False, {}, False),
        ("nccl", "10.0.0.1:9", False, {"host": "10.0.0.1", "rollout_transport": "ucx"}, False),
        ("ucx", "10.0.0.1:9", False, {"host": "10.0.0.1", "rollout_transport": "ucx"}, True),
        ("tcp", "10.0.0.1:9", True, {"host": "10.0.0.1", "encrypt_weights": True}, True),
        ("ucx", "127.0.0.1:9", False, {}, True),
    ],
)
def test_offer_of_a_rollout_by_a_transport_that_the_run_does_not_allow_is_refused(
    transport: Any, address: str, encrypted: bool, settings: dict[str, Any], is_taken: bool
) -> None:
    """Its readers would open a port of this transport, by which anyone can take over their processes."""
    script = offering(**settings)
    [rank] = offer_of(0).ranks
    changed = replace(rank, transport=transport, address=address, encrypted=encrypted)
    lines = offers(script, 0, encode(make_offer(0, [changed])))
    assert ("rollout-0" in script.state.weights.offers) == is_taken
    assert ("(invalid rollout-0)" in lines) == (not is_taken)


def test_offer_of_a_rollout_that_is_too_large_is_not_decoded() -> None:
    script = offering()
    [rank] = offer_of(0).ranks
    large = encode(make_offer(0, [replace(rank, address="x" * MAX_OFFER_BYTES)]))
    lines = offers(script, 0, large)
    assert "rollout-0" not in script.state.replicas.membership.members
    assert any("bytes, and" in line for line in lines)


def test_measurements_of_an_adoption_are_json_whatever_a_rollout_reports() -> None:
    script = offering()
    script.joins("rollout-2")
    [lease] = script.state.replicas.leases.of("rollout-2", "adopt")
    adoption = wire.WeightsAdopted(
        lease=lease,
        version=0,
        root="",
        pull_s=float("nan"),
        pause_s=float("inf"),
        size_bytes=-1,
        sent_bytes=1 << 63,
        transport="tcp",
        split={"read_s": float("-inf")},
        drain_s=2.5,
    )
    script.receive("rollout-2", adoption)
    [note] = [command for command in script.commands if isinstance(command, Note) and command.kind == "adopted"]
    json.dumps(note.fields, allow_nan=False)
    assert (note.fields["pull_s"], note.fields["size_bytes"], note.fields["drain_s"]) == (0.0, 0, 2.5)


def test_rollout_that_never_offers_does_not_keep_the_policy_from_it() -> None:
    script = offering(lease_s=1e6, timeouts=LeaseTimeouts(publish_s=100.0))
    script.state.weights.withdraw("policy-0")  # as after a restart of the controller
    enters(script, "rollout-2", "c")
    waited_s = 0
    while not script.state.replicas.leases.num("policy-0", "publish"):
        script.advance_time(1.0)
        waited_s += 1
        assert waited_s <= 30, "a quarter of the deadline of an offer"


def test_rollout_that_may_not_offer_reclaims_no_offer() -> None:
    script = offering()
    journal = [JournalEntry(write.record, write.payload) for write in script.journal]
    script.controller = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=journal, incarnation=2)
    script.state = script.controller.state
    hello = wire.Hello(role="rollout", host="b", pid=1, num_slots=2, version=0, has_layout=True)
    script.receive("rollout-0", hello, encoded_layout("rollout-0"))
    script.heartbeats("rollout-0", "publish:0:1.999", version=0)
    assert not script.state.replicas.leases.has("publish")

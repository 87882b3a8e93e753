"""Free slots of replicas, compared with a linear scan; lease counts and expiry of members, compared with a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starling.common.ids import LEASE_KINDS
from starling.common.wire import messages as wire
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import Member, Membership
from starling.controller.core.replicas.routing.slots import FreeSlots

NAMES = ("rollout-0", "rollout-1", "rollout-2", "rollout-3")


def member_of(name: str, version: int) -> Member:
    return Member(name=name, role="rollout", incarnation=1, num_slots=4, heard_at=0.0, version=version)


changes = st.lists(
    st.tuples(
        st.sampled_from(NAMES), st.integers(0, 3), st.integers(0, 5), st.none() | st.integers(1, 4), st.booleans()
    )
)


@given(changes)
def test_least_busy_matches_a_scan(changes: list[tuple[str, int, int, int | None, bool]]) -> None:
    free, model = FreeSlots(), dict[str, tuple[float, str, int]]()
    members = {name: member_of(name, -1) for name in NAMES}
    for name, version, busy, slots, stays in changes:
        members[name].version = version
        free.put(members[name], busy, slots)
        model.pop(name, None)
        if busy < (slots or 4):
            model[name] = (busy / (slots or 4), name, version)
        if not stays:
            free.drop(members[name])
            model.pop(name, None)
        for least in range(-1, 4):
            expected = min((entry[:2] for entry in model.values() if entry[2] >= least), default=None)
            found = free.least_busy(least)
            assert (found.name if found else None) == (expected[1] if expected else None)


granted = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(LEASE_KINDS), st.floats(0, 10), st.integers(0, 3)), max_size=40
)


@given(granted)
def test_lease_counts_match_a_model(granted: list[tuple[str, str, float, int]]) -> None:
    leases, model = Leases(), dict[str, tuple[str, str, float]]()
    for number, (peer, kind, patience_s, then) in enumerate(granted):
        lease = f"{kind}:x:1.{number}"
        leases.grant(lease, kind, peer, None, float(number), patience_s)  # type: ignore[arg-type]
        model[lease] = (peer, kind, number + patience_s)
        if then == 0:
            assert leases.settle(lease, peer)
            del model[lease]
        elif then == 1:
            dropped = [held for held, entry in model.items() if entry[:2] == (peer, kind)]
            assert leases.drop(peer, float(number), kind) == sorted(dropped)
            for held in dropped:
                del model[held]
        elif then == 2:
            assert not leases.settle(lease, "rollout-9"), "a lease is settled only by its owner"
        for kind in LEASE_KINDS:
            assert leases.has(kind) == any(entry[1] == kind for entry in model.values())
            for peer in NAMES:
                held = [lease for lease, entry in model.items() if entry[:2] == (peer, kind)]
                assert (leases.of(peer, kind), leases.num(peer, kind)) == (held, len(held))
    late = {lease for lease, entry in model.items() if entry[2] <= 20.0}
    assert {lease.id for lease in leases.expired(20.0)} == late
    assert leases.expired(20.0) == [], "each lease expires once"


def test_reclaimed_lease_does_not_expire_at_its_former_deadline() -> None:
    leases, lease = Leases(), "generate:t0:1.1"
    leases.grant(lease, "generate", "rollout-0", None, 0.0, 10.0)
    for now in (6.0, 28.0):  # it is away for twenty seconds each time
        assert leases.drop("rollout-0", now) == [lease]
        assert leases.expired(now + 19.0) == []
        leases.restore(lease, "generate", "rollout-0", now + 20.0, 10.0)
        assert not leases.was_dropped(lease, "rollout-0"), "it is in force"
        assert leases.expired(now + 20.0) == []
    assert [held.begun_at for held in leases.all_of("rollout-0")] == [0.0]
    assert leases.expired(49.5) == []
    assert [held.id for held in leases.expired(50.0)] == [lease]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["tick", "heard", "join"])), max_size=80))
def test_members_expire_once_they_are_silent_for_the_lease(events: list[tuple[int, str]]) -> None:
    membership, hello = Membership(3.0), wire.Hello(role="reward", host="h", pid=1, num_slots=1)
    heard: dict[str, float] = {}
    for now, (number, kind) in enumerate(events):
        name = f"reward-{number}"
        if kind == "tick":
            silent = sorted((at, name) for name, at in heard.items() if now - at > 3.0)
            assert membership.expired(now) == [name for _, name in silent], "the longest silence first"
            for _, gone in silent:
                membership.remove(gone)
                del heard[gone]
        elif kind == "join":
            membership.join(name, 1, hello, None, now)
            heard[name] = now
        elif name in heard:
            membership.members[name].heard_at = heard[name] = now

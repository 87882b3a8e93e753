"""Accusations of sources: which replica is at fault where a rollout got something else than was published, or nothing.

A reader proves what it pulled against the layout root that a policy computed. So it knows that it got other bytes, and
may lie about that; the source may have sent them, and may deny it. A pull from a policy decides between the two.
"""

from __future__ import annotations

from typing import Final

from starling.controller.core.records import SourceEvicted
from starling.controller.core.replicas.conduct import stop_offering
from starling.controller.core.replicas.departure import distrust
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.weights.relays import Pull

MAX_BAD_PULLS: Final = 3
"""Number of consecutive failed pulls from a rollout after which it is no longer used as a source."""
MAX_STOPPED: Final = 3
"""Number of rollouts that are no longer used as a source because of the failed pulls of one reader."""


def judge(state: ControllerState, reader: Member, source: str, version: int, *, proven: bool) -> None:
    """Find out who is at fault where `reader` pulled something else than was published, or says so.

    A rollout that it was pulled from offers no more. The reader then pulls from a policy. If that proves the version,
    the rollout is evicted, and never offers again; if not, the reader is at fault, and the rollout may offer again. A
    reader that has accused a rollout pulls from policies from then on. So by false accusations one replica can have
    no more than one other evicted, and none is evicted twice, whatever restarts the controller.

    A relay whose pull was not proven may only have passed on what it got: it is not accused, unless it proves that pull
    later.
    """
    weights, membership = state.weights, state.replicas.membership
    if proven and reader.name not in weights.suspects:
        return
    rollout = membership.members.get(source)
    if not proven and rollout is not None and rollout.role == "rollout":
        pull = weights.relays.pull_read_by(reader.name)
        if pull is None or weights.relays.is_proven(pull):
            accuse(state, reader.name, rollout, version)
        else:
            _stop_relay(state, reader, rollout, version, pull)
        return
    if source.startswith("policy-") and reader.name in weights.suspects:
        _decide(state, reader.name, source, proven=proven)


def accuse(state: ControllerState, reader: str, rollout: Member, version: int) -> None:
    """Let no replica read from a rollout, because `reader` got something else from it than was published.

    Not if it has accused another one: complaints of pulls that were not over may be decided late, and several at once.
    """
    weights, membership = state.weights, state.replicas.membership
    if reader in membership.accusers:
        return
    membership.accusers[reader] = False
    weights.suspects[reader] = (rollout.name, rollout.incarnation)
    rollout.can_offer = rollout.may_relay = False
    weights.withdraw(rollout.name)
    weights.relays.withdraw(rollout.name)
    reason = f"{reader} pulled other weights from {rollout.name} than were published"
    state.outbox.note("offers_no_more", replica=rollout.name, reason=reason)
    member = membership.members.get(reader)
    if member is not None and member.version == version:  # it has got the right ones from a policy meanwhile
        _decide(state, reader, "a policy", proven=True)


def _decide(state: ControllerState, reader: str, source: str, *, proven: bool) -> None:
    """Evict the rollout that `reader` accuses, if it has proven the version from a policy; else let it offer again."""
    weights, membership = state.weights, state.replicas.membership
    name, incarnation = weights.suspects.pop(reader)
    suspect = membership.members.get(name)
    if suspect is None or suspect.incarnation != incarnation:
        return
    if proven:
        reason = f"{reader} pulled other weights from {name} than were published, and the right ones from {source}"
        membership.accused[name], membership.accusers[reader] = None, True
        state.outbox.write(SourceEvicted(name=name, reader=reader))
        distrust(state, suspect, reason)
    elif (name, incarnation) not in weights.suspects.values():
        suspect.can_offer, suspect.may_relay = suspect.serves, True


def _stop_relay(state: ControllerState, reader: Member, relay: Member, version: int, pull: Pull) -> None:
    """End a relay that has not proven `version`, after `reader` got something else from it than was published."""
    relays = state.weights.relays
    relays.withdraw(relay.name)
    relays.avoided[reader.name] = version
    if state.replicas.leases.get(pull[1]) is not None:
        relays.complain(pull, reader.name)
    reason = f"{reader.name} pulled other weights from {relay.name} than were published, before it had proven its own"
    state.outbox.note("relays_no_more", replica=relay.name, version=version, reason=reason)
    note_bad_pull(state, relay.name, reader.name)


def note_bad_pull(state: ControllerState, source: str, reader: str) -> None:
    """Count a pull that failed. A rollout that several such pulls in a row were from offers no more.

    Those of one reader count by themselves as well: a source could fail it for ever, and serve others in between. But a
    reader that has ended the offers of some pulls from policies from then on: it may be at fault itself, and would end
    those of all.
    """
    member, num = state.replicas.membership.members.get(source), state.weights.num_bad_pulls
    if member is None or member.role != "rollout":
        return
    for one in (reader, ""):
        num[source, one] += 1
    if (member.can_offer or member.may_relay) and max(num[source, reader], num[source, ""]) >= MAX_BAD_PULLS:
        stop_offering(state, member, f"{MAX_BAD_PULLS} pulls in a row from {source} failed")
        membership = state.replicas.membership
        membership.num_stopped[reader] += 1
        if membership.num_stopped[reader] >= MAX_STOPPED:
            membership.accusers.setdefault(reader, False)  # it pulls from policies only


def note_good_pull(state: ControllerState, source: str, reader: str) -> None:
    """Count the failed pulls of `reader` from `source`, and of all readers from there, anew."""
    for one in (reader, ""):
        state.weights.num_bad_pulls.pop((source, one), None)

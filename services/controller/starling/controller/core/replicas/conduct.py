"""Conduct of replicas: what their answers led to, and the groups that they had without an answer.

A replica that is broken, or lies, may keep to the letter of the protocol: take every group and leave before the
deadline, or send results that only the policy can refuse. What counts is then how much of its work was of use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.group import Group
from starling.controller.core.records import ReplicaCounted
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import MAX_INVALID, Member
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.state import ControllerState

SLOW_OFFER_SHARE: Final = 0.25
"""Share of the deadline of an offer for which the rollouts of a host wait, in all, for that of another one of it."""


def note_used(state: ControllerState, *replicas: str) -> None:
    """Note that the answers of these replicas to a group are of use; empty names are unknown ones."""
    for name in filter(None, replicas):
        state.replicas.membership.conduct[name].note_used()


def note_unscored(state: ControllerState, group: Group, scorer: Member) -> None:
    """Note that a reward replica or a teacher could not score a group.

    It may be at fault, or the rollout that generated the group. The caller counts it against the scorer. A group of
    resumed completions says nothing of either.
    """
    membership = state.replicas.membership
    if group.giver is not None:
        return
    if not group.tries:
        membership.unscored[scorer.role].note_lost(group.generator, scorer.name)
    if group.generator:
        membership.conduct[group.generator].num_spoiled += 1


def note_scored(state: ControllerState, group: Group, scorer: Member) -> None:
    """Note that a reward replica or a teacher has scored a group."""
    note_used(state, scorer.name)
    if not group.tries:
        state.replicas.membership.unscored[scorer.role].note_used(group.generator, scorer.name)


def note_answered(state: ControllerState, member: Member, lease: Lease) -> None:
    """Note that a replica has sent a result of a group."""
    state.replicas.membership.conduct[member.name].balance_s += state.now - lease.begun_at


def note_unanswered(state: ControllerState, member: Member, leases: Iterable[Lease]) -> None:
    """Note that a replica had groups, and ends that without a result, before their deadlines.

    If it could do so forever, it would keep them from all others. One that answers more than it leaves behind is not
    counted: a replica may be restarted, its connection and its engine be lost.
    """
    held = [lease for lease in leases if lease.kind in SLOT_KINDS]
    if not held:
        return
    conduct = state.replicas.membership.conduct[member.name]
    # What it had of a lease that it has reclaimed, before it lost the lease, was subtracted then.
    conduct.balance_s -= sum(state.now - lease.held_from for lease in held)
    conduct.note_wasted(min(lease.held_from for lease in held), state.now)
    limit_s = max(state.plan.timeouts.of(lease.kind) for lease in held)
    if conduct.balance_s >= 0:
        conduct.wasted_s = 0.0
    elif conduct.wasted_s >= limit_s:
        conduct.wasted_s, conduct.is_idle = 0.0, True
        note_invalid(state, member.name, f"{member.name} had groups for {limit_s:g} s in all, and gave no result")


def note_offered(state: ControllerState, member: Member, lease: Lease) -> None:
    """Note that a rollout has offered weights as it was told."""
    waits = state.replicas.membership.offer_wait_s
    waits[member.name] = max(0.0, waits[member.name] - (state.now - lease.begun_at))


def note_no_offer(state: ControllerState, member: Member, lease: Lease) -> None:
    """Note that a rollout was told to offer weights, and does not: it failed, or it leaves."""
    if member.role == "rollout":
        state.replicas.membership.offer_wait_s[member.name] += state.now - lease.begun_at
        _check_offer_wait(state, member, 0.0)


def check_slow_offer(state: ControllerState, rollout: Member) -> None:
    """Let a rollout offer no more if it has been told to for long: other rollouts of its host wait for it."""
    begun = [lease.begun_at for lease in state.replicas.leases.all_of(rollout.name) if lease.kind == "publish"]
    _check_offer_wait(state, rollout, state.now - min(begun, default=state.now))


def _check_offer_wait(state: ControllerState, rollout: Member, waiting_s: float) -> None:
    waits, limit_s = state.replicas.membership.offer_wait_s, state.plan.timeouts.publish_s * SLOW_OFFER_SHARE
    if rollout.can_offer and waits[rollout.name] + waiting_s > limit_s:
        waits[rollout.name] = 0.0
        stop_offering(state, rollout, f"others waited {limit_s:g} s in all for its weights")


def stop_offering(state: ControllerState, rollout: Member, reason: str) -> None:
    """Use a rollout as a source no more. It stays a member, because its readers may be at fault.

    When it has been started again it may offer again, but not for ever, because a source that lies can do that, too.
    """
    rollout.can_offer = rollout.may_relay = False
    state.replicas.membership.num_bad_offers[rollout.name] += 1
    state.weights.withdraw(rollout.name)
    state.weights.relays.withdraw(rollout.name)
    state.dirty |= Dirty.ADOPT
    state.outbox.note("offers_no_more", replica=rollout.name, reason=reason)


def note_invalid(state: ControllerState, name: str, reason: str) -> None:
    """Count what no working replica does: an invalid result or offer, groups that it spoils or does not answer."""
    counts = state.replicas.membership.num_invalid
    counts[name] += 1
    if counts[name] <= MAX_INVALID:  # more change nothing
        state.outbox.write(ReplicaCounted(name=name, num=counts[name]))
    state.outbox.note("invalid", replica=name, reason=reason, num=counts[name])

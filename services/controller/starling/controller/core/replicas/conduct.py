"""Conduct of replicas: what their answers led to, and the groups that they had without an answer.

A replica that is broken, or lies, may keep to the letter of the protocol: take every group and leave before the
deadline, or send results that only the policy can refuse. What counts is then how much of its work was of use.
"""

from __future__ import annotations

from collections.abc import Iterable

from starling.controller.core.records import ReplicaCounted
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import MAX_INVALID, Member
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.state import ControllerState


def note_used(state: ControllerState, *replicas: str) -> None:
    """Note that the rewards of a group came by the answers of these replicas; empty names are unknown ones."""
    for name in filter(None, replicas):
        state.replicas.membership.conduct[name].note_used()


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
    conduct.balance_s -= sum(state.now - lease.begun_at for lease in held)
    conduct.note_wasted(min(lease.begun_at for lease in held), state.now)
    limit_s = max(state.plan.timeouts.of(lease.kind) for lease in held)
    if conduct.balance_s >= 0:
        conduct.wasted_s = 0.0
    elif conduct.wasted_s >= limit_s:
        conduct.wasted_s, conduct.is_idle = 0.0, True
        note_invalid(state, member.name, f"{member.name} had groups for {limit_s:g} s in all, and gave no result")


def note_invalid(state: ControllerState, name: str, reason: str) -> None:
    """Count what no working replica does: an invalid result or offer, groups that it spoils or does not answer."""
    counts = state.replicas.membership.num_invalid
    counts[name] += 1
    if counts[name] <= MAX_INVALID:  # more change nothing
        state.outbox.write(ReplicaCounted(name=name, num=counts[name]))
    state.outbox.note("invalid", replica=name, reason=reason, num=counts[name])

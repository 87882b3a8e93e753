"""Departure of replicas: one that leaves, is lost, is evicted, or did not return after a restart of the controller."""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.records import MemberLeft
from starling.controller.core.replicas.assignments import requeue
from starling.controller.core.replicas.conduct import note_invalid, note_no_offer, note_unanswered
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.state import MAX_TEXT_CHARACTERS, ControllerState


def remove(state: ControllerState, name: str, reason: str, *, ended: bool = False) -> None:
    """Remove a replica and free all its work. Results that it sends later change nothing.

    `ended`: its process has ended for certain.
    """
    replicas = state.replicas
    for lease in replicas.leases.all_of(name):
        if lease.kind == "publish" and name in replicas.membership.members:
            note_no_offer(state, replicas.membership.members[name], lease)
    dropped = replicas.leases.drop(name, state.now)
    requeue(state, dropped)
    replicas.membership.awaited.discard(name)
    replicas.desired.forget(name)
    member = replicas.membership.remove(name)
    state.weights.forget(name, member.layout if member is not None else None)
    if member is None:
        return
    if member.role == "rollout":
        state.weights.remove_holder(member)
    replicas.slots.forget(member, state.evaluations.current)
    replicas.sharing.remove(member, state.now, ended=ended)
    if state.evaluations.current is not None:
        state.evaluations.current.pinned.discard(name)
    state.training.drop_share(name)
    member.layout = None  # the index of free slots may keep the member for a while
    replicas.membership.end_set_aside(member.role, state.now, replicas.slots.end_cooldown)
    _forget_counts(state, name)
    state.outbox.write(MemberLeft(name=name))
    state.outbox.note("left", replica=name, reason=reason, num_leases=len(dropped))
    state.dirty = Dirty.ALL


def _forget_counts(state: ControllerState, name: str) -> None:
    """Count the groups of a replica that has left anew: others have learned meanwhile, and so has the model.

    Without the counts of a scorer, those of the scorers that stay would be all that is known of what rollouts generate:
    one that lies would decide alone. So all groups are counted anew that scorers of its role have failed or scored.
    """
    state.buffer.filtering.counts.forget(name)
    for scorers, unscored in state.replicas.membership.unscored.items():
        if name.rpartition("-")[0] == scorers:
            unscored.clear()
        else:
            unscored.forget(name)


def evict(state: ControllerState, member: Member, reason: str) -> None:
    """Remove a replica that hangs or cannot be used, and do not admit this incarnation of it again."""
    remove(state, member.name, reason)
    state.replicas.membership.ban(member.name, member.incarnation, reason[:MAX_TEXT_CHARACTERS])
    refuse(state, member.name, reason)


def evict_hanging(state: ControllerState, member: Member, lease: Lease) -> None:
    """Evict a replica that sends heartbeats and did not answer `lease` in time.

    A group that it did not answer counts as an invalid result: a replica that takes groups and answers none would
    otherwise come back and take them again. Other work does not count, because others can delay it: the source of a
    pull, or the policies that share a step.
    """
    reason = f"{member.name} did not answer {lease.id} within {state.plan.timeouts.of(lease.kind):g} s"
    if lease.kind in SLOT_KINDS:
        note_invalid(state, member.name, reason)
    evict(state, member, reason)


def depart(state: ControllerState, member: Member, reason: str, *, ended: bool = False) -> None:
    """Remove a replica that left, was lost or was started again; `ended`: its process has ended for certain."""
    note_unanswered(state, member, state.replicas.leases.all_of(member.name))
    remove(state, member.name, reason, ended=ended)


def distrust(state: ControllerState, member: Member, reason: str) -> None:
    """Count an invalid result of a replica, and evict it if another one has its role.

    The last one of its role stays: without it the run could not go on, and the tries of its groups are counted.
    """
    note_invalid(state, member.name, reason)
    if state.replicas.membership.has_another(member):
        evict(state, member, reason)


def refuse(state: ControllerState, name: str, reason: str) -> None:
    """Refuse a replica: it is not a member, for this reason."""
    state.outbox.note("refused", replica=name, reason=reason)
    state.outbox.send(name, wire.Refused(reason=reason[:MAX_TEXT_CHARACTERS]))


def stop_awaiting(state: ControllerState) -> None:
    """Stop waiting for replicas that have not returned since the controller's restart, and record that they left."""
    membership = state.replicas.membership
    # One that has said hello, and not yet what it holds, is a member again.
    for name in sorted(membership.awaited - membership.members.keys()):
        membership.note_gone(name)
        state.replicas.desired.forget(name)
        _forget_counts(state, name)
        state.outbox.write(MemberLeft(name=name))
        reason = "it was not heard after the controller's restart"
        state.outbox.note("left", replica=name, reason=reason, num_leases=0)
    membership.awaited.clear()

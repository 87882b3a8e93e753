"""Departure of replicas: one that leaves, is lost, is evicted, or did not return after a restart of the controller."""

from __future__ import annotations

from collections import Counter
from typing import Final

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.records import MemberLeft
from starling.controller.core.replicas.assignments import requeue
from starling.controller.core.replicas.conduct import note_invalid, note_no_offer, note_unanswered
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Conduct, Member
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.state import MAX_TEXT_CHARACTERS, ControllerState

CULPRIT_SHARE: Final = 0.75
"""Share of the groups that were discarded, or filtered out, in a row, from which on one replica is at fault."""


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
    state.outbox.write(MemberLeft(name=name))
    state.outbox.note("left", replica=name, reason=reason, num_leases=len(dropped))
    state.dirty = Dirty.ALL


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
    if state.replicas.membership.num(member.role) > 1:
        evict(state, member, reason)


def evict_culprit(state: ControllerState) -> None:
    """Evict the replica that led to nearly all groups that were discarded in a row, if another one has its role.

    Otherwise one replica that fails whatever it is given, and fails it fast, would end the run. The same for groups
    that were filtered out in a row, by completions that are all the same, or by equal rewards. A few of the groups may
    be of others: they too fail a prompt now and then, and dynamic sampling filters out what they generate.
    """
    buffer, plan = state.buffer, state.plan
    num = buffer.num_discarded_in_a_row
    # A scorer that fails may be at fault, or the completions that it was given.
    suspects = sorted(buffer.discarded_by.values(), key=lambda names: _share_used(state, _greatest_share(names)[0]))
    if num >= plan.max_discarded and any(
        _evict_if_culprit(state, names, f"{num} groups that were discarded") for names in suspects
    ):
        buffer.note_not_discarded()
    num = buffer.num_filtered_in_a_row
    suspects = sorted(buffer.filtered_by.values(), key=lambda names: -_greatest_share(names)[1])
    if num >= plan.max_filtered and any(
        _evict_if_culprit(state, names, f"{num} groups that were filtered out") for names in suspects
    ):
        buffer.note_kept()


def _share_used(state: ControllerState, name: str) -> float:
    """Return which share of the groups that a replica had to do with were of use."""
    conduct = state.replicas.membership.conduct[name] if name else Conduct()
    return conduct.num_used / max(1, conduct.num_used + conduct.num_spoiled)


def _greatest_share(names: Counter[str]) -> tuple[str, float]:
    """Return the replica that led to the most of some groups, and to which share of them."""
    [(name, num)] = names.most_common(1) or [("", 0)]
    return name, num / max(1, names.total())


def _evict_if_culprit(state: ControllerState, names: Counter[str], groups: str) -> bool:
    """Evict and count the one of `names` that led to nearly all `groups`, if another replica has its role."""
    name, share = _greatest_share(names)
    membership = state.replicas.membership
    member = membership.members.get(name)
    if share < CULPRIT_SHARE or not name or (member is not None and membership.num(member.role) == 1):
        return False
    reason = f"{name} led to {'all' if share == 1 else f'{share:.0%}'} of {groups} in a row"
    note_invalid(state, name, reason)
    if member is not None:
        evict(state, member, reason)
    return True


def evict_useless(state: ControllerState) -> None:
    """Evict replicas that keep groups and give no result, or spoil more than others can use, if others do better.

    Otherwise one replica could hold up the run: with results that only the policy can refuse, or with none.
    """
    membership = state.replicas.membership
    for name, conduct in list(membership.conduct.items()):
        member = membership.members.get(name)
        if member is None or not (conduct.is_idle or conduct.excess >= state.plan.max_discarded):
            continue
        if conduct.is_idle:
            conduct.is_idle = False  # it is counted already
            if membership.num(member.role) > 1:
                evict(state, member, f"{name} keeps groups and gives no result")
            continue
        culprit = _culprit_of(state, member)
        others = [membership.conduct[one.name] for one in membership.of(culprit.role) if one is not culprit]
        if any(one.num_used > one.num_spoiled for one in others):  # else the prompts or the scorers may be at fault
            excess, conduct.excess = conduct.excess, 0
            conduct.clear_generators()
            reason = f"{culprit.name} led to {excess} more groups that were thrown away than to groups with rewards"
            note_invalid(state, culprit.name, reason)
            evict(state, culprit, reason)


def _culprit_of(state: ControllerState, member: Member) -> Member:
    """Return `member`, or the only rollout that generated what it could not score, if less of its work was of use.

    Not if others could score what this rollout has generated meanwhile: a rollout does not choose who scores it.
    """
    conduct = state.replicas.membership.conduct[member.name]
    generators = conduct.generators
    generator = state.replicas.membership.members.get(next(iter(generators), ""))
    if len(generators) != 1 or generator is None or state.replicas.membership.num("rollout") == 1:
        return member
    if conduct.num_elsewhere > 0:
        return member
    return min(member, generator, key=lambda one: _share_used(state, one.name))


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
        state.outbox.write(MemberLeft(name=name))
        reason = "it was not heard after the controller's restart"
        state.outbox.note("left", replica=name, reason=reason, num_leases=0)
    membership.awaited.clear()

"""Work given to replicas under leases, and taken from them."""

from __future__ import annotations

from collections.abc import Callable

from starling.common.ids import MAX_LEASE_CHARACTERS, LeaseKind, lease_id, lease_kind
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Send
from starling.controller.core.replicas.conduct import note_unanswered
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState


def grant(
    state: ControllerState,
    member: Member,
    kind: LeaseKind,
    subject: int | str,
    command: Callable[[str], wire.LeasedCommand],
    buffers: Buffers | Callable[[str], Buffers] = (),
    tokens: int = 0,
) -> str:
    """Give `member` a piece of work under a new lease, which is returned.

    `command` makes the message for a lease, and `buffers` its buffers where they depend on the lease; `tokens` are
    expected of a group to generate.
    """
    leases = state.replicas.leases
    leases.num_granted += 1
    lease = lease_id(kind, subject, state.incarnation, leases.num_granted)
    send = Send(member.name, command(lease), buffers(lease) if callable(buffers) else buffers)
    state.outbox.add(send)
    leases.grant(lease, kind, member.name, send, state.now, state.plan.timeouts.of(kind), tokens)
    state.replicas.slots.mark(member, kind)
    return lease


def restore_lease(state: ControllerState, member: Member, kind: LeaseKind, lease: str) -> None:
    """Put in force work that `member` was given by an earlier incarnation of the controller, or before it was lost."""
    found = state.group_of_lease(lease) if kind == "generate" else None
    tokens = found[1].expected_tokens if found is not None else 0
    state.replicas.leases.restore(lease, kind, member.name, state.now, state.plan.timeouts.of(kind), tokens)
    state.replicas.slots.mark(member, kind)


def release(state: ControllerState, peer: str, *leases: str) -> None:
    """Release these leases: the replica forgets their results.

    A text that is longer than any lease is none that a controller has granted, and gets no answer: many such texts
    together are more than a message holds.
    """
    if len(leases) != 1 or len(leases[0]) > MAX_LEASE_CHARACTERS:
        leases = tuple([lease for lease in leases if len(lease) <= MAX_LEASE_CHARACTERS])
    if leases:
        state.outbox.send(peer, wire.ReleaseLeases(leases=leases))


def revoke(state: ControllerState, peer: str, lease: str) -> bool:
    """End a lease of `peer` before its result, and release it there. Returns False when it does not hold the lease."""
    held = state.replicas.leases.settle(lease, peer)
    if held:
        release(state, peer, lease)
    return held


def requeue(state: ControllerState, dropped: list[str]) -> None:
    """Put the groups of these leases back into the state before their dispatch."""
    for lease in dropped:
        found, kind = state.group_of_lease(lease), lease_kind(lease)
        if found is not None and kind is not None:
            groups, group = found
            groups.requeue(group, kind)
    if dropped:
        state.dirty |= Dirty.DISPATCH | Dirty.SCORE


def take_back_groups(state: ControllerState, member: Member, *, is_counted: bool = True) -> None:
    """Requeue the groups that a rollout generates, because its weights are not those of a publication.

    `is_counted`: no other replica can be at fault.
    """
    if is_counted:
        note_unanswered(state, member, state.replicas.leases.all_of(member.name))
    dropped = state.replicas.leases.drop(member.name, state.now, "generate")
    if dropped:
        release(state, member.name, *dropped)
        requeue(state, dropped)

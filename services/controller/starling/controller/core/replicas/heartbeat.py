"""Heartbeats: a replica reports its whole state, and the controller answers with the difference."""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from starling.common.ranges import MAX_SLOTS
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.assignments import release, requeue, take_back_groups
from starling.controller.core.replicas.conduct import note_unanswered
from starling.controller.core.replicas.joining import welcome
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.reclaim import reclaim
from starling.controller.core.state import ControllerState
from starling.controller.core.training.results import on_policy_version
from starling.controller.core.weights.versions import check_outdated, set_held_version

MAX_GAUGES: Final = 64
"""Gauges of one replica that are kept: each snapshot of the telemetry repeats them."""
MAX_GAUGE: Final = 1e15
"""Largest absolute value of a gauge; others are left out, because the screen adds those of all replicas up."""
MAX_WAITS: Final = 256
"""Waits of one replica that are kept; a reward replica has one for each of its workers."""
MAX_HELD: Final = 4 * MAX_SLOTS
"""Leases of one heartbeat that are looked at. A replica has no more, besides those of results that wait for their
release, and each takes some ten microseconds."""
DRAINING: Final = RunStage.DRAINING
MAX_NAME_CHARACTERS: Final = 512
"""Characters of the name of a gauge, and of each text of a wait, that are kept."""


def on_heartbeat(state: ControllerState, member: Member, message: wire.Heartbeat) -> None:
    """Apply the reported state of a replica: its version, then its leases."""
    gauges = islice(message.gauges.items(), MAX_GAUGES)
    member.gauges = {name[:MAX_NAME_CHARACTERS]: value for name, value in gauges if abs(value) <= MAX_GAUGE}
    member.waits = tuple(map(_with_short_texts, message.waits[:MAX_WAITS]))
    _update_version(state, member, message.version)
    welcome(state, member)
    _reconcile_leases(state, member, message)
    _update_progress(state, member, message)
    if not member.has_reported:
        member.has_reported = True
        state.replicas.slots.mark(member)
        state.dirty = Dirty.ALL
    membership = state.replicas.membership
    if membership.awaited:
        membership.awaited.discard(member.name)
        state.dirty = Dirty.ALL
    draining = state.replicas.desired.draining.get(member.name)
    if draining is not None and draining.ordered_at is not None:
        state.outbox.send(member.name, wire.Drain(reason=draining.reason))
    if state.lifecycle.stage is DRAINING:
        state.outbox.send(member.name, wire.Drain(reason=state.lifecycle.reason))


def _with_short_texts(wait: wire.Wait) -> wire.Wait:
    """Return `wait` with only the beginning of each long text."""
    if max(len(wait.what), len(wait.on)) <= MAX_NAME_CHARACTERS:
        return wait
    return msgspec.structs.replace(wait, what=wait.what[:MAX_NAME_CHARACTERS], on=wait.on[:MAX_NAME_CHARACTERS])


def _update_progress(state: ControllerState, member: Member, message: wire.Heartbeat) -> None:
    """Keep the reported progress of the leases that the replica has."""
    reported = {held.lease: held.progress for held in message.leases[:MAX_HELD] if held.progress is not None}
    own = (lease.id for lease in state.replicas.leases.all_of(member.name)) if reported else ()
    member.progress = {lease: reported[lease] for lease in own if lease in reported}


def _update_version(state: ControllerState, member: Member, version: int) -> None:
    if member.role == "rollout":
        if version < 0 <= member.version:
            take_back_groups(state, member)  # its weights are torn: other rollouts need not wait for its next adoption
        has_reloaded = version == state.replicas.membership.initial_version > member.version  # by another engine
        if version < member.version or has_reloaded:
            set_held_version(state, member, version)
    elif member.role == "policy" and version > member.version:
        on_policy_version(state, member, version)


def _reconcile_leases(state: ControllerState, member: Member, message: wire.Heartbeat) -> None:
    """Release unknown leases, or reclaim them, send lost commands again, and requeue lost work."""
    grace_s = 2 * state.plan.heartbeat_s
    held = {held.lease for held in message.leases[:MAX_HELD]}
    unknown, resend, lost = state.replicas.leases.reconcile(member.name, held, state.now, grace_s)
    if not (unknown or resend or lost):
        return
    is_torn = member.role == "rollout" and message.version < 0
    forget = unknown if is_torn else [lease for lease in unknown if not reclaim(state, member, lease)]
    release(state, member.name, *forget)
    for send in resend:
        state.outbox.add(send)
    if lost:
        note_unanswered(state, member, lost)
        ended = [lease.id for lease in lost]
        requeue(state, ended)
        active = state.training.step
        if active is not None and active.shares.get(member.name) in ended:
            del active.shares[member.name]
        if member.role == "rollout":
            check_outdated(state, member)
        state.replicas.slots.mark(member)
        state.dirty = Dirty.ALL

"""Switching of shared devices: which side gets them, and the commands to sleep and to wake.

| side     | has the devices for                                                                               |
|----------|---------------------------------------------------------------------------------------------------|
| policies | steps, publications, states and checkpoints, catching up, and versions that are no longer on offer |
| rollouts | everything else: adoptions, groups, evaluations                                                    |

A published snapshot is in the memory of the host, so rollouts adopt it while the policies sleep. An evaluation ends
before the next step. Groups that rollouts have when a step is full (with `max_staleness` above 0) are given back with
their tokens so far, and resumed when the rollouts wake.
"""

from __future__ import annotations

from typing import Final, Literal

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.assignments import grant
from starling.controller.core.replicas.conduct import note_invalid
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.time_sharing import DeviceRole
from starling.controller.core.state import ControllerState
from starling.controller.core.weights.distribution import find_source
from starling.controller.core.weights.versions import is_publication_due, target_version

POLICY_WORK = ("train", "publish", "adopt", "save", "checkpoint")
ROLLOUT_WORK = ("publish", "adopt")
"""The work that a replica finishes before it is sent to sleep."""
STOP_SHARE: Final = 0.125
"""Share of the time of a graceful stop for which policies wait for one rollout: it can join, and be evicted, thrice."""


def switch_devices(state: ControllerState) -> None:
    """Send one side to sleep and then wake the other, if the other side is due."""
    sharing, membership = state.replicas.sharing, state.replicas.membership
    due = side_due(state)
    if due != sharing.active:
        sharing.active = due
        state.outbox.note("devices_switched", role=due)
        for member in membership.of("rollout"):
            state.replicas.slots.mark(member)
    others = membership.of(sharing.inactive)
    for member in others:
        if not sharing.is_asleep(member) and not _is_busy(state, member):
            sharing.reset(member)
            grant(state, member, "sleep", member.name, lambda lease: wire.Sleep(lease=lease))
    if sharing.obstacle(others, state.now):
        return
    for member in membership.of(due):
        if not sharing.has_devices(member) and not _is_busy(state, member):
            sharing.reset(member)
            grant(state, member, "wake", member.name, lambda lease: wire.Wake(lease=lease))


def evict_awake(state: ControllerState) -> None:
    """Evict and count rollouts for which the policies have waited as long as one sleep, or one adoption, may take.

    In all: one that says that it cannot sleep, hangs each time that it is to adopt, or leaves and joins again, would
    otherwise begin a new time limit for ever. Offers of weights have a sum of their own.
    """
    sharing, membership, before = state.replicas.sharing, state.replicas.membership, state.replicas.sharing.waited_at
    is_waiting = sharing.active == "policy" and not all(map(sharing.has_devices, membership.of("policy")))
    sharing.waited_at = state.now if is_waiting else None
    if before is None or not is_waiting:
        return
    leases = state.replicas.leases
    for name in sharing.awake(membership.of("rollout"), state.now):
        if leases.num(name, "publish"):
            continue
        work: Literal["adopt", "sleep"] = "adopt" if leases.num(name, "adopt") else "sleep"
        waits = membership.adopting_s if work == "adopt" else membership.awake_s
        waits[name] += state.now - before
        limit_s = _limit_s(state, work)
        if waits[name] >= limit_s:
            reason = f"the policies waited {limit_s:g} s in all for {name} to {work}"
            del waits[name]
            note_invalid(state, name, reason)
            if name in membership.members:
                evict(state, membership.members[name], reason)


def _limit_s(state: ControllerState, work: Literal["adopt", "sleep"]) -> float:
    """Return for how long policies wait for this work of one rollout, in all: a graceful stop must not fail for it."""
    limit_s = state.plan.timeouts.of(work)
    return min(limit_s, STOP_SHARE * state.plan.stop_s) if state.lifecycle.stopping else limit_s


def on_switched(state: ControllerState, member: Member, *, asleep: bool) -> None:
    """Note that a replica has released its devices, or has them again."""
    state.replicas.sharing.note_answer(member, asleep=asleep)
    if asleep:
        state.replicas.membership.awake_s.pop(member.name, None)
    state.replicas.slots.end_cooldown(member.name, state.now)  # it gave groups back only in order to sleep
    state.replicas.slots.mark(member)
    state.dirty = Dirty.ALL


def side_due(state: ControllerState) -> DeviceRole:
    """Return the side with the most urgent work on the devices."""
    plan, replicas = state.plan, state.replicas
    policies = replicas.membership.of("policy")
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping or state.training.step is not None:
        return "policy"
    if any(replicas.leases.of(member.name, *POLICY_WORK) for member in policies):
        return "policy"
    if state.version < plan.num_supervised_steps or any(member.version < state.version for member in policies):
        return "policy"
    if is_publication_due(state) or (plan.kind.publishes(plan) and _only_policies_can_offer(state)):
        return "policy"
    if state.evaluations.current is not None:
        return "rollout"
    if state.buffer.frozen_groups(state.version + 1) or state.buffer.is_full():
        return "policy"
    return "policy" if state.version >= plan.last_step else "rollout"


def _only_policies_can_offer(state: ControllerState) -> bool:
    """Say whether some rollout needs the newest version, and only a policy can offer it."""
    version = state.weights.version
    outdated = (state.replicas.membership.members[name] for name in state.weights.outdated)
    return any(
        target_version(state, member) == version and find_source(state, member, version) is None for member in outdated
    )


def _is_busy(state: ControllerState, member: Member) -> bool:
    work = POLICY_WORK if member.role == "policy" else ROLLOUT_WORK
    is_working = bool(state.replicas.leases.of(member.name, "sleep", "wake", *work))
    return is_working or not state.replicas.sharing.may_command(member, state.now)

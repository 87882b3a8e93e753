"""Scaling: desired numbers of replicas are set, and surplus replicas are drained.

    staying --surplus, or chosen by an operator--> finishing --no work left, or time is over--> leaving --Leave--> gone

A replica that finishes gets no further groups and no further step; it keeps what it has. A rollout, a reward or a
teacher is told to leave when it has no groups left, or after `controller.drain_s`: a rollout then gives back what it
has, with the tokens so far, and others resume it. A policy is told at the boundary of a step, when it has no work and
none reads weights from it. Of each role one replica stays, and a policy stays as long as no other one holds the newest
version. The order to leave is repeated with each heartbeat; a replica that does not follow it is evicted.
"""

from __future__ import annotations

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.group import GroupState
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import ReplicasScaled
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.replicas.scaling.autoscale import RolloutLoad
from starling.controller.core.replicas.scaling.desired import (
    Draining,
    check_count,
    check_role,
    named,
    scaled_text,
    surplus,
)
from starling.controller.core.state import ControllerState


def scale(state: ControllerState, role_name: str, num: int, request: str = "") -> str:
    """Set the desired number of replicas of a role. Returns the answer. Raises ValueError with one sentence."""
    desired = state.replicas.desired
    if request in desired.requests:
        return desired.requests[request]
    role = check_role(role_name)
    _check_running(state)
    _check_has(state, role)
    check_count(role, num)
    if role == "policy":
        _check_policies(state, num)
    _check_nodes(state, role, num)
    answer = scaled_text(role, num, len(_staying(state, role)))
    _set(state, role, num, "", request, answer)
    return answer


def drain_replica(state: ControllerState, name: str, request: str = "") -> str:
    """Drain one replica and desire one less of its role. Returns the answer. Raises ValueError with one sentence."""
    desired, membership = state.replicas.desired, state.replicas.membership
    if request in desired.requests:
        return desired.requests[request]
    _check_running(state)
    member = membership.members.get(name)
    if member is None:
        names = ", ".join(sorted(membership.members)[:16]) or "none"
        raise ValueError(f"there is no replica {name!r:.100} in the run; the present ones are: {names}")
    if name in desired.draining:
        return f"{name} is being drained already"
    if member.is_follower:
        _begin(state, member, "an operator drains it")
        return f"{name} is being drained"
    others = [one for one in _staying(state, member.role) if one is not member]
    if not others:
        raise ValueError(f"{name} is the only {member.role} of the run; scale {member.role} up first, or stop the run")
    num = max(1, desired.counts.get(member.role, max(len(others) + 1, _num_at_start(state, member.role))) - 1)
    answer = f"{name} is being drained, and {named(num, member.role)} desired"
    _set(state, member.role, num, name, request, answer)
    return answer


def drain_surplus(state: ControllerState) -> None:
    """Begin to drain what is chosen or surplus, and tell replicas to leave that have finished."""
    desired, membership = state.replicas.desired, state.replicas.membership
    if desired.is_unset or membership.is_awaiting(state.now):
        return
    for name in list(desired.chosen):
        member = membership.members.get(name)
        if member is not None and name not in desired.draining and _may_go(state, member):
            _begin(state, member, "an operator drains it")
    for role, num in desired.counts.items():
        staying = [member.name for member in _staying(state, role) if member.name not in desired.chosen]
        for name in surplus(staying, num):
            member = membership.members[name]
            if _may_go(state, member):
                _begin(state, member, f"{named(num, role)} {'is' if num == 1 else 'are'} desired")
    for name in list(desired.draining):
        _continue_draining(state, membership.members[name], desired.draining[name])


def autoscale(state: ControllerState) -> None:
    """Measure how busy the rollouts are, and set another number of them where the rule says so."""
    window = state.replicas.autoscale
    assert window is not None, "there is a rule"
    staying = [member for member in _staying(state, "rollout") if member.num_slots]
    num = len(staying)
    desired = state.replicas.desired.counts.get("rollout", max(num, state.plan.num_rollouts))
    if not 0 < num <= desired or not _is_generating(state):
        window.interrupt()
        return
    leases, buffer = state.replicas.leases, state.buffer
    slots = sum(member.num_slots for member in staying)
    taken = sum(leases.num(member.name, "generate") for member in staying)
    is_waiting = state.training.step is None and not buffer.is_full() and not leases.has("publish")
    idle = 0.0 if buffer.count(GroupState.WAITING) else max(0.0, 1 - taken / slots)
    load = RolloutLoad(num, desired, waiting=is_waiting, starving=is_waiting and taken >= slots, idle=idle)
    wanted = window.measure(state.now, state.version, load)
    if wanted is not None and wanted != desired:
        _set(state, "rollout", wanted, "", "", "")


def _is_generating(state: ControllerState) -> bool:
    """Say whether the run is in the midst of reinforcement learning, and evaluates nothing."""
    plan = state.plan
    return (
        state.lifecycle.stage is RunStage.RUNNING
        and not state.lifecycle.stopping
        and state.replicas.had_quorum
        and not state.replicas.membership.is_awaiting(state.now)
        and state.evaluations.current is None
        and plan.num_supervised_steps <= state.version
        and state.buffer.num_frozen_steps < plan.num_steps
        and state.replicas.membership.num("policy") > 0
    )


def _set(state: ControllerState, role: Role, num: int, chosen: str, request: str, answer: str) -> None:
    record = ReplicasScaled(role=role, num=num, drained=chosen, request=request, answer=answer)
    state.outbox.write(record)
    state.replicas.desired.set(role, num, chosen, request, answer)
    state.outbox.note("scaled", role=role, num=num, cause="an operator" if request else "autoscale")
    drain_surplus(state)


def _check_running(state: ControllerState) -> None:
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping:
        raise ValueError("the run is ending; its replicas leave, and no further ones are placed")


def _check_has(state: ControllerState, role: Role) -> None:
    """Raise ValueError when the run has no use for replicas of this role."""
    plan = state.plan
    has = {
        "policy": plan.kind.trains or plan.fans_out,
        "rollout": plan.kind.needs_rollouts(plan),
        "reward": plan.num_rewards > 0,
        "teacher": plan.has_teachers,
    }
    if not has[role]:
        raise ValueError(f"this run has no {role}: nothing would be given to one")


def _check_policies(state: ControllerState, num: int) -> None:
    """Raise ValueError when the policies of this run cannot make steps together."""
    policies = state.replicas.membership.of("policy")
    if state.plan.fans_out and num > 1:
        raise ValueError("in this run one policy reads the weights of the model folder; it cannot have more")
    if not policies:
        raise ValueError("no policy has joined yet; try again when one has")
    if num > 1 and not all(member.shares_steps for member in policies):
        raise ValueError(
            f"{policies[0].name} makes its steps alone; begin the run with policy.parallel.elastic = true to scale its "
            "policies"
        )


def _check_nodes(state: ControllerState, role: Role, num: int) -> None:
    """Raise ValueError when the launcher would have to place a replica whose nodes meet where those of another do."""
    present = max(1, len(_staying(state, role)))
    if role in state.plan.single_roles and num > present:
        raise ValueError(
            f"the nodes of a {role} of this run meet at launch.{role}_rdzv, and the launcher cannot place a second "
            f"{role} there; start it by hand, with an address of its own, or use the launcher slurm or ray, which "
            "place whole replicas"
        )


def _num_at_start(state: ControllerState, role: Role) -> int:
    plan = state.plan
    numbers = {
        "policy": plan.num_policies,
        "rollout": plan.num_rollouts,
        "reward": plan.num_rewards,
        "teacher": plan.num_teachers,
    }
    return numbers[role]


def _staying(state: ControllerState, role: Role) -> list[Member]:
    """Return the members of a role that are not being drained."""
    draining = state.replicas.desired.draining
    return [member for member in state.replicas.membership.of(role) if member.name not in draining]


def _may_go(state: ControllerState, member: Member) -> bool:
    """Say whether another replica can do the work of `member`, now."""
    if member.is_follower:
        return True
    others = [one for one in _staying(state, member.role) if one is not member]
    if member.role == "policy":
        return any(one.version == state.weights_version and one.has_reported for one in others)
    return bool(others)


def _begin(state: ControllerState, member: Member, reason: str) -> None:
    """Begin to drain a replica: it gets no more work."""
    state.replicas.desired.draining[member.name] = Draining(reason, state.now + state.plan.drain_s)
    state.replicas.slots.mark(member)
    if state.evaluations.current is not None:
        state.evaluations.current.given_back_by.add(member.name)
    state.outbox.note("draining", replica=member.name, reason=reason)
    state.dirty = Dirty.ALL


def _continue_draining(state: ControllerState, member: Member, draining: Draining) -> None:
    """Order a replica to leave that has finished, or whose time is over; evict one that does not follow the order."""
    if draining.ordered_at is not None:
        limit_s = state.plan.drain_s + state.plan.lease_s
        if state.now - draining.ordered_at > limit_s:
            evict(state, member, f"{member.name} was told to leave, and did not within {limit_s:g} s")
    elif _has_finished(state, member, draining):
        draining.ordered_at = state.now
        state.outbox.send(member.name, wire.Drain(reason=draining.reason))


def _has_finished(state: ControllerState, member: Member, draining: Draining) -> bool:
    leases = state.replicas.leases
    if member.role == "policy":
        return not leases.all_of(member.name) and not _is_read(state, member.name)
    return state.now >= draining.deadline or not leases.of(member.name, *SLOT_KINDS)


def _is_read(state: ControllerState, source: str) -> bool:
    """Say whether any replica pulls weights from `source`."""
    membership, leases = state.replicas.membership, state.replicas.leases
    readers = [*membership.of("policy"), *membership.adopters()]
    sends = [lease.send for member in readers for lease in leases.all_of(member.name) if lease.kind == "adopt"]
    commands = [send.message for send in sends if send is not None]
    return any(isinstance(command, wire.AdoptWeights) and command.source == source for command in commands)

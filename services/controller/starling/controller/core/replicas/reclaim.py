"""Reclaimed leases: work that a replica reports and the controller does not know of.

This happens after the controller died (no journal holds its leases), and after a connection was lost for a moment. Work
that fits the state is put in force again, so that it is not done twice. All other work is released.
"""

from __future__ import annotations

from starling.common.ids import (
    LEASE_KINDS,
    MAX_LEASE_CHARACTERS,
    lease_incarnation,
    lease_kind,
    lease_order,
    lease_subject,
    whole_number,
)
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.admission import required_version
from starling.controller.core.groups.group import Group, Groups, GroupState, is_unscored, lacks_teacher
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.assignments import restore_lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import can_be_dispatched
from starling.controller.core.training.step import ActiveStep
from starling.controller.core.weights.versions import target_version


def reclaim(state: ControllerState, member: Member, lease: str) -> bool:
    """Put `lease`, which `member` reports, in force if it fits the state. Returns False when it does not."""
    if len(lease) > MAX_LEASE_CHARACTERS or state.replicas.leases.get(lease) is not None:
        return False  # what is in force has a holder: this replica, or another whose lease it names
    kind = lease_kind(lease)
    if kind is None or not _may_have_had(state, member, lease):
        return False
    assert kind in LEASE_KINDS
    subject, is_older = lease_subject(lease), lease_incarnation(lease) < state.incarnation
    fits = False
    match kind, member.role:
        case "generate", "rollout":
            fits = _generate(state, member, subject, lease)
        case "score", "reward":
            fits = _score(state, member, lease)
        case "teach", "teacher":
            fits = _score_tokens(state, member, lease)
        case "train", "policy":
            fits = _train(state, member, subject, lease)
        case "publish", "policy" | "rollout":
            # A rollout whose offers are refused would only keep others from offering.
            fits = is_older and subject == str(member.version) and state.lifecycle.stage is RunStage.RUNNING
            has_one = state.replicas.leases.num(member.name, "publish") > 0
            fits = fits and (member.role == "policy" or (member.can_offer and not has_one))
            if fits and member.role == "policy":
                state.weights.requested = max(state.weights.requested, member.version)
        case "adopt", "rollout":
            target = target_version(state, member)
            fits = member.version != target and subject == str(target)
            fits = fits and not state.replicas.leases.num(member.name, "adopt")
        case "save", "policy":
            fits = is_older and whole_number(subject) >= 0
    if fits:
        restore_lease(state, member, kind, lease)
        if kind == "adopt":
            state.weights.outdated.pop(member.name, None)
    return fits


def would_be_taken(state: ControllerState, sender: str, incarnation: int, lease: str) -> bool:
    """Say whether a result of `lease` for a group would be taken from this replica: it has the lease, or reclaims it.

    Changes nothing.
    """
    member = state.replicas.membership.get(sender, incarnation)
    if member is None:
        return False
    held = state.replicas.leases.get(lease)
    if held is not None:
        return held.peer == sender
    if not _may_have_had(state, member, lease):
        return False
    match lease_kind(lease), member.role:
        case "generate", "rollout":
            return _waiting_group(state, member, lease_subject(lease), lease) is not None
        case "teach", "teacher":
            return _group_for_teacher(state, member, lease) is not None
    return False


def _may_have_had(state: ControllerState, member: Member, lease: str) -> bool:
    """Say whether `member` had this lease, as far as this incarnation of the controller can know."""
    if lease.count(":") != 2 or not 0 < lease_incarnation(lease) <= state.incarnation:
        return False
    # A lease of this incarnation may be settled, and still be in a heartbeat that was on its way; or it was granted to
    # another replica, or is made up.
    return lease_incarnation(lease) < state.incarnation or state.replicas.leases.was_dropped(lease, member.name)


def _waiting_group(state: ControllerState, member: Member, subject: str, lease: str) -> tuple[Groups, Group] | None:
    """Return the group, and what holds it, that `lease` is to generate, if `member` can have it."""
    found = state.find_group(subject)
    if found is None or state.replicas.leases.num(member.name, "generate") >= member.num_slots:
        return None
    group = found[1]
    if group.state is not GroupState.WAITING or lease_order(lease) <= group.floor:
        return None
    evaluation = state.evaluations.current
    if group.purpose != "train" and (evaluation is None or member.version != evaluation.version):
        return None
    return found


def _generate(state: ControllerState, member: Member, subject: str, lease: str) -> bool:
    found = _waiting_group(state, member, subject, lease)
    if found is None:
        return False
    groups, group = found
    if group.purpose == "train":
        # Its dispatch had the same bound: its place in the order of training only moves forward.
        groups.lease(group, required_version(state, group))
        return True
    evaluation = state.evaluations.current
    assert evaluation is not None, "a group that is not trained is of an evaluation"
    evaluation.pinned.add(member.name)
    groups.lease(group, evaluation.version)
    return True


def _score(state: ControllerState, member: Member, lease: str) -> bool:
    found = state.group_of_lease(lease)
    if found is None or not is_unscored(found[1]) or not _is_of_these_completions(found[1], lease):
        return False
    if state.replicas.leases.num(member.name, "score") >= member.num_slots:
        return False
    found[1].score_lease = lease
    return True


def _score_tokens(state: ControllerState, member: Member, lease: str) -> bool:
    group = _group_for_teacher(state, member, lease)
    if group is None:
        return False
    group.teacher_lease = lease
    return True


def _group_for_teacher(state: ControllerState, member: Member, lease: str) -> Group | None:
    """Return the group of `lease`, if it lacks a teacher and `member` can have it."""
    found = state.group_of_lease(lease)
    if found is None or not found[0].needs_teacher or not lacks_teacher(found[1]):
        return None
    num = state.replicas.leases.num(member.name, "teach")
    if num >= member.num_slots or not _is_of_these_completions(found[1], lease):
        return None
    return found[1]


def _is_of_these_completions(group: Group, lease: str) -> bool:
    """Say whether `lease` is about the present completions of the group, and not about some that were thrown away."""
    return lease_order(lease) > max(lease_order(group.generated_by), group.floor)


def _train(state: ControllerState, member: Member, subject: str, lease: str) -> bool:
    """Reclaim a step. A policy that shares steps gets it again, because the other shares are not known."""
    step = whole_number(subject)
    if member.shares_steps or step < 0 or step != member.version + 1:
        return False
    if step == state.version + 1:
        if not can_be_dispatched(state, step) or state.training.step is not None:
            return False
        state.training.step = ActiveStep(step, shares={member.name: lease})
        state.dirty |= Dirty.TRAIN
        return True
    return step <= state.version

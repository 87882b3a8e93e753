"""Work that a replica has, and the controller does not know of: taken up where it fits, so that it is not done twice.

That happens after the controller died (what leases there were is in no journal), and after a connection was lost for a
moment. What does not fit any more is to be forgotten by whoever has it.
"""

from __future__ import annotations

from starling.common.ids import LEASE_KINDS, lease_incarnation, lease_kind, lease_order, lease_subject
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.group import Group, GroupState, wants_scores, wants_teacher
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import ActiveStep


def claim(state: ControllerState, member: Member, lease: str) -> bool:
    """Put `lease`, which `member` says it has, in force if that fits the state. Returns False when it does not."""
    kind = lease_kind(lease)
    if kind is None or lease.count(":") != 2 or not 0 < lease_incarnation(lease) <= state.incarnation:
        return False
    assert kind in LEASE_KINDS
    subject = lease_subject(lease)
    # One of this incarnation may be settled: a heartbeat that was on its way tells of it all the same.
    is_older = lease_incarnation(lease) < state.incarnation
    fits = False
    match kind, member.role:
        case "generate", "rollout":
            fits = _generate(state, member, subject)
        case "score", "reward":
            fits = _score(state, member, lease)
        case "teach", "teacher":
            fits = _teach(state, member, lease)
        case "train", "policy":
            fits = _train(state, member, subject, lease)
        case "publish", _:
            fits = is_older and subject == str(member.version) and state.ending.stage is RunStage.RUNNING
            if fits and member.role == "policy":
                state.rounds.asked = max(state.rounds.asked, member.version)
        case "adopt", "rollout":
            wanted = str(state.target(member)) if member.version != state.target(member) else ""
            fits = subject == wanted and not state.leases.num(member.name, "adopt")
        case "save", "policy":
            fits = is_older
    if fits:
        state.claim(member, kind, lease)
        if kind == "adopt":
            state.behind.pop(member.name, None)
    return fits


def _generate(state: ControllerState, member: Member, subject: str) -> bool:
    found = state.find(subject)
    if found is None or state.leases.num(member.name, "generate") >= member.num_slots:
        return False
    groups, group = found
    if group.state is not GroupState.WAITING:
        return False
    if group.purpose == "train":
        # Its bound was set at its dispatch, by the same rule: its place in the order of training only moves forward.
        groups.lease(group, state.required_version(group))
        return True
    evaluation = state.evaluation
    if evaluation is None or member.version != evaluation.version:
        return False
    evaluation.pinned.add(member.name)
    groups.lease(group, evaluation.version)
    return True


def _score(state: ControllerState, member: Member, lease: str) -> bool:
    found = state.group_of(lease)
    if found is None or not wants_scores(found[1]) or not _is_of_these_completions(found[1], lease):
        return False
    if state.leases.num(member.name, "score") >= member.num_slots:
        return False
    found[1].scoring = lease
    return True


def _teach(state: ControllerState, member: Member, lease: str) -> bool:
    found = state.group_of(lease)
    if found is None or not found[0].is_taught or not wants_teacher(found[1]):
        return False
    if state.leases.num(member.name, "teach") >= member.num_slots or not _is_of_these_completions(found[1], lease):
        return False
    found[1].teaching = lease
    return True


def _is_of_these_completions(group: Group, lease: str) -> bool:
    """Say whether `lease` is about the completions that the group has, and not about some that were thrown away."""
    return lease_order(lease) > lease_order(group.generated_by)


def _train(state: ControllerState, member: Member, subject: str, lease: str) -> bool:
    """A policy that shares steps is dealt the step again: who else had a share of it nobody knows."""
    if member.shares_steps or not subject.isdigit() or int(subject) != member.version + 1:
        return False
    step = int(subject)
    if step == state.version + 1:
        is_known = step <= state.plan.num_supervised_steps or state.plan.replays
        dealt = is_known or bool(state.ledger.sealed(step))
        if not dealt or state.step is not None:
            return False
        state.step = ActiveStep(step, shares={member.name: lease})
        state.due |= Dirty.TRAIN
        return True
    return step <= state.version

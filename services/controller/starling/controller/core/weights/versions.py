"""Versions of rollouts: which one each holds, which one it should hold, and what a change of it makes due."""

from __future__ import annotations

from starling.controller.core.dirty import Dirty
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState


def set_held_version(state: ControllerState, member: Member, version: int) -> None:
    """Note which version a rollout holds (-1 for none), and whether it needs another one."""
    state.weights.remove_holder(member)
    member.version = version
    state.weights.add_holder(member)
    state.replicas.slots.mark(member)
    check_outdated(state, member)


def target_version(state: ControllerState, member: Member) -> int:
    """Return the version that a rollout should hold: the newest, or that of the evaluation that it is pinned to."""
    evaluation = state.evaluations.current
    if evaluation is not None and member.name in evaluation.pinned:
        return evaluation.version
    return state.weights.version


def check_outdated(state: ControllerState, member: Member) -> None:
    """Note whether a rollout needs another version than it holds."""
    target = target_version(state, member)
    if member.version != target and target >= 0 and not state.replicas.leases.num(member.name, "adopt"):
        state.weights.outdated[member.name] = None
        state.dirty |= Dirty.ADOPT
    else:
        state.weights.outdated.pop(member.name, None)
    state.dirty |= Dirty.DISPATCH
    if state.evaluations.current is not None:
        state.evaluations.unpinned[member.name] = None
        state.dirty |= Dirty.EVALUATE

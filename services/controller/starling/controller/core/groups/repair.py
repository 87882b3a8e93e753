"""Repair of steps: a group that cannot be trained is taken out of its step, and generated again.

A journal of an older controller may hold such groups, since it stored results unchecked. They are found when the
controller starts. And a policy may find what the controller cannot know, as a token beyond the vocabulary of its model.
"""

from __future__ import annotations

from collections.abc import Collection

from starling.controller.core.groups.group import Group, GroupState
from starling.controller.core.groups.results import retry
from starling.controller.core.groups.validation import InvalidResultError, check_stored
from starling.controller.core.records import StepReopened
from starling.controller.core.replicas.assignments import revoke
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import PolicyGroup


def repair_restored_groups(state: ControllerState) -> None:
    """Let every restored group be generated again that no policy could train."""
    kind = state.plan.kind
    if not kind.trains or kind.reads_trajectories:
        return
    problems: dict[int, str] = {}
    frozen = state.buffer.frozen_groups(state.version + 1)
    waiting = [group for group in state.buffer.live() if group.state in (GroupState.GENERATED, GroupState.SCORED)]
    for group in (*frozen, *waiting):
        try:
            check_stored(group.trajectories, group.tensors, group.buffers, group.rewards)
        except InvalidResultError as error:
            problems[group.ordinal] = str(error)
    bad = [group for group in frozen if group.ordinal in problems]
    if bad:
        _reopen(state, state.version + 1, f"prompt {bad[0].prompt.id}: {problems[bad[0].ordinal]}")
    for ordinal in sorted(problems):
        _generate_again(state, ordinal, problems[ordinal])


def reject_groups(state: ControllerState, step: int, prompts: Collection[str], reason: str) -> bool:
    """Take the groups of these prompts out of `step`, which a policy cannot train with them.

    Returns False when the step is not the next one, or has no such group.
    """
    rejected = [group.ordinal for group in state.buffer.frozen_groups(step) if group.prompt.id in prompts]
    if step != state.version + 1 or not rejected:
        return False
    if state.plan.kind.reads_trajectories:  # nothing generates another group in its place
        ordinal = rejected[0]
        state.lifecycle.fail(f"group {ordinal} of the trajectory files cannot be trained: {reason}", state.now)
        return True
    active, state.training.step = state.training.step, None
    for name, lease in active.shares.items() if active is not None else ():
        revoke(state, name, lease)
    # The others may still compute the batch with these groups: in the same process groups its gradients would be added
    # to those of the next one.
    state.training.group = PolicyGroup((), "")
    _reopen(state, step, reason)
    for ordinal in rejected:
        _generate_again(state, ordinal, reason)
    return True


def _reopen(state: ControllerState, step: int, reason: str) -> None:
    state.outbox.write(StepReopened(step=step, reason=reason))
    state.buffer.reopen(step)
    state.outbox.note("reopened", step=step, reason=reason)


def _generate_again(state: ControllerState, ordinal: int, reason: str) -> None:
    group: Group | None = state.buffer.get(ordinal)
    assert group is not None, "a group of the buffer is live"
    retry(state, state.buffer, group, f"it cannot be trained: {reason}", group.generator)

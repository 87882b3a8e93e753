"""Repair of steps: a group that cannot be trained is taken out of its step, and generated again.

A journal of an older controller may hold such groups, since it stored results unchecked, and so may that of a run which
is resumed with other settings. They are found when the controller starts. And a policy may find what the controller
cannot know, as a token beyond the vocabulary of its model.
"""

from __future__ import annotations

from collections.abc import Collection

from starling.common.wire.tensors import TEACHER_TENSORS
from starling.controller.core.groups.group import Group, GroupState
from starling.controller.core.groups.partial import PartialCompletions
from starling.controller.core.groups.results import check_partial_recorded, check_recorded, retry
from starling.controller.core.groups.validation.validation import InvalidResultError, check_stored, check_teacher_names
from starling.controller.core.records import GroupRequeued, StepReopened
from starling.controller.core.replicas.assignments import revoke
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import PolicyGroup


def repair_restored_groups(state: ControllerState) -> None:
    """Let every restored group be generated again that no policy could train."""
    kind = state.plan.kind
    if not kind.trains or kind.reads_trajectories:
        return
    damaged: dict[int, str] = {}
    unlike: dict[int, str] = {}
    frozen = state.buffer.frozen_groups(state.version + 1)
    waiting = [group for group in state.buffer.live() if group.state in (GroupState.GENERATED, GroupState.SCORED)]
    for group in (*frozen, *waiting):
        try:
            check_stored(group.trajectories, group.tensors, group.buffers, group.rewards)
        except InvalidResultError as error:
            damaged[group.ordinal] = str(error)
            continue
        try:
            _check_settings(state, group)
        except InvalidResultError as error:
            unlike[group.ordinal] = str(error)
    problems = damaged | unlike
    bad = [group for group in frozen if group.ordinal in problems]
    if bad:
        _reopen(state, state.version + 1, f"prompt {bad[0].prompt.id}: {problems[bad[0].ordinal]}")
    for ordinal in sorted(damaged):
        _generate_again(state, ordinal, damaged[ordinal])
    for ordinal in sorted(unlike):
        _begin_anew(state, ordinal, unlike[ordinal])
    for group in state.buffer.live():
        if group.partial is not None and not _can_be_resumed(state, group, group.partial):
            group.partial = None


def _check_settings(state: ControllerState, group: Group) -> None:
    """Check that a group has what others have under the settings of the run, which is resumed with others than before.

    Raises:
        InvalidResultError: naming what it has.
    """
    check_recorded(state, group, group.tensors)
    of_teacher = [tensor for tensor in group.tensors if tensor.name in TEACHER_TENSORS]
    if of_teacher:
        check_teacher_names(group.num_tokens, of_teacher, state.plan.teacher_top_k)


def _can_be_resumed(state: ControllerState, group: Group, partial: PartialCompletions) -> bool:
    """Say whether a rollout can resume partial completions under the settings of the run."""
    try:
        check_recorded(state, group, partial.tensors)
        check_partial_recorded(state, group, partial.tensors)
    except InvalidResultError:
        return False
    return True


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
    group = _live_group(state, ordinal)
    retry(state, state.buffer, group, f"it cannot be trained: {reason}", group.generator)


def _begin_anew(state: ControllerState, ordinal: int, reason: str) -> None:
    """Generate a group again that other settings led to: that costs no try, and counts against no replica."""
    group = _live_group(state, ordinal)
    state.buffer.regenerate(group, group.tries, (state.incarnation, state.replicas.leases.num_granted))
    state.outbox.write(GroupRequeued(key=group.key, tries=group.tries, floor=group.floor))
    state.outbox.note("begun_anew", prompt=group.prompt.id, reason=f"it was made under other settings: {reason}")


def _live_group(state: ControllerState, ordinal: int) -> Group:
    group: Group | None = state.buffer.get(ordinal)
    assert group is not None, "a group of the buffer is live"
    return group

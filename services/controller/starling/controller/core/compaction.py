"""Compaction of the journal: the whole state as one record, which takes the place of all records before it.

    restore(records before) == restore(StateCompacted, contents of the live groups)

A run of a month then restarts as fast as one of an hour. The record is small, because it holds no completions: those of
the live groups stay in the journal and follow it as kept entries. docs/decisions/0009-journal.md gives the reasons.
"""

from __future__ import annotations

from starling.controller.core import records
from starling.controller.core.groups.group import Group, GroupState
from starling.controller.core.groups.partial import PartialCompletions
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import JournalEntry, StateCompacted
from starling.controller.core.state import ControllerState


def compact(state: ControllerState) -> StateCompacted | None:
    """Return the record of a state that all records so far have led to; None for a run that is about to end."""
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping:
        return None
    return StateCompacted(
        incarnation=state.incarnation,
        version=state.version,
        buffer=state.buffer.summary(),
        evaluations=state.evaluations.summary(),
        replicas=state.replicas.summary(),
        weights=state.weights.summary(),
        training=state.training.summary(),
    )


def restore_compacted(state: ControllerState, record: StateCompacted) -> None:
    """Bring a fresh `state` to where the records that `record` has replaced had led."""
    state.version = record.version
    state.training.restore(record.training, state.buffer)
    state.buffer.restore(record.buffer, state.data.prompts.prompt)
    state.evaluations.restore(record.evaluations, state.data.held_out)
    state.replicas.restore(record.replicas)
    state.weights.restore(record.weights)


def fill(group: Group, entry: JournalEntry) -> None:
    """Add the contents of a kept entry to a group that was restored from its summary.

    The journal may still have contents that the group lost with a change of the data: these are left out.
    """
    payload, has_completions = entry.payload, group.state is not GroupState.WAITING
    match entry.record:
        case records.CompletionsStored(trajectories=trajectories, tensors=tensors) if has_completions:
            group.trajectories, group.tensors, group.buffers = trajectories, tensors, payload
        case records.TeacherLogprobsStored(tensors=tensors) if has_completions:
            group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *payload)
        case records.PartialCompletionsStored(partial=completions, tensors=tensors) as stored if group.partial:
            oldest, newest = stored.oldest_version, stored.newest_version
            group.partial = PartialCompletions(completions, tensors, payload, oldest, newest, stored.giver)

"""Groups from records, of the journal or of trajectory files, and groups that are written to files.

Without a policy, answered groups are written to files in the order of prompts:

| record or command | meaning                                                                                         |
|-------------------|-------------------------------------------------------------------------------------------------|
| `StepFrozen`      | the groups of the next file are fixed; after any crash the file is written with these groups    |
| `Store`           | the shell writes the file, atomically; a file that exists is left as it is                      |
| `StepCommitted`   | the file is on disk: its groups leave, and the journal may drop their completions               |
"""

from __future__ import annotations

from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Fetch, Store
from starling.controller.core.groups.group import Group
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    RewardsStored,
    StoredGroup,
    TeacherLogprobsStored,
)
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import ActiveStep

WRITER = "controller"
"""The holder of the only share of a step, where a file takes its place."""


# --- groups from records ----------------------------------------------------------------------------------------------


def fetch_step(state: ControllerState, step: int) -> None:
    """Request the records of a step, unless they are being read."""
    if state.training.fetching != step:
        state.training.fetching, state.training.fetched = step, None
        state.outbox.add(Fetch(step))


def take_fetched(state: ControllerState, step: int) -> list[Group] | None:
    """Return the groups of a step whose records were read, and forget them; None if they were not."""
    fetched = state.training.fetched
    if fetched is None or fetched[0] != step:
        return None
    state.training.fetched = None
    return _groups_of(state, fetched[1])


def load_groups(state: ControllerState, step: int) -> list[Group]:
    """Return the groups of `step` in a run that trains from files; nothing before they are read."""
    groups = state.buffer.frozen_groups(step)
    if groups:  # they were dispatched to a policy that is gone
        return groups
    if state.lifecycle.stopping:
        return []
    loaded = take_fetched(state, step)
    if loaded is None:
        fetch_step(state, step)
        return []
    if len(loaded) != state.plan.prompts_per_step:
        state.lifecycle.fail(
            f"the files have {len(loaded)} groups of step {step}, not {state.plan.prompts_per_step}", state.now
        )
        return []
    if state.plan.compares_scores and (lacking := _unscored(state, loaded)):
        state.lifecycle.fail(lacking, state.now)
        return []
    return state.buffer.load(step, loaded)


def _unscored(state: ControllerState, groups: list[Group]) -> str:
    """Return which group lacks the scores of a scorer, in one sentence; it would count as one of equal scores."""
    for group in groups:
        for scorer in state.plan.scorers:
            if scorer.label not in group.components:
                return (
                    f"the files have no scores of {scorer.label!r} for prompt {group.prompt.id}, which the algorithm "
                    "of policy.algorithm.name takes one by one"
                )
    return ""


def _groups_of(state: ControllerState, entries: tuple[JournalEntry, ...]) -> list[Group]:
    """Return the groups of a committed step from its records."""
    groups: dict[str, Group] = {}
    for entry in entries:
        match entry.record:
            case CompletionsStored(key=key, trajectories=trajectories, tensors=tensors, temperature=temperature):
                ordinal = int(key[1:])
                group = groups[key] = Group(ordinal, state.data.prompts.prompt(ordinal), "train")
                group.trajectories, group.tensors, group.buffers = trajectories, tensors, entry.payload
                group.temperature = temperature
            case TeacherLogprobsStored(key=key, tensors=tensors) if key in groups:
                group = groups[key]
                group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *entry.payload)
            case RewardsStored(key=key, rewards=rewards, components=components) if key in groups:
                groups[key].rewards, groups[key].components = rewards, components
                groups[key].evaluation_scores = entry.record.evaluation_scores
    return [group for group in groups.values() if group.rewards and len(group.buffers) == len(group.tensors)]


# --- groups to files --------------------------------------------------------------------------------------------------


def freeze_next(state: ControllerState, step: int) -> list[Group]:
    """Freeze and return the groups of `step`, if they are complete, and record which groups they are."""
    groups = state.buffer.freeze_next(step)
    if groups:
        state.outbox.write(state.buffer.frozen_record(step))
    return groups


def write_file(state: ControllerState) -> None:
    """Freeze the groups of the next file when they are answered, and have it written."""
    step = state.version + 1
    if state.training.step is not None or step > state.plan.last_step:
        return
    groups = state.buffer.frozen_groups(step) or freeze_next(state, step)
    if groups:
        state.training.step = ActiveStep(step, shares={WRITER: ""})
        store(state, step, groups)


def store(state: ControllerState, step: int, groups: list[Group]) -> None:
    """Have the groups of a step written to a file."""
    state.outbox.add(Store(step, tuple(_to_stored(state, group) for group in groups)))


def on_stored(state: ControllerState, step: int) -> None:
    """Note that the groups of a step are on disk; without a policy, this makes the step."""
    active = state.training.step
    if not state.plan.kind.trains and active is not None and active.number == step:
        active.shares.clear()
        active.made_by.add(WRITER)
        state.dirty |= Dirty.TRAIN


def _to_stored(state: ControllerState, group: Group) -> StoredGroup:
    return StoredGroup(
        ordinal=group.ordinal,
        prompt=group.prompt,
        trajectories=group.trajectories,
        rewards=group.rewards if state.plan.num_rewards else (),
        components=group.components,
        evaluation_scores=group.evaluation_scores,
        tensors=group.tensors,
        buffers=group.buffers,
        temperature=group.temperature,
        problem=group.problem if not group.trajectories else "",
    )

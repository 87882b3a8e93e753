"""Groups that were generated before, as records tell them: of the journal, or of files that another run wrote."""

from __future__ import annotations

from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Store
from starling.controller.core.groups.group import Group
from starling.controller.core.groups.stored import StoredGroup
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    RewardsStored,
    StepFrozen,
    TeacherLogprobsStored,
)
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import ActiveStep


def recalled(state: ControllerState, step: int) -> list[Group]:
    """Return the groups of `step` in a run that replays, once they are read; have them read, and return nothing."""
    groups = state.ledger.sealed(step)
    if groups:  # who was dealt them is gone
        return groups
    if state.ending.stopping:
        return []
    if state.fetched is None or state.fetched[0] != step:
        if state.fetching != step:
            state.fetch(step)
        return []
    groups, state.fetched = groups_of(state, state.fetched[1]), None
    if len(groups) != state.plan.prompts_per_step:
        state.ending.fail(
            f"the files have {len(groups)} groups of step {step}, not {state.plan.prompts_per_step}", state.now
        )
        return []
    return state.ledger.recall(step, groups)


def groups_of(state: ControllerState, records: tuple[JournalEntry, ...]) -> list[Group]:
    """Return the groups of a committed step as its records tell them."""
    groups: dict[str, Group] = {}
    for kept in records:
        match kept.record:
            case CompletionsStored(key=key, trajectories=trajectories, tensors=tensors, temperature=temperature):
                ordinal = int(key[1:])
                group = groups[key] = Group(ordinal, state.prompts.prompt(ordinal), "train")
                group.trajectories, group.tensors, group.buffers = trajectories, tensors, kept.payload
                group.temperature = temperature
            case TeacherLogprobsStored(key=key, tensors=tensors) if key in groups:
                group = groups[key]
                group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *kept.payload)
            case RewardsStored(key=key, rewards=rewards) if key in groups:
                groups[key].rewards = rewards
    return [group for group in groups.values() if group.rewards and len(group.buffers) == len(group.tensors)]


# JOINED from starling.controller.core.derive_files: The end of the walk where nothing is trained: groups that
# are answered are written to files, in the order of prompts.  | record or command | then
# | |-------------------|-------------------------------------------------------------------------------------
# --| | `StepFrozen`      | which groups the next file has; whatever dies from here on, it is written so
# | | `Store`           | the shell writes it, whole or not at all; one that is there already is left as it is
# | | `StepCommitted`   | it is on disk: its groups leave, and the journal need not hold what they are made of
# |

WRITER = "controller"
"""Who makes a step where there is no policy."""


def write_file(state: ControllerState) -> None:
    """Seal the next file when its groups are answered, and have it written."""
    step = state.version + 1
    if state.step is not None or step > state.plan.last_step:
        return
    groups = state.ledger.sealed(step)
    if not groups:
        groups = state.ledger.seal(step)
        if groups:
            write_sealed(state, step, groups)
    if groups:
        state.step = ActiveStep(step, shares={WRITER: ""})
        store(state, step, groups)


def write_sealed(state: ControllerState, step: int, groups: list[Group]) -> None:
    """Put into the journal which groups a step has."""
    ordinals = tuple(group.ordinal for group in groups)
    state.write(StepFrozen(step=step, ordinals=ordinals, prompts=tuple(group.prompt.id for group in groups)))


def store(state: ControllerState, step: int, groups: list[Group]) -> None:
    """Have the groups of a step written to a file."""
    state.out.append(Store(step, tuple(_stored(state, group) for group in groups)))


def stored(state: ControllerState, step: int) -> None:
    """The groups of a step are on disk; without a policy, that makes the step."""
    if not state.plan.has_policy and state.step is not None and state.step.number == step:
        state.step.shares.clear()
        state.step.done.add(WRITER)
        state.due |= Dirty.TRAIN


def _stored(state: ControllerState, group: Group) -> StoredGroup:
    return StoredGroup(
        ordinal=group.ordinal,
        prompt=group.prompt,
        trajectories=group.trajectories,
        rewards=group.rewards if state.plan.num_rewards else (),
        components=group.components,
        tensors=group.tensors,
        buffers=group.buffers,
        temperature=group.temperature,
        problem=group.problem if not group.trajectories else "",
    )

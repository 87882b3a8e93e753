"""The end of the walk where nothing is trained: groups that are answered are written to files, in the order of prompts.

| record or command | then                                                                                  |
|-------------------|---------------------------------------------------------------------------------------|
| `StepSealed`      | which groups the next file has; whatever dies from here on, it is written so            |
| `Store`           | the shell writes it, whole or not at all; one that is there already is left as it is    |
| `StepCommitted`   | it is on disk: its groups leave, and the journal need not hold what they are made of    |
"""

from __future__ import annotations

from starling.controller.core.due import Due
from starling.controller.core.events import Store
from starling.controller.core.groups import Group
from starling.controller.core.records import StepSealed
from starling.controller.core.state import State
from starling.controller.core.steps import Step
from starling.controller.core.stored import StoredGroup

WRITER = "controller"
"""Who makes a step where there is no policy."""


def write_file(state: State) -> None:
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
        state.step = Step(step, shares={WRITER: ""})
        store(state, step, groups)


def write_sealed(state: State, step: int, groups: list[Group]) -> None:
    """Put into the journal which groups a step has."""
    ordinals = tuple(group.ordinal for group in groups)
    state.write(StepSealed(step=step, ordinals=ordinals, prompts=tuple(group.prompt.id for group in groups)))


def store(state: State, step: int, groups: list[Group]) -> None:
    """Have the groups of a step written to a file."""
    state.out.append(Store(step, tuple(_stored(state, group) for group in groups)))


def stored(state: State, step: int) -> None:
    """The groups of a step are on disk; without a policy, that makes the step."""
    if not state.plan.has_policy and state.step is not None and state.step.number == step:
        state.step.shares.clear()
        state.step.done.add(WRITER)
        state.due |= Due.TRAIN


def _stored(state: State, group: Group) -> StoredGroup:
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

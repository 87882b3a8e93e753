"""Groups that were generated before, as records tell them: of the journal, or of files that another run wrote."""

from __future__ import annotations

from starling.controller.core.groups import Group
from starling.controller.core.records import GroupGenerated, GroupScored, GroupTaught, Kept
from starling.controller.core.state import State


def recalled(state: State, step: int) -> list[Group]:
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


def groups_of(state: State, records: tuple[Kept, ...]) -> list[Group]:
    """Return the groups of a committed step as its records tell them."""
    groups: dict[str, Group] = {}
    for kept in records:
        match kept.record:
            case GroupGenerated(key=key, trajectories=trajectories, tensors=tensors, temperature=temperature):
                ordinal = int(key[1:])
                group = groups[key] = Group(ordinal, state.prompts.prompt(ordinal), "train")
                group.trajectories, group.tensors, group.buffers = trajectories, tensors, kept.payload
                group.temperature = temperature
            case GroupTaught(key=key, tensors=tensors) if key in groups:
                group = groups[key]
                group.tensors, group.buffers = (*group.tensors, *tensors), (*group.buffers, *kept.payload)
            case GroupScored(key=key, rewards=rewards) if key in groups:
                groups[key].rewards = rewards
    return [group for group in groups.values() if group.rewards and len(group.buffers) == len(group.tensors)]

"""Stops 3 to 5: what comes of a group that somebody worked on."""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.due import Due
from starling.controller.core.events import Received
from starling.controller.core.groups import Group, Groups, GroupState
from starling.controller.core.records import (
    GroupDiscarded,
    GroupGenerated,
    GroupReturned,
    GroupScored,
    GroupTaught,
)
from starling.controller.core.state import State

TENSORS = ("prompt", "tokens", "logprobs", "versions")
"""The first buffers of a group, in order; what a prompt with images has besides follows them."""
TAUGHT = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
"""The names of what a teacher adds; those behind the first where it tells its likeliest tokens."""


def generated(state: State, message: wire.GroupGenerated, event: Received) -> None:
    """A group has its completions: keep them, unless they are not what was asked for."""
    state.due |= Due.SCORE | Due.DISPATCH
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    versions = [t.oldest_version for t in message.trajectories]
    wanted = state.num_completions(group.purpose)
    if len(message.trajectories) != wanted:
        retry(state, groups, group, f"{len(message.trajectories)} completions came instead of {wanted}")
    elif len(message.tensors) < len(TENSORS):
        retry(state, groups, group, f"{len(message.tensors)} tensors came instead of {len(TENSORS)} or more")
    elif min(versions) < group.min_version:
        retry(state, groups, group, f"a token is of version {min(versions)}, older than {group.min_version}")
    elif group.purpose == "evaluate" and any(t.newest_version != group.min_version for t in message.trajectories):
        retry(state, groups, group, f"a token is of another version than {group.min_version}")
    elif groups.is_taught and len(message.tensors) > len(TENSORS):
        retry(state, groups, group, "its prompt has more than tokens, and a teacher reads nothing else", hopeless=True)
    else:
        if message.temperature >= 0:  # a controller that took the work over did not ask for it
            group.temperature = message.temperature
        # Of an evaluation nothing is trained: what its rewards need is in the message, and its tokens would only take
        # memory until the evaluation closes, and room in the journal.
        buffers = event.buffers if group.purpose == "train" else ()
        groups.generated(group, message.trajectories, message.tensors, buffers, message.lease)
        record = GroupGenerated(
            key=group.key,
            trajectories=message.trajectories,
            tensors=message.tensors,
            temperature=group.temperature,
            lease=message.lease,
        )
        state.write(record, buffers)
        if not state.plan.num_rewards:
            unscored(state, groups, group)


def unscored(state: State, groups: Groups, group: Group) -> None:
    """Go on with a group in a run that scores nothing: what its teacher makes of it is all that counts."""
    if all(trajectory.status in wire.USABLE for trajectory in group.trajectories):
        groups.scored(group, (0.0,) * len(group.trajectories), {})
        state.write(GroupScored(key=group.key, rewards=group.rewards))
        state.due |= Due.TRAIN
    else:
        retry(state, groups, group, "a completion of it has failed")


def scored(state: State, message: wire.GroupScored) -> None:
    """A group has its rewards, or some scorer failed."""
    state.due |= Due.SCORE | Due.TRAIN | Due.EVALUATE
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    usable = all(status in wire.USABLE for status in message.statuses)
    rewards = [reward for reward in message.rewards if reward is not None]
    if not usable or not len(rewards) == len(message.rewards) == len(group.trajectories):
        retry(state, groups, group, "; ".join(message.problems[:3]) or "a scorer gave no reward")
        return
    state.drops_in_a_row = 0
    if state.plan.dynamic_sampling and group.purpose == "train" and len(set(rewards)) == 1:
        set_aside(state, group, rewards[0])
        return
    groups.scored(group, message.rewards, message.components)
    state.write(GroupScored(key=group.key, rewards=message.rewards, components=message.components))


def taught(state: State, message: wire.TokensScored, event: Received) -> None:
    """A group has its teacher's log-probabilities."""
    state.due |= Due.SCORE | Due.TRAIN
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    names = tuple(tensor.name for tensor in message.tensors)
    wanted = sum(trajectory.num_tokens for trajectory in group.trajectories)
    if names not in (TAUGHT[:1], TAUGHT) or any(tensor.shape[:1] != (wanted,) for tensor in message.tensors):
        shapes = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in message.tensors) or "nothing"
        retry(state, groups, group, f"its teacher told {shapes}, and it has {wanted} tokens")
        return
    groups.taught(group, message.tensors, event.buffers)
    state.write(GroupTaught(key=group.key, tensors=message.tensors), event.buffers)


def set_aside(state: State, group: Group, reward: float) -> None:
    """Take a group out whose rewards are all equal: its slot is free for the next prompt, its own prompt is used."""
    abandon(state, group)
    state.ledger.filter(group, reward)
    state.due |= Due.ADMIT
    reason = f"all its rewards are {reward:g}"
    record = GroupDiscarded(key=group.key, prompt=group.prompt.id, reason=reason, filtered=True, reward=reward)
    state.write(record)
    state.note("filtered", prompt=group.prompt.id, reward=reward)


def retry(state: State, groups: Groups, group: Group, reason: str, *, hopeless: bool = False) -> None:
    """Generate a group again, or discard it."""
    abandon(state, group)
    groups.retry(group, hopeless=hopeless)
    state.due |= Due.DISPATCH | Due.ADMIT | Due.TRAIN | Due.EVALUATE
    if group.state is GroupState.DISCARDED:
        state.drops_in_a_row += 1
        state.last_drop = f"prompt {group.prompt.id}: {reason}"
        state.write(GroupDiscarded(key=group.key, prompt=group.prompt.id, reason=reason))
    else:
        state.write(GroupReturned(key=group.key, tries=group.tries))
    state.note(str(group.state), prompt=group.prompt.id, tries=group.tries, reason=reason)


def abandon(state: State, group: Group) -> None:
    """Take a group whose completions are wanted no longer from whoever scores or teaches them."""
    for lease in (group.scoring, group.teaching):
        held = state.leases.get(lease)
        if held is not None and state.leases.settle(lease, held.peer):
            state.release(held.peer, lease)
            state.update_free(state.membership.members[held.peer], held.kind)
            state.due |= Due.SCORE

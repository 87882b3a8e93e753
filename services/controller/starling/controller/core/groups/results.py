"""Stops 3 to 5: what comes of a group that somebody worked on."""

from __future__ import annotations

from starling.common.ids import lease_incarnation
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Received
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.groups.partial import parse_partial
from starling.controller.core.records import (
    CompletionsStored,
    GroupDiscarded,
    GroupRequeued,
    PartialCompletionsStored,
    RewardsStored,
    TeacherLogprobsStored,
)
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState

TENSORS = ("prompt", "tokens", "logprobs", "versions")
"""The first buffers of a group, in order; what a prompt with images has besides follows them."""
LOSS_MASK = "loss_mask"
"""The name of what says which tokens an environment said."""
MAX_LOSSES = 2
"""So many engines may die with a group in hand before that counts as a failure of the group: a prompt that kills every
engine must not use up all of them. What ran beside it is taken for as guilty, and is generated again like it."""
TEACHER_TENSORS = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
"""The names of what a teacher adds; those behind the first where it tells its likeliest tokens."""


def generated(
    state: ControllerState, member: Member, lease: Lease, message: wire.GroupGenerated, event: Received
) -> None:
    """A group has its completions: keep them, unless they are not what was asked for."""
    state.due |= Dirty.SCORE | Dirty.DISPATCH
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
    elif failed := [(i, t) for i, t in enumerate(message.trajectories) if t.status not in wire.TRAINABLE_STATUSES]:
        index, first = failed[0]
        reason = f"{len(failed)} of its completions failed, completion {index} by {first.status}: {first.problem}"
        retry(state, groups, group, reason, status=first.status)
    elif groups.is_taught and any(tensor.name != LOSS_MASK for tensor in message.tensors[len(TENSORS) :]):
        retry(state, groups, group, "its prompt has more than tokens, and a teacher reads nothing else", hopeless=True)
    else:
        if message.temperature >= 0:  # a controller that took the work over did not ask for it
            group.temperature = message.temperature
        # Of an evaluation nothing is trained: what its rewards need is in the message, and its tokens would only take
        # memory until the evaluation closes, and room in the journal.
        keeps = group.purpose == "train" and state.plan.keeps_tokens
        tensors, buffers = (message.tensors, event.buffers) if keeps else ((), ())
        groups.generated(group, message.trajectories, tensors, buffers, message.lease)
        _learn(state, member, lease, group)
        record = CompletionsStored(
            key=group.key,
            trajectories=message.trajectories,
            tensors=tensors,
            temperature=group.temperature,
            lease=message.lease,
        )
        state.write(record, buffers)
        if not state.plan.num_rewards:
            unscored(state, groups, group)


def _learn(state: ControllerState, member: Member, lease: Lease, group: Group) -> None:
    """Learn from a group that was generated how long it is, and how fast its rollout is.

    Not from one that the rollout had before this controller, which does not know since when.
    """
    num_tokens = group.num_tokens
    state.lengths.note(group.prompt.id, group.purpose, num_tokens / len(group.trajectories))
    if lease.send is not None and isinstance(lease.send.message, wire.GenerateGroup):
        begun = sum(completion.num_tokens for completion in lease.send.message.partial)
        state.capacity.rates.note(member.name, num_tokens - begun, state.now - lease.begun_at)


def interrupted(state: ControllerState, member: Member, message: wire.GroupInterrupted, event: Received) -> None:
    """A rollout cannot finish a group: the group waits again, with its tokens so far where they may be trained.

    Who gives a group back is about to leave, or has lost its engine: it gets no other for a while.
    """
    state.due |= Dirty.DISPATCH | Dirty.EVALUATE
    state.rest(member)
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    groups.requeue(group, "generate")
    told: dict[str, object] = {}
    try:
        told["num_tokens"] = _keep(state, groups, group, message, event.buffers)
    except ValueError as error:
        told = {"num_tokens": 0, "thrown_away": str(error)}
    state.note("interrupted", prompt=group.prompt.id, replica=member.name, reason=message.reason, **told)
    group.losses += message.lost
    if group.losses >= MAX_LOSSES:
        group.losses = 0
        retry(state, groups, group, f"{MAX_LOSSES} engines died while they worked on it")


def _keep(
    state: ControllerState, groups: Groups, group: Group, message: wire.GroupInterrupted, buffers: Buffers
) -> int:
    """Keep what a rollout left of a group. Returns how many tokens; raises ValueError where they may not be trained."""
    partial = parse_partial(message.partial, message.tensors, buffers, state.num_completions(group.purpose))
    if partial is None:
        return 0
    oldest, newest = partial.oldest_version, partial.newest_version
    if not partial.is_within(group.min_version, state.newest_allowed(group)):
        raise ValueError(
            f"tokens of versions {oldest} to {newest} came, and {group.min_version} was the oldest allowed"
        )
    # A controller that took the work over did not ask for the temperature, and knows it only if it is told.
    known = group.temperature if lease_incarnation(message.lease) == state.incarnation else -1.0
    temperature = message.temperature if message.temperature >= 0 else known
    if temperature < 0:
        raise ValueError("nobody knows at which temperature the tokens were drawn")
    if not groups.interrupted(group, partial, temperature):
        return 0
    record = PartialCompletionsStored(
        key=group.key,
        partial=partial.completions,
        tensors=partial.tensors,
        oldest_version=oldest,
        newest_version=newest,
        temperature=temperature,
    )
    state.write(record, partial.buffers)
    return partial.num_tokens


def unscored(state: ControllerState, groups: Groups, group: Group) -> None:
    """Go on with a group in a run that scores nothing: what its teacher makes of it is all that counts."""
    groups.scored(group, (0.0,) * len(group.trajectories), {})
    state.write(RewardsStored(key=group.key, rewards=group.rewards))
    state.due |= Dirty.TRAIN


def scored(state: ControllerState, message: wire.GroupScored) -> None:
    """A group has its rewards, or some scorer failed."""
    state.due |= Dirty.SCORE | Dirty.TRAIN | Dirty.EVALUATE
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    usable = all(status in wire.TRAINABLE_STATUSES for status in message.statuses)
    rewards = [reward for reward in message.rewards if reward is not None]
    if not usable or not len(rewards) == len(message.rewards) == len(group.trajectories):
        retry(state, groups, group, "; ".join(message.problems[:3]) or "a scorer gave no reward")
        return
    state.drops_in_a_row = 0
    if state.plan.dynamic_sampling and group.purpose == "train" and len(set(rewards)) == 1:
        set_aside(state, group, rewards[0])
        return
    groups.scored(group, message.rewards, message.components)
    state.write(RewardsStored(key=group.key, rewards=message.rewards, components=message.components))


def taught(state: ControllerState, message: wire.TokensScored, event: Received) -> None:
    """A group has its teacher's log-probabilities."""
    state.due |= Dirty.SCORE | Dirty.TRAIN
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    names = tuple(tensor.name for tensor in message.tensors)
    wanted = sum(trajectory.num_tokens for trajectory in group.trajectories)
    if names not in (TEACHER_TENSORS[:1], TEACHER_TENSORS) or any(
        tensor.shape[:1] != (wanted,) for tensor in message.tensors
    ):
        shapes = ", ".join(f"{tensor.name} {tensor.shape}" for tensor in message.tensors) or "nothing"
        retry(state, groups, group, f"its teacher told {shapes}, and it has {wanted} tokens")
        return
    groups.taught(group, message.tensors, event.buffers)
    state.write(TeacherLogprobsStored(key=group.key, tensors=message.tensors), event.buffers)


def set_aside(state: ControllerState, group: Group, reward: float) -> None:
    """Take a group out whose rewards are all equal: its slot is free for the next prompt, its own prompt is used."""
    abandon(state, group)
    state.ledger.filter(group, reward)
    state.due |= Dirty.ADMIT
    reason = f"all its rewards are {reward:g}"
    record = GroupDiscarded(key=group.key, prompt=group.prompt.id, reason=reason, filtered=True, reward=reward)
    state.write(record)
    state.note("filtered", prompt=group.prompt.id, reward=reward)


def retry(
    state: ControllerState,
    groups: Groups,
    group: Group,
    reason: str,
    *,
    hopeless: bool = False,
    status: wire.Status | None = None,
) -> None:
    """Generate a group again, or discard it; `status` is that of a completion that failed, where one did."""
    groups.num_env_errors += status is wire.Status.ENV_ERROR
    abandon(state, group)
    group.problem = reason
    groups.retry(group, hopeless=hopeless)
    state.due |= Dirty.DISPATCH | Dirty.ADMIT | Dirty.TRAIN | Dirty.EVALUATE
    if group.state is not GroupState.WAITING:
        # Where each prompt is to be answered, one that nobody can answer says nothing of the others.
        state.drops_in_a_row += state.plan.has_policy or not hopeless
        state.last_drop = f"prompt {group.prompt.id}: {reason}"
        state.write(GroupDiscarded(key=group.key, prompt=group.prompt.id, reason=reason))
    else:
        state.write(GroupRequeued(key=group.key, tries=group.tries))
    kind = GroupState.WAITING if group.state is GroupState.WAITING else GroupState.DISCARDED
    told = {} if status is None else {"status": str(status)}
    state.note(str(kind), prompt=group.prompt.id, tries=group.tries, reason=reason, **told)


def abandon(state: ControllerState, group: Group) -> None:
    """Take a group whose completions are wanted no longer from whoever scores or teaches them."""
    for lease in (group.scoring, group.teaching):
        held = state.leases.get(lease)
        if held is not None and state.leases.settle(lease, held.peer):
            state.release(held.peer, lease)
            state.update_free(state.membership.members[held.peer], held.kind)
            state.due |= Dirty.SCORE

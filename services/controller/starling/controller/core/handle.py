"""What each event changes. A handler notes what happened; what follows from it is derived in `derive.py`."""

from __future__ import annotations

from starling.common.errors import WeightsError
from starling.common.ids import lease_kind
from starling.common.wire import messages as wire
from starling.controller.core.events import Received
from starling.controller.core.finish import Stage
from starling.controller.core.ledger import Group, Groups, GroupState
from starling.controller.core.membership import Member
from starling.controller.core.state import State
from starling.weightsync.layout import decode_layout

Result = (
    wire.GroupGenerated
    | wire.GroupScored
    | wire.StepTrained
    | wire.WeightsPublished
    | wire.WeightsAdopted
    | wire.CheckpointSaved
    | wire.LeaseFailed
)


TENSORS = ("prompt", "tokens", "logprobs", "versions")
"""The buffers of a group, in order."""


def received(state: State, event: Received) -> None:
    """A replica said something."""
    message, sender = event.message, event.sender
    if state.membership.is_past(sender, event.epoch):
        return
    if isinstance(message, wire.Hello):
        hello(state, event, message)
        return
    member = state.membership.get(sender, event.epoch)
    if member is None:
        if not isinstance(message, wire.Leave):
            state.send(sender, wire.Introduce())
        return
    member.heard_at = event.now
    match message:
        case wire.Heartbeat():
            heartbeat(state, member, message, event.now)
        case wire.Leave(reason=reason):
            lose(state, sender, f"it left: {reason}", event.now)
        case _:
            # Releasing what is not (or no longer) leased is what makes a late answer harmless.
            state.send(sender, wire.Release(leases=(message.lease,)))
            if state.leases.settle(message.lease, sender):
                result(state, member, message, event)


def hello(state: State, event: Received, message: wire.Hello) -> None:
    """A replica announces itself: admit it or say why not."""
    known = state.membership.members.get(event.sender)
    refusal, layout = state.membership.refusal(event.sender, message), None
    if refusal is None and message.has_layout:
        try:
            layout = decode_layout(event.buffers[0])
        except WeightsError as error:
            refusal = str(error)
    if refusal is None and message.role == "policy" and known is None and message.version != state.version:
        refusal = f"this run is at version {state.version} and the policy offers version {message.version}"
    if refusal is not None:
        state.refuse(event.sender, refusal)
        return
    if known is not None and known.epoch != event.epoch:
        lose(state, event.sender, "it was started again", event.now)
    member = state.membership.join(event.sender, event.epoch, message, layout, event.now)
    if known is None or known.epoch != event.epoch:
        state.note("joined", replica=member.name, role=member.role, host=message.host, pid=message.pid)
    state.welcome(member)


def heartbeat(state: State, member: Member, message: wire.Heartbeat, now: float) -> None:
    """A replica told its whole state: answer with the difference."""
    member.gauges = message.gauges
    member.progress = {held.lease: held.progress for held in message.leases if held.progress is not None}
    if member.role == "rollout":
        if message.version < 0 <= member.version:
            take_back(state, member)  # its engine is torn: another rollout need not wait for its next adoption
        member.version = min(member.version, message.version)
    state.welcome(member)
    held = [held.lease for held in message.leases]
    forget, lost = state.leases.compare(member.name, held, now, 2 * state.plan.heartbeat_s)
    if forget:
        state.send(member.name, wire.Release(leases=tuple(forget)))
    state.out += lost
    if state.ending.stage is Stage.DRAINING:
        state.send(member.name, wire.Drain(reason=state.ending.reason))


def result(state: State, member: Member, message: Result, event: Received) -> None:
    """A piece of work is done, or has failed."""
    match message:
        case wire.GroupGenerated():
            generated(state, message, event)
        case wire.GroupScored():
            scored(state, message)
        case wire.StepTrained(step=step):
            state.version = step
            phase = "sft" if step <= state.plan.num_sft_steps else "grpo"
            state.note("step", step=step, phase=phase, **{**message.metrics, **state.ledger.sealed_metrics(step)})
            if phase == "grpo":
                state.note("trained", step=step, prompts=[g.prompt.id for g in state.ledger.sealed(step)])
        case wire.WeightsPublished():
            published(state, member, message, event)
        case wire.WeightsAdopted():
            adopted(state, member, message, event.now)
        case wire.CheckpointSaved(step=step, path=path):
            state.note("checkpoint", step=step, path=path)
            state.ending.drain(event.now)
        case wire.LeaseFailed():
            failed(state, member, message, event.now)


def generated(state: State, message: wire.GroupGenerated, event: Received) -> None:
    """A group has its completions: keep them, unless they are not what was asked for."""
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    oldest = min((t.oldest_version for t in message.trajectories), default=-1)
    wanted = state.plan.num_completions(group.purpose)
    if len(message.trajectories) != wanted or len(message.tensors) != len(TENSORS):
        retry(state, groups, group, f"{len(message.trajectories)} completions came instead of {wanted}")
    elif oldest < group.min_version:
        retry(state, groups, group, f"a token is of version {oldest}, older than {group.min_version}")
    else:
        groups.generated(group, message.trajectories, message.tensors, event.buffers)


def scored(state: State, message: wire.GroupScored) -> None:
    """A group has its rewards, or some scorer failed."""
    found = state.group_of(message.lease)
    if found is None:
        return
    groups, group = found
    usable = all(status in wire.USABLE for status in message.statuses)
    if usable and len(message.rewards) == len(group.trajectories) and None not in message.rewards:
        groups.scored(group, message.rewards, message.components)
        state.drops_in_a_row = 0
    else:
        retry(state, groups, group, "; ".join(message.problems[:3]) or "a scorer gave no reward")


def published(state: State, member: Member, message: wire.WeightsPublished, event: Received) -> None:
    """A version is on offer, which frees the slots of the step that made it."""
    try:
        state.rounds.publish(message.version, event.buffers[0])
    except WeightsError as error:
        state.ending.fail(f"{member.name} published version {message.version} in vain: {error}", event.now)
        return
    state.ledger.trained(message.version)
    state.note("published", version=message.version, publish_s=message.publish_s, offer_s=message.offer_s)


def adopted(state: State, member: Member, message: wire.WeightsAdopted, now: float) -> None:
    """A rollout switched. It holds the version only if it proved the publisher's root."""
    # A version older than the newest was proven by the rollout against its own offer, and checked here when newest.
    proven = message.root == state.rounds.roots.get(message.version)
    state.note(
        "adopted",
        replica=member.name,
        version=message.version,
        attested=proven,
        root=message.root,
        pull_s=message.pull_s,
        pause_s=message.pause_s,
        size_bytes=message.size_bytes,
        sent_bytes=message.sent_bytes,
        transport=message.transport,
        lanes=message.lanes,
        split=message.split,
    )
    if proven:
        member.version = message.version
    else:
        # It generates with weights that nobody published: it must have no work until it has adopted properly.
        member.version = -1
        take_back(state, member)
        state.rounds.failed(member.name, now)


def failed(state: State, member: Member, message: wire.LeaseFailed, now: float) -> None:
    """A replica could not do a piece of work."""
    kind = lease_kind(message.lease)
    state.note("failed", replica=member.name, lease=message.lease, reason=message.reason)
    found = state.group_of(message.lease)
    if found is not None:
        retry(state, *found, message.reason, hopeless=message.fatal)
    elif kind == "adopt":
        state.rounds.failed(member.name, now)
    elif kind in ("train", "publish", "checkpoint"):
        state.ending.fail(f"{member.name} could not {kind}: {message.reason}", now)


def retry(state: State, groups: Groups, group: Group, reason: str, *, hopeless: bool = False) -> None:
    """Generate a group again, or discard it."""
    groups.retry(group, hopeless=hopeless)
    if group.state is GroupState.DISCARDED:
        state.drops_in_a_row += 1
        state.last_drop = f"prompt {group.prompt.id}: {reason}"
    state.note(str(group.state), prompt=group.prompt.id, tries=group.tries, reason=reason)


def lose(state: State, name: str, why: str, now: float) -> None:
    """Free everything that a replica had; what it answers later changes nothing."""
    member = state.membership.leave(name)
    dropped = state.leases.drop(name)
    requeue(state, dropped)
    if member is None:
        return
    state.note("left", replica=name, reason=why, num_leases=len(dropped))
    if member.role == "policy":
        state.ending.fail(f"{name} was lost ({why}), and with it the weights of version {state.version}", now)


def take_back(state: State, member: Member) -> None:
    """Free the groups that a rollout works on, since its weights are not what was published."""
    dropped = state.leases.drop(member.name, "generate")
    if dropped:
        state.send(member.name, wire.Release(leases=tuple(dropped)))
        requeue(state, dropped)


def requeue(state: State, dropped: list[str]) -> None:
    """Put the groups of these leases back to where they were before."""
    for lease in dropped:
        found = state.group_of(lease)
        if found is not None:
            groups, group = found
            groups.requeue(group)

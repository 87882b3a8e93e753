"""What each event changes. A handler notes what happened; what follows from it is derived in `derive.py`."""

from __future__ import annotations

from typing import Final

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Received
from starling.controller.core.groups.results import generated, interrupted, retry, scored, taught
from starling.controller.core.lifecycle.operators import operator_said
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import (
    CheckpointWritten,
    MemberJoined,
    VersionAdopted,
    VersionPublished,
)
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.reclaim import claim
from starling.controller.core.replicas.switching import answered
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import ActiveStep
from starling.weightsync.plan.layout import decode_layout

Result = (
    wire.GroupGenerated
    | wire.GroupInterrupted
    | wire.GroupScored
    | wire.TokensScored
    | wire.StepTrained
    | wire.WeightsPublished
    | wire.WeightsAdopted
    | wire.Slept
    | wire.Woken
    | wire.CheckpointSaved
    | wire.LeaseFailed
)


OF_OPERATOR: Final = (wire.QueryRun, wire.ChangeSetting, wire.RequestEvaluation, wire.RequestStop)
"""`wire.OperatorUp` as a tuple: `isinstance` takes ten times as long with a union."""
MAX_BROKEN = 16
"""So many failures to make a step together, without a step that was made between them, fail the run."""
SAVE_AGAIN_S = 15.0
"""A state that could not be saved is tried again after so long."""
FAILING_LEASES = 3
"""For so many times as long as a lease may a policy fail to take over the weights of another, before it must leave."""


def received(state: ControllerState, event: Received) -> None:
    """Somebody said something."""
    message, sender = event.message, event.sender
    if isinstance(message, OF_OPERATOR):
        operator_said(state, sender, message)
        return
    if state.membership.is_past(sender, event.epoch):
        return
    if isinstance(message, wire.Hello):
        hello(state, event, message)
        return
    member = state.membership.get(sender, event.epoch)
    if member is None:
        if not isinstance(message, wire.Leave):
            state.send(sender, wire.RequestHello())
        return
    state.membership.hear(member, event.now)
    match message:
        case wire.Heartbeat():
            heartbeat(state, member, message)
        case wire.Leave(reason=reason):
            state.lose(sender, f"it left: {reason}", gone=True)
        case _:
            # Releasing what is not (or no longer) leased is what makes a late answer harmless.
            state.release(sender, message.lease)
            lease = state.leases.get(message.lease)
            if lease is None and claim(state, member, message.lease):
                lease = state.leases.get(message.lease)
            if lease is not None and state.leases.settle(message.lease, sender):
                state.update_free(member, lease.kind)
                result(state, member, lease, message, event)
            elif isinstance(message, wire.StepTrained):
                # Whatever became of its lease: this policy has made the step, and nobody can unmake it.
                policy_has(state, member, message.step)


def hello(state: ControllerState, event: Received, message: wire.Hello) -> None:
    """A replica announces itself: admit it or say why not."""
    known = state.membership.members.get(event.sender)
    refusal, layout = state.membership.refusal(event.sender, event.epoch, message), None
    if refusal is None and message.has_layout:
        try:
            layout = decode_layout(event.buffers[0])
        except WeightsError as error:
            refusal = str(error)
    if refusal is None and message.role == "policy":
        refusal = foreign(state, message.version)
    has_none = message.role == "rollout" and message.version < state.membership.given
    # Who was a member had some: its engine is being made again.
    if refusal is None and has_none and not state.membership.was_here(event.sender, event.epoch):
        refusal = f"this run has no policy, and {event.sender} holds no weights; set rollout.load_weights = true"
    if refusal is not None:
        state.refuse(event.sender, refusal)
        return
    if known is not None and known.epoch == event.epoch:
        state.membership.hear(known, event.now)  # its welcome was lost
        state.turns.told(known)
        state.update_free(known)
        state.due = Dirty.ALL
        state.welcome(known)
        return
    if known is not None:
        state.lose(event.sender, "it was started again", gone=True)
    member = state.membership.join(event.sender, event.epoch, message, layout, event.now)
    state.turns.told(member)
    state.write(MemberJoined(name=member.name, role=member.role, epoch=member.epoch))
    state.note("joined", replica=member.name, role=member.role, host=message.host, pid=message.pid)
    state.welcome(member)
    if member.role == "rollout":
        state.holds(member, member.version)
    elif member.role in ("reward", "teacher"):
        state.update_free(member)
    else:
        version, member.version = member.version, min(member.version, state.version)
        policy_has(state, member, version)
    state.due = Dirty.ALL


def foreign(state: ControllerState, version: int) -> str | None:
    """Say why a policy that holds `version` is none of this run, or None when it may be."""
    made = version == state.version + 1 and is_dealt(state, version)
    if 0 <= version <= state.version or made:
        return None
    return (
        f"this run is at version {state.version} and the policy offers version {version}; "
        "start the policy in the folder of this run"
    )


def is_dealt(state: ControllerState, step: int) -> bool:
    """Say whether a policy can have been told to make `step`, the next one."""
    is_known = step <= state.plan.num_supervised_steps or state.plan.replays
    return is_known or bool(state.ledger.sealed(step))


def heartbeat(state: ControllerState, member: Member, message: wire.Heartbeat) -> None:
    """A replica told its whole state: answer with the difference."""
    member.gauges, member.waits = message.gauges, message.waits
    member.progress = {held.lease: held.progress for held in message.leases if held.progress is not None}
    if member.role == "rollout":
        if message.version < 0 <= member.version:
            state.take_back(member)  # its engine is torn: another rollout need not wait for its next adoption
        has_given = message.version == state.membership.given > member.version  # another engine has read the weights
        if message.version < member.version or has_given:
            state.holds(member, message.version)
    elif member.role == "policy" and message.version > member.version:
        policy_has(state, member, message.version)
    state.welcome(member)
    held = [held.lease for held in message.leases]
    grace_s = 2 * state.plan.heartbeat_s
    unknown, again, gone = state.leases.compare(member.name, held, state.now, grace_s)
    torn = member.role == "rollout" and message.version < 0
    forget = unknown if torn else [lease for lease in unknown if not claim(state, member, lease)]
    state.release(member.name, *forget)
    state.out += again
    if gone:
        state.requeue(gone)
        if state.step is not None and state.step.shares.get(member.name) in gone:
            del state.step.shares[member.name]
        if member.role == "rollout":
            state.look_behind(member)
        state.update_free(member)
        state.due = Dirty.ALL
    if not member.told:
        member.told = True
        state.update_free(member)
        state.due = Dirty.ALL
    if state.awaited:
        state.awaited.discard(member.name)
        state.due = Dirty.ALL
    if state.ending.stage is RunStage.DRAINING:
        state.send(member.name, wire.Drain(reason=state.ending.reason))


def policy_has(state: ControllerState, member: Member, version: int) -> None:
    """A policy is known to hold `version`: by its answer, or by what it tells of itself."""
    if version <= member.version:
        return
    if version > state.version and foreign(state, version) is not None:
        state.evict(member, foreign(state, version) or "")
        return
    member.version = version
    state.failing_since.pop(member.name, None)
    state.due |= Dirty.ADOPT | Dirty.CATCH_UP | Dirty.PUBLISH | Dirty.TRAIN | Dirty.END
    if version > state.version:
        if state.step is None or state.step.number != version:
            state.step = ActiveStep(version)
        state.step.done.add(member.name)
        lease = state.step.shares.pop(member.name, None)
        if lease is not None and state.leases.settle(lease, member.name):
            state.release(member.name, lease)


def result(state: ControllerState, member: Member, lease: Lease, message: Result, event: Received) -> None:
    """A piece of work is done, or has failed."""
    match message:
        case wire.GroupGenerated():
            generated(state, member, lease, message, event)
        case wire.GroupInterrupted():
            interrupted(state, member, message, event)
        case wire.GroupScored():
            scored(state, message)
        case wire.TokensScored():
            taught(state, message, event)
        case wire.StepTrained(step=step, metrics=metrics, alarms=alarms):
            if state.step is not None and state.step.number == step:
                state.step.shares.pop(member.name, None)
                state.step.metrics[member.name] = metrics
                state.step.alarms |= {alarm.name: alarm for alarm in alarms}
            policy_has(state, member, step)
            state.due |= Dirty.ALL
        case wire.WeightsPublished():
            published(state, member, message, event)
        case wire.WeightsAdopted():
            adopted(state, member, message)
        case wire.Slept() | wire.Woken():
            answered(state, member, sleeps=isinstance(message, wire.Slept))
        case wire.CheckpointSaved():
            saved(state, member, message)
        case wire.LeaseFailed():
            failed(state, member, message)


def published(state: ControllerState, member: Member, message: wire.WeightsPublished, event: Received) -> None:
    """A version is on offer; if it is a new one, that frees the slots of the steps that made it."""
    state.due = Dirty.ALL
    before = state.rounds.version
    try:
        root, is_new = state.rounds.publish(member, message.version, event.buffers[0])
    except WeightsError as error:
        state.ending.fail(f"{member.name} published version {message.version} in vain: {error}", state.now)
        return
    if is_new:
        state.write(VersionPublished(version=message.version, root=root))
    if message.version <= before:
        state.note("offered", replica=member.name, version=message.version)
        return
    for step in range(before + 1, message.version + 1):
        state.ledger.trained(step)
    for rollout in state.membership.of("rollout"):
        state.look_behind(rollout)
    state.note("published", version=message.version, publish_s=message.publish_s, offer_s=message.offer_s)


def adopted(state: ControllerState, member: Member, message: wire.WeightsAdopted) -> None:
    """A replica switched. It holds the version only if it proved the root of an offer."""
    # A version older than the newest was proven by the rollout against its own offer, and checked here when newest.
    proven = state.rounds.proves(message.version, message.root)
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
        mode=message.mode,
        recomputed_tokens=message.recomputed_tokens,
        drain_s=message.drain_s,
    )
    if proven:
        state.failing_since.pop(member.name, None)
    if proven and member.role == "policy":
        member.version = message.version
        state.due = Dirty.ALL
    elif proven:
        state.membership.prove(member, message.version)
        state.write(VersionAdopted(name=member.name, epoch=member.epoch, version=message.version))
        state.holds(member, message.version)
        if state.behind and member.serves:
            state.due |= Dirty.ADOPT  # who waits for somebody to offer it
    elif member.role == "policy":
        state.evict(member, f"{member.name} does not hold version {message.version} bit for bit after taking it over")
    else:
        # It generates with weights that nobody published: it must have no work until it has adopted properly.
        state.take_back(member)
        state.rounds.failed(member.name, state.now)
        state.holds(member, -1)


def saved(state: ControllerState, member: Member, message: wire.CheckpointSaved) -> None:
    """A policy has written a checkpoint, or a state to continue from."""
    state.write(CheckpointWritten(step=message.step, path=message.path, state=message.state))
    state.note("state" if message.state else "checkpoint", step=message.step, path=message.path)
    state.due |= Dirty.END | Dirty.TRAIN
    if message.state:
        state.saved_at = state.now
        state.has_state(message.step)
        if state.kept_from:
            state.prune(state.kept_from)
    else:
        state.ending.saved.add(member.name)


def failed(state: ControllerState, member: Member, message: wire.LeaseFailed) -> None:
    """A replica could not do a piece of work."""
    kind, subject = message.lease.split(":")[:2]
    state.note("failed", replica=member.name, lease=message.lease, reason=message.reason)
    state.due = Dirty.ALL
    if member.role == "policy":
        policy_has(state, member, message.version)  # it may have made the very step that it refuses
    found = state.group_of(message.lease)
    if found is not None:
        retry(state, *found, message.reason, hopeless=message.fatal)
        return
    if kind == "adopt" or (kind == "publish" and member.role == "rollout"):
        state.rounds.failed(member.name, state.now)
        begun = state.failing_since.setdefault(member.name, state.now)
        if member.role == "policy" and state.now - begun > FAILING_LEASES * state.plan.lease_s:
            state.evict(member, f"{member.name} could not take over version {subject}: {message.reason}")
        elif member.role == "rollout":
            state.look_behind(member)
    elif kind in ("sleep", "wake"):
        state.turns.refused(member, state.now)  # it is told again
    elif member.role == "policy" and kind != "save" and not state.turns.may_work(member):
        # The order found it asleep: it had lost this controller meanwhile. What it was to do is given again.
        if kind == "train" and state.step is not None and state.step.shares.pop(member.name, None) is not None:
            state.step.broken = True
    elif kind == "publish" and member.version != int(subject):
        return  # it went on to the next step: that version will be published instead
    elif kind == "train" and member.shares_steps and state.step is not None:
        state.step.shares.pop(member.name, None)
        state.step.broken = True  # a replica that it needed is gone; what the others made of it will show
        state.num_broken += 1
        if state.num_broken >= MAX_BROKEN:
            state.ending.fail(f"{member.name} could not train: {message.reason}", state.now)
    elif kind == "train" and member.version >= int(subject):
        return  # it has made that step already
    elif kind == "save":
        # The run can do without, for a while: the journal keeps what it would have to make again.
        state.save_after = state.now + SAVE_AGAIN_S
    elif kind in ("train", "publish", "checkpoint"):
        state.ending.fail(f"{member.name} could not {kind}: {message.reason}", state.now)

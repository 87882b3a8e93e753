"""Results of steps and saves: a policy has made a step, or has saved its state or the last checkpoint."""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Prune
from starling.controller.core.records import CheckpointWritten
from starling.controller.core.replicas.assignments import revoke
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import can_be_dispatched
from starling.controller.core.training.step import ActiveStep, format_digest


def on_trained(state: ControllerState, member: Member, message: wire.StepTrained) -> None:
    """Note that a policy has made a step, with its metrics and alarms."""
    note_digest(state, member, message)
    active = state.training.step
    if active is not None and active.number == message.step:
        active.shares.pop(member.name, None)
        active.metrics[member.name] = message.metrics
        active.alarms |= {alarm.name: alarm for alarm in message.alarms}
    on_policy_version(state, member, message.step)
    state.dirty |= Dirty.ALL


def note_digest(state: ControllerState, member: Member, message: wire.StepTrained) -> None:
    """Note what a policy has trained in a step: in the active one, or in one that was committed before.

    It made the latter again, or reports late that it made it with the others: then it must have trained their groups.
    """
    training, digest = state.training, message.batch_digest
    if not digest:
        return
    active, committed = training.step, training.committed
    if active is not None and active.number == message.step:
        active.digests[member.name] = digest
    elif message.step <= state.version:
        state.outbox.note("step_repeated", replica=member.name, step=message.step, batch_digest=format_digest(digest))
        if committed is not None and message.lease in committed.leases:
            committed.digests[member.name] = digest
            if committed.disagreement:
                state.lifecycle.fail(committed.disagreement, state.now)


def on_policy_version(state: ControllerState, member: Member, version: int) -> None:
    """Note that a policy holds `version`, by its result or by its heartbeat."""
    if version <= member.version:
        return
    if version > state.weights_version:
        problem = version_problem(state, version)
        if problem is not None:
            evict(state, member, problem)
            return
    member.version = version
    state.weights.note_success(member.name)
    state.dirty |= Dirty.ADOPT | Dirty.CATCH_UP | Dirty.PUBLISH | Dirty.TRAIN | Dirty.END
    if version > state.weights_version:
        active = state.training.step
        if active is None or active.number != version:
            active = state.training.step = ActiveStep(version)
        active.made_by.add(member.name)
        lease = active.shares.pop(member.name, None)
        if lease is not None:
            revoke(state, member.name, lease)


def version_problem(state: ControllerState, version: int) -> str | None:
    """Return why a policy that holds `version` is not of this run, or None when it may be."""
    newest = state.weights_version
    made_next = state.plan.kind.trains and version == newest + 1 and can_be_dispatched(state, version)
    if 0 <= version <= newest or made_next:
        return None
    return (
        f"this run is at version {newest} and the policy offers version {version}; "
        "start the policy in the folder of this run"
    )


def on_saved(state: ControllerState, member: Member, message: wire.CheckpointSaved) -> None:
    """Note that a policy has written the last checkpoint, or a state to resume from."""
    state.outbox.write(CheckpointWritten(step=message.step, path=message.path, state=message.state))
    state.outbox.note("state" if message.state else "checkpoint", step=message.step, path=message.path)
    state.dirty |= Dirty.END | Dirty.TRAIN
    if message.state:
        saved = state.training.saved
        saved.rests_since = state.now
        saved.add(message.step)
        if saved.previous:
            state.outbox.add(Prune(saved.previous))
    else:
        state.lifecycle.is_exported = True

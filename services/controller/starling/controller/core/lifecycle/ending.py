"""The end of a run, stage by stage: the last checkpoint, the drain, and the exit."""

from __future__ import annotations

import functools

from starling.common.wire import messages as wire
from starling.controller.core.events import FinishRun
from starling.controller.core.groups.group import GroupState
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import RunEnded, RunStopped
from starling.controller.core.replicas.assignments import grant
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import grant_save


def end(state: ControllerState) -> None:
    """Enter the next stage when the present one is complete."""
    lifecycle = state.lifecycle
    if lifecycle.stage is RunStage.RUNNING and _is_complete(state):
        _note_tail(state)
        if state.version == 0 or not state.plan.kind.trains:
            lifecycle.drain(state.now)
        else:
            lifecycle.enter(RunStage.CHECKPOINTING)
    is_active = lifecycle.stage in (RunStage.RUNNING, RunStage.CHECKPOINTING)
    has_step = state.plan.kind.trains and state.replicas.membership.num("policy") > 0
    if is_active and lifecycle.stopping and not has_step:
        # A policy that was stopped, too, returns only when the run is resumed, which repeats what it has not saved.
        lifecycle.drain(state.now)
    if lifecycle.stage is RunStage.CHECKPOINTING:
        _checkpoint(state)
    if lifecycle.stage is RunStage.DRAINING:
        _drain(state)


def _is_complete(state: ControllerState) -> bool:
    """Say whether only the last checkpoint is left to do."""
    plan, replicas, evaluations = state.plan, state.replicas, state.evaluations
    if state.training.step is not None or replicas.is_policy_publishing() or replicas.leases.has("save"):
        return False
    if state.lifecycle.stopping:
        unmade = state.buffer.frozen_groups(state.version + 1)  # a step that has begun is made, if there is a policy
        return bool(replicas.current_policies(state.version)) and not unmade
    published = state.weights.version >= state.version or not plan.kind.publishes(plan)
    evaluated = evaluations.current is None and (not plan.evaluate_at_end or "end" in evaluations.evaluated)
    is_over = plan.kind.is_over(state.version, plan.last_step)
    return is_over and published and evaluated and not evaluations.requested


def _note_tail(state: ControllerState) -> None:
    """Note what was generated and will not be trained now; the journal keeps it."""
    counts = {str(s): state.buffer.count(s) for s in (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED)}
    if any(counts.values()):
        state.outbox.note("tail", **counts)


def _checkpoint(state: ControllerState) -> None:
    """Have a policy write the last checkpoint, and drain when it has: all policies hold the same weights."""
    lifecycle, version, replicas = state.lifecycle, state.version, state.replicas
    current = replicas.current_policies(version) if replicas.policies_have_devices() else []
    stopped_early = bool(lifecycle.stopping) and version < state.plan.last_step
    is_unsaved = stopped_early and state.training.saved.newest < version
    if current and is_unsaved and not replicas.leases.has("save"):
        grant_save(state)
    if current and not lifecycle.is_exported and not replicas.leases.has("checkpoint"):
        checkpoint = functools.partial(wire.SaveCheckpoint, step=version)
        grant(state, current[0], "checkpoint", version, lambda lease: checkpoint(lease=lease))
    is_writing = replicas.leases.has("checkpoint") or replicas.leases.has("save") or is_unsaved
    if lifecycle.is_exported and not is_writing:
        lifecycle.drain(state.now)


def _drain(state: ControllerState) -> None:
    lifecycle, membership = state.lifecycle, state.replicas.membership
    if not lifecycle.drain_sent:
        lifecycle.drain_sent = True
        # A run that was stopped, or has failed, can resume: its journal has no end.
        if not lifecycle.stopping and not lifecycle.failure:
            state.outbox.write(RunEnded(ok=True, reason=lifecycle.reason))
        for name in sorted(membership.members):
            state.outbox.send(name, wire.Drain(reason=lifecycle.reason))
    if (membership.members or membership.is_awaiting(state.now)) and state.now < lifecycle.deadline:
        return
    for name in sorted(membership.members):
        reason = f"it did not leave within {state.plan.drain_s:g} s"
        state.outbox.note("left", replica=name, reason=reason, num_leases=0)
    if lifecycle.stopping or lifecycle.failure:
        state.outbox.write(RunStopped(reason=lifecycle.reason))
    lifecycle.enter(RunStage.OVER)
    state.outbox.add(FinishRun(not lifecycle.failure, lifecycle.reason))

"""The end of a run, stage by stage, and the states that are saved on the way."""

from __future__ import annotations

import functools

from starling.common.wire import messages as wire
from starling.controller.core.events import FinishRun
from starling.controller.core.groups.group import GroupState
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import RunEnded, RunStopped
from starling.controller.core.state import ControllerState


def end(state: ControllerState) -> None:
    """Take the next stage of the end when the one before is complete."""
    ending = state.ending
    if ending.stage is RunStage.RUNNING:
        if _complete(state):
            _tell_tail(state)
            if state.version == 0 or not state.plan.has_policy:
                ending.drain(state.now)
            else:
                ending.stage = RunStage.CHECKPOINTING
        elif ending.stopping and not state.membership.num("policy"):
            ending.drain(state.now)
    if ending.stage is RunStage.CHECKPOINTING:
        _checkpoint(state)
    if ending.stage is RunStage.DRAINING:
        _drain(state)


def save(state: ControllerState) -> None:
    """Have a policy save a state to continue from, every so many steps, before it is dealt the next one.

    It takes the state in the order in which it is told, and writes it while it makes further steps.
    """
    every = int(state.setting("controller.save_every", state.plan.save_every))
    due = every and state.version // every * every > state.saved_step and state.version < state.plan.last_step
    due = due and state.now >= state.saved_at + state.plan.save_rest_s
    if (
        not due
        or not state.may_policies_work()
        or state.step is not None
        or state.leases.has("save")
        or state.ending.stopping
    ):
        return
    _grant_save(state)


def _grant_save(state: ControllerState) -> None:
    version, policies = state.version, state.current_policies()
    if policies and state.now >= state.save_after:
        command = functools.partial(wire.SaveCheckpoint, step=version, state=True, metrics=state.known.metrics())
        state.grant(policies[0], "save", version, lambda lease: command(lease=lease))


def _complete(state: ControllerState) -> bool:
    """Say whether nothing is left to do but the checkpoint."""
    if state.step is not None or state.is_publishing() or state.leases.has("save"):
        return False
    plan = state.plan
    if state.ending.stopping:
        unmade = state.ledger.sealed(state.version + 1)  # a step that was begun is ended, if there is a policy to do it
        return bool(state.current_policies()) and not unmade
    published = state.rounds.version >= state.version or not plan.publishes
    evaluated = state.evaluation is None and (not plan.evaluate_at_end or "end" in state.evaluated)
    return not plan.serves and state.version >= plan.last_step and published and evaluated and not state.requested


def _tell_tail(state: ControllerState) -> None:
    """Say what was generated and will not be trained now; the journal keeps it."""
    counts = {str(s): state.ledger.count(s) for s in (GroupState.LEASED, GroupState.GENERATED, GroupState.SCORED)}
    if any(counts.values()):
        state.note("tail", **counts)


def _checkpoint(state: ControllerState) -> None:
    """Have every policy write the last checkpoint; go on when all that are there have."""
    ending, version = state.ending, state.version
    current = state.current_policies() if state.may_policies_work() else []
    stopped_early = bool(ending.stopping) and version < state.plan.last_step
    if stopped_early and state.saved_step < version and not state.leases.has("save"):
        _grant_save(state)
    for member in current:
        if member.name not in ending.saved and not state.leases.num(member.name, "checkpoint"):
            state.grant(member, "checkpoint", version, lambda lease: wire.SaveCheckpoint(lease=lease, step=version))
    unsaved = stopped_early and state.saved_step < version
    waits = state.leases.has("checkpoint") or state.leases.has("save") or unsaved
    if current and not waits and all(member.name in ending.saved for member in current):
        ending.drain(state.now)


def _drain(state: ControllerState) -> None:
    ending = state.ending
    if not ending.told:
        ending.told = True
        # A run that was stopped, or failed, can be taken up again: its journal has no end.
        if not ending.stopping and not ending.failure:
            state.write(RunEnded(ok=True, reason=ending.reason))
        for name in sorted(state.membership.members):
            state.send(name, wire.Drain(reason=ending.reason))
    if (state.membership.members or state.is_awaiting()) and state.now < ending.deadline:
        return
    for name in sorted(state.membership.members):
        state.note("left", replica=name, reason=f"it did not leave within {state.plan.drain_s:g} s", num_leases=0)
    if ending.is_promised:
        state.write(RunStopped(reason=ending.reason))
    ending.stage = RunStage.OVER
    state.out.append(FinishRun(not ending.failure, ending.reason))

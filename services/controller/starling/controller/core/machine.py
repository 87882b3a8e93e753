"""The controller: `step(event) -> commands` is the only thing that changes it.

Several small machines - membership, ledger, rounds, steps, evaluation, leases, finish - know nothing of each other. An
event is handled (`handle.py` notes what happened), then everything that now follows is derived (`derive.py`, in the
order of the walk).
"""

from __future__ import annotations

from collections.abc import Sequence

from starling.common.wire.messages import Prompt
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import (
    Command,
    Event,
    Fetched,
    Prompts,
    Received,
    ReplicaDisconnected,
    StopRequested,
    Stored,
    Ticked,
)
from starling.controller.core.explain import explain, overdue
from starling.controller.core.groups.dispatch import advance
from starling.controller.core.groups.files import stored
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry
from starling.controller.core.recovery import restore
from starling.controller.core.replicas.heartbeat import received
from starling.controller.core.state import ControllerState

AWAITED_HEARTBEATS = 3
"""For so many heartbeats a controller that begins again waits for those who may hold work."""


class Controller:
    """Decides everything about one run."""

    def __init__(
        self,
        plan: RunPlan,
        prompts: Prompts,
        examples: Prompts,
        held_out: Sequence[Prompt],
        *,
        past: Sequence[JournalEntry] = (),
        incarnation: int = 1,
    ) -> None:
        """Begin a run, or take it up again.

        Args:
            plan: what is to be done.
            prompts: feed reinforcement learning.
            examples: feed the supervised steps.
            held_out: are evaluated.
            past: the journal's records, in order; payload of groups of committed steps may be left out.
            incarnation: how often a controller of this run has begun, from 1.
        """
        self.state = ControllerState(plan, prompts, examples, held_out, incarnation)
        restore(self.state, past)

    @property
    def waiting_for(self) -> str:
        """What the run waits for, in words."""
        return explain(self.state)

    def step(self, event: Event) -> list[Command]:
        """Take in one event and return what is to be done, in order."""
        state = self.state
        state.written, state.out, state.now = [], [], event.now
        if state.ending.stage is RunStage.OVER:
            return []  # what is heard before the process ends is nobody's business any more
        if state.await_until == float("-inf"):
            self._begin()
        match event:
            case Received():
                received(state, event)
            case Ticked():
                self._tick()
            case ReplicaDisconnected(peer=peer):
                member = state.membership.members.get(peer)
                # A policy that is alone cannot be replaced at once, and may come back: its lease decides.
                if member is not None and (member.role != "policy" or member.shares_steps):
                    state.lose(peer, "its connection closed")
            case StopRequested(reason=reason):
                state.ending.stop(reason, event.now)
                state.due = Dirty.ALL
            case Fetched(step=step, records=records):
                if state.fetching == step:
                    state.fetching, state.fetched = -1, (step, records)
                    state.due |= Dirty.CATCH_UP | Dirty.TRAIN
            case Stored(step=step):
                stored(state, step)
        if state.due:
            advance(state)
        return [*state.written, *state.out]

    def _begin(self) -> None:
        """Set the deadlines that a restored state could not set, for want of a clock."""
        state = self.state
        if state.incarnation > 1:
            state.turns.begin_again(state.now)
        state.await_until = state.now + AWAITED_HEARTBEATS * state.plan.heartbeat_s
        if state.ending.stage is RunStage.DRAINING:
            state.ending.drain(state.now)
        elif state.ending.stopping:
            state.ending.deadline = state.now + state.plan.stop_s

    def _tick(self) -> None:
        state = self.state
        if state.awaited and not state.is_awaiting():
            state.miss()
        for name in state.membership.silent(state.now):
            state.lose(name, f"it was silent for {state.plan.lease_s:g} s")
        for lease in state.leases.overdue(state.now):
            member = state.membership.members.get(lease.peer)
            if member is not None:
                limit = state.plan.patience_s(lease.kind)
                state.evict(member, f"{lease.peer} did not answer {lease.id} within {limit:g} s")
        if state.ending.stage in (RunStage.RUNNING, RunStage.CHECKPOINTING):
            problem = overdue(state)
            if problem is not None:
                state.ending.fail(problem, state.now)
        state.wake_rested()
        state.due = Dirty.ALL

"""The controller's core: `Controller.step(event) -> commands`. Nothing else mutates it, and it does nothing itself.

Membership, leases, ledger, rounds, evaluation and ending know nothing of each other. An event is handled
(`handle.py` notes what happened), then everything that now follows is derived (`derive.py`, in the order of the walk).
"""

from __future__ import annotations

from collections.abc import Sequence

from starling.common.wire.messages import Prompt
from starling.controller.core.derive import advance
from starling.controller.core.events import Command, Event, PeerLost, Prompts, Received, StopRequested, Ticked
from starling.controller.core.explain import explain, overdue
from starling.controller.core.finish import Stage
from starling.controller.core.handle import lose, received
from starling.controller.core.plan import RunPlan
from starling.controller.core.state import State


class Controller:
    """Decides everything about one run."""

    def __init__(self, plan: RunPlan, prompts: Prompts, examples: Prompts, held_out: Sequence[Prompt]) -> None:
        """`prompts` feed reinforcement learning, `examples` the supervised steps, `held_out` the evaluations."""
        self.state = State(plan, prompts, examples, held_out)

    def step(self, event: Event) -> list[Command]:
        """Take in one event and return what is to be done, in order."""
        state = self.state
        state.out = []
        match event:
            case Received():
                received(state, event)
            case PeerLost(peer=peer, now=now):
                member = state.membership.members.get(peer)
                # The policy's work is not repeatable, and its connection may come back: its lease decides.
                if member is not None and member.role != "policy":
                    lose(state, peer, "its connection closed", now)
            case StopRequested(reason=reason):
                state.ending.stop(reason)
            case Ticked(now=now):
                for name in state.membership.silent(now):
                    lose(state, name, f"it was silent for {state.plan.lease_s:g} s", now)
        if state.ending.stage is Stage.RUNNING:
            problem = overdue(state, event.now)
            if problem is not None:
                state.ending.fail(problem, event.now)
        advance(state, event.now)
        state.waiting_for = explain(state)
        return state.out

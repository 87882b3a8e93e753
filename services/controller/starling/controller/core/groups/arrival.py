"""Arrival of messages: the event of one, with the check of the tensors of its result."""

from __future__ import annotations

from starling.common.wire.messages import GroupGenerated, TokensScored, Up
from starling.controller.core.events import Buffers, Received
from starling.controller.core.groups.validation.validation import contents_problem
from starling.controller.core.replicas.reclaim import would_be_taken
from starling.controller.core.state import ControllerState


def received(
    state: ControllerState, now: float, sender: str, incarnation: int, message: Up, buffers: Buffers
) -> Received:
    """Return the event of a message that arrived at `now`, before the core handles it.

    Tensors can have gigabytes, so they are looked at only when the result would be taken.
    """
    problem = None
    if isinstance(message, GroupGenerated | TokensScored) and would_be_taken(state, sender, incarnation, message.lease):
        problem = contents_problem(message, buffers, state.group_limits, state.training.limits)
    return Received(now, sender, incarnation, message, buffers, True, problem)

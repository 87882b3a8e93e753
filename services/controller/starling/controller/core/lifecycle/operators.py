"""What operators ask and want: answered at once, from the state."""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation import schedule as derive_evaluation
from starling.controller.core.explain import explain, status, why
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import SettingChanged, StopAsked
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dynamic_settings import check


def operator_said(state: ControllerState, sender: str, message: wire.OperatorMessage) -> None:
    """Answer an operator. A request that comes again is answered again, and counts once."""
    try:
        text, data = _answer(state, message)
        reply = wire.OperatorReply(request=message.request, ok=True, text=text, data=data)
    except ValueError as error:
        reply = wire.OperatorReply(request=message.request, ok=False, text=str(error))
    state.send(sender, reply)


def _answer(state: ControllerState, message: wire.OperatorMessage) -> tuple[str, dict[str, object]]:
    match message:
        case wire.QueryRun(about="status"):
            return status(state)
        case wire.QueryRun(about="why"):
            return why(state)
        case wire.ChangeSetting():
            return _change(state, message), {}
        case wire.RequestEvaluation():
            if state.ending.stage is not RunStage.RUNNING or state.ending.stopping:
                raise ValueError("the run is ending; nothing more is evaluated")
            if not state.plan.needs_rollouts:
                raise ValueError("this run generates nothing; set evaluation.at_end = true in its recipe")
            if not state.plan.has_policy:
                raise ValueError("this run trains nothing and has no newest version; write starling evaluate --model")
            _demand_scorers(state)
            if not state.held_out:
                raise ValueError("this run has no held-out prompts; set data.held_out in the recipe")
            return derive_evaluation.request(state, message), {}
        case wire.RequestStop(reason=reason):
            _stop(state, reason)
            return explain(state), {}
    raise AssertionError(f"an operator does not say {message!r}")


def _demand_scorers(state: ControllerState) -> None:
    if not state.plan.num_rewards:
        raise ValueError(
            "nothing scores in this run, so nothing can be evaluated; set [[reward.scorers]] in its recipe"
        )


def _stop(state: ControllerState, reason: str) -> None:
    state.ending.stop(reason, state.now)
    if state.ending.stopping and not state.ending.is_promised and state.ending.stage is RunStage.RUNNING:
        state.ending.is_promised = True
        state.write(StopAsked(reason=reason))
    state.due = Dirty.ALL


def _change(state: ControllerState, message: wire.ChangeSetting) -> str:
    value = check(message.key, message.value)
    if message.key == "evaluation.every" and value:
        _demand_scorers(state)
    begun = state.step.number if state.step is not None else state.version
    # Supervised steps are as the recipe says: nobody can tell which of them were dealt before a change.
    step = max(begun, state.plan.num_supervised_steps + state.ledger.num_sealed) + 1
    if message.request not in state.changes.requests:
        state.write(SettingChanged(key=message.key, value=value, step=step, request=message.request))
        state.change(message.key, value, step, message.request)
        state.note("set", key=message.key, value=value, step=step)
        state.due = Dirty.ALL
    return f"{message.key} = {value:g} from step {state.changes.requests[message.request]} on"

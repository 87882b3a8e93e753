"""Operators' commands: status, why, set, scale, drain, evaluate, profile and stop, answered at once from the state."""

from __future__ import annotations

from typing import Final

import msgspec

from starling.common.wire import messages as wire
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.schedule import request_evaluation
from starling.controller.core.explain import explain, status, waiting, why
from starling.controller.core.groups.validation.recording import recording_problem, replay_problem
from starling.controller.core.lifecycle.profiling import request_profile
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import CheckpointRequested, SettingChanged, StopAsked
from starling.controller.core.replicas.scaling.scaling import drain_replica, scale
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dynamic_settings import DYNAMIC, check

MAX_REPLY_BYTES: Final = MAX_MESSAGE_BYTES // 2
MAX_TEXT_CHARACTERS: Final = 1 << 20
"""Characters of a reply that would be larger: replicas can report many waits with long texts."""


def on_operator_command(state: ControllerState, sender: str, message: wire.OperatorMessage) -> None:
    """Answer an operator. A request that arrives again is answered again, and changes nothing."""
    try:
        text, data = _answer(state, message)
        reply = wire.OperatorReply(request=message.request, ok=True, text=text, data=data)
    except ValueError as error:
        reply = wire.OperatorReply(request=message.request, ok=False, text=str(error))
    state.outbox.send(sender, _bounded(reply))


def _bounded(reply: wire.OperatorReply) -> wire.OperatorReply:
    """Return a reply that a message can hold: if need be the beginning of its text alone."""
    if len(msgspec.msgpack.encode(reply)) <= MAX_REPLY_BYTES:
        return reply
    text = f"{reply.text[:MAX_TEXT_CHARACTERS]}\n... {len(reply.text)} characters, too many for one answer"
    return msgspec.structs.replace(reply, text=text, data={})


def _answer(state: ControllerState, message: wire.OperatorMessage) -> tuple[str, dict[str, object]]:
    match message:
        case wire.QueryRun(about="status"):
            return status(state)
        case wire.QueryRun(about="why"):
            return why(state)
        case wire.ChangeSetting():
            return _change(state, message), {}
        case wire.ScaleReplicas(role=role, num=num, request=request):
            return scale(state, role, num, request), {"desired": dict(state.replicas.desired.counts)}
        case wire.DrainReplica(name=name, request=request):
            return drain_replica(state, name, request), {"desired": dict(state.replicas.desired.counts)}
        case wire.RequestEvaluation():
            return _evaluate(state, message), {}
        case wire.RequestProfile():
            return request_profile(state, message)
        case wire.RequestCheckpoint():
            return _save(state), {}
        case wire.RequestStop(reason=reason):
            _stop(state, reason)
            return f"the run is stopping, and {waiting(explain(state))}", {}
    raise AssertionError(f"an operator does not send {message!r}")


def _evaluate(state: ControllerState, message: wire.RequestEvaluation) -> str:
    plan = state.plan
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping:
        raise ValueError("the run is ending; nothing more is evaluated")
    if not plan.kind.needs_rollouts(plan):
        raise ValueError("this run generates nothing; set evaluation.at_end = true in its recipe")
    if not plan.kind.trains:
        raise ValueError("this run trains nothing and has no newest version; write starling evaluate --model")
    _require_scorers(state)
    if not state.data.held_out:
        raise ValueError("this run has no held-out prompts; set data.held_out in the recipe")
    return request_evaluation(state, message)


def _require_scorers(state: ControllerState) -> None:
    if not state.plan.num_rewards:
        raise ValueError(
            "nothing scores in this run, so nothing can be evaluated; set [[reward.scorers]] in its recipe"
        )


def _save(state: ControllerState) -> str:
    if not state.plan.kind.trains:
        raise ValueError("this run trains nothing, so it has no state to save")
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping:
        raise ValueError("the run is ending; it saves its last state by itself")
    version, saved = state.version, state.training.saved
    if saved.newest >= version:
        return f"the state of version {version} is saved already"
    if version > saved.asked:
        state.outbox.write(CheckpointRequested(version=version))
        state.outbox.note("checkpoint_requested", version=version)
        saved.asked = version
    state.dirty = Dirty.ALL
    return f"a policy saves the state of version {version}, or of the step that it makes now"


def _stop(state: ControllerState, reason: str) -> None:
    lifecycle = state.lifecycle
    lifecycle.stop(reason, state.now)
    if lifecycle.stopping and not lifecycle.stop_is_journaled and lifecycle.stage is RunStage.RUNNING:
        lifecycle.stop_is_journaled = True
        state.outbox.write(StopAsked(reason=reason))
    state.dirty = Dirty.ALL


def _change(state: ControllerState, message: wire.ChangeSetting) -> str:
    value = check(message.key, message.value)
    if message.key == "evaluation.every" and value:
        _require_scorers(state)
    training = state.training
    if message.key.startswith("sampling.") and training.limits is not None and training.limits.denoising is not None:
        raise ValueError(f"{message.key} is for language models, and this run trains a diffusion model; leave it")
    sampling, group_size = state.plan.sampling, state.plan.group_size
    if message.key.startswith("sampling.") and (sampling.logprobs == "truncated" or sampling.routing == "replayed"):
        number = int(value) if DYNAMIC[message.key].is_whole else value
        changed = msgspec.structs.replace(training.sampling, **{message.key.removeprefix("sampling."): number})
        problem = recording_problem(changed, group_size) or replay_problem(changed, group_size, training.limits)
        if problem:
            raise ValueError(problem)
    begun = training.step.number if training.step is not None else state.version
    # Steps of examples stay as the recipe says: it is not known which of them were dispatched before a change.
    step = max(begun, state.plan.num_supervised_steps + state.buffer.num_frozen_steps) + 1
    if message.request not in training.changes.requests:
        state.outbox.write(SettingChanged(key=message.key, value=value, step=step, request=message.request))
        training.change_setting(state.buffer, message.key, value, step, message.request)
        state.outbox.note("set", key=message.key, value=value, step=step)
        state.dirty = Dirty.ALL
    return f"{message.key} = {value:g} from step {training.changes.requests[message.request]} on"

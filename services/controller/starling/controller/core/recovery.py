"""A controller that died, made again: the state that the journal's records lead to.

What replicas hold in hand is in no record: they tell it, and `claim.py` takes it up.
"""

from __future__ import annotations

from collections.abc import Iterable

from starling.common.wire.messages import RequestEvaluation
from starling.controller.core import records
from starling.controller.core.evaluation.evaluation import Evaluation
from starling.controller.core.events import Buffers
from starling.controller.core.groups.partial import PartialCompletions
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import JournalEntry
from starling.controller.core.state import ControllerState
from starling.controller.core.training.alarms import as_told

OfGroup = (
    records.CompletionsStored
    | records.PartialCompletionsStored
    | records.RewardsStored
    | records.TeacherLogprobsStored
    | records.GroupRequeued
    | records.GroupDiscarded
)


def restore(state: ControllerState, past: Iterable[JournalEntry]) -> None:
    """Bring a fresh `state` to where the records of `past` end."""
    for kept in past:
        _apply(state, kept)


def _apply(state: ControllerState, kept: JournalEntry) -> None:
    match kept.record:
        case records.MemberJoined(name=name, epoch=epoch):
            state.awaited.add(name)
            state.membership.remember(name, epoch)
        case records.MemberLeft(name=name):
            state.awaited.discard(name)
            state.membership.left(name)
        case records.VersionAdopted(name=name, epoch=epoch, version=version):
            state.membership.proven[name] = (epoch, version)
        case records.GroupsOpened(first=first, num=num):
            assert first == state.ledger.num_admitted, "groups are opened in order"
            for position in range(first, first + num):
                prompt = state.prompts.prompt(position)
                state.ledger.admit(prompt, state.expected_tokens(prompt, "train", state.plan.group_size))
        case records.StepFrozen(step=step, ordinals=ordinals):
            groups = [state.ledger.get(ordinal) for ordinal in ordinals]
            state.ledger.take(step, [group for group in groups if group is not None])
        case records.StepCommitted(step=step, metrics=metrics):
            state.version = step
            if state.plan.replays and step > state.plan.num_supervised_steps:
                state.ledger.recalled()
            elif not state.plan.publishes:
                state.ledger.trained(step)
            state.alarms = as_told(metrics)
            state.known.step(metrics)
        case records.VersionPublished(version=version, root=root):
            _publish(state, version, root)
        case records.SettingChanged(key=key, value=value, step=step, request=request):
            state.change(key, value, step, request)
        case records.CheckpointWritten(step=step, state=True):
            state.has_state(step)
        case records.EvaluationRequested(request=request, num_completions=num_completions):
            state.requested.append(RequestEvaluation(request=request, num_completions=num_completions))
        case records.StopAsked(reason=reason):
            state.ending.stopping, state.ending.is_promised = reason, True
        case records.RunStopped():
            state.ending.stopping, state.ending.is_promised = "", False
        case records.RunEnded():
            # Whoever has not heard it yet is told again; that is all that is left to do.
            state.ending.stage, state.ending.told = RunStage.DRAINING, True
        case records.EvaluationOpened() as opened:
            _open(state, opened)
        case records.EvaluationClosed() as closed:
            _close(state, closed)
        case (
            records.CompletionsStored()
            | records.PartialCompletionsStored()
            | records.RewardsStored()
            | records.TeacherLogprobsStored()
            | records.GroupRequeued()
            | records.GroupDiscarded()
        ) as record:
            _group(state, record, kept.payload)
        case _:
            pass  # what is only told to whoever reads the journal


def _publish(state: ControllerState, version: int, root: str) -> None:
    before = state.rounds.version
    state.rounds.note(version, root)
    for step in range(before + 1, version + 1):
        state.ledger.trained(step)


def _open(state: ControllerState, opened: records.EvaluationOpened) -> None:
    state.evaluation = Evaluation(
        opened.number,
        opened.version,
        opened.cause,
        state.held_out,
        num_completions=opened.num_completions,
        max_tries=state.ledger.max_tries,
        first=opened.first,
        deadline=float("inf"),
        expected=lambda prompt: state.expected_tokens(prompt, "evaluate", opened.num_completions),
    )
    if opened.request:
        state.granted.add(opened.request)
        state.requested = [wanted for wanted in state.requested if wanted.request != opened.request]
    state.num_evaluations, state.num_eval_groups = opened.number, state.evaluation.num_admitted


def _close(state: ControllerState, closed: records.EvaluationClosed) -> None:
    evaluation = state.evaluation
    if evaluation is not None and evaluation.number == closed.number:
        state.evaluated[evaluation.cause] = int(closed.summary["version"])
        state.known.evaluation(closed.summary)
        state.evaluation = None


def _group(state: ControllerState, record: OfGroup, payload: Buffers) -> None:
    found = state.find(record.key)
    if found is None:
        return  # of an evaluation that is over, or given up
    groups, group = found
    match record:
        case records.CompletionsStored(trajectories=trajectories, tensors=tensors, lease=lease):
            group.temperature = record.temperature
            state.has_generated = state.has_generated or group.purpose == "train"
            groups.generated(group, trajectories, tensors, payload, lease)
            if trajectories:
                state.lengths.note(group.prompt.id, group.purpose, group.num_tokens / len(trajectories))
        case records.PartialCompletionsStored(partial=partial, tensors=tensors):
            if len(payload) == len(tensors):  # else there is more of the group in a later record
                found_so_far = PartialCompletions(
                    partial, tensors, payload, record.oldest_version, record.newest_version
                )
                groups.interrupted(group, found_so_far, record.temperature)
        case records.RewardsStored(rewards=rewards, components=components):
            groups.scored(group, rewards, components)
        case records.TeacherLogprobsStored(tensors=tensors):
            groups.taught(group, tensors, payload)
        case records.GroupRequeued(tries=tries):
            groups.again(group, tries)
        case records.GroupDiscarded(filtered=True, reward=reward):
            state.ledger.filter(group, reward)
        case records.GroupDiscarded(reason=reason):
            group.problem = reason
            groups.discard(group)

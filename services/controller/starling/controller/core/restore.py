"""A controller that died, made again: the state that the journal's records lead to.

What replicas hold in hand is in no record: they tell it, and `claim.py` takes it up.
"""

from __future__ import annotations

from collections.abc import Iterable

from starling.common.wire.messages import RequestEvaluation
from starling.controller.core import records
from starling.controller.core.evaluation import Evaluation
from starling.controller.core.finish import Stage
from starling.controller.core.ledger import GroupState
from starling.controller.core.records import Kept
from starling.controller.core.state import State


def restore(state: State, past: Iterable[Kept]) -> None:
    """Bring a fresh `state` to where the records of `past` end."""
    for kept in past:
        _apply(state, kept)


def _apply(state: State, kept: Kept) -> None:
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
                state.ledger.admit(state.prompts.prompt(position))
        case records.StepSealed(step=step, ordinals=ordinals):
            groups = [state.ledger.get(ordinal) for ordinal in ordinals]
            state.ledger.take(step, [group for group in groups if group is not None])
        case records.StepCommitted(step=step):
            state.version = step
        case records.VersionPublished(version=version, root=root):
            before = state.rounds.version
            state.rounds.note(version, root)
            for step in range(before + 1, version + 1):
                state.ledger.trained(step)
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
            state.ending.stage, state.ending.told = Stage.DRAINING, True
        case records.EvaluationOpened() as opened:
            _open(state, opened)
        case records.EvaluationClosed(number=number, summary=summary):
            evaluation = state.evaluation
            if evaluation is not None and evaluation.number == number:
                state.evaluated[evaluation.cause] = int(summary["version"])
                state.evaluation = None
        case records.GroupGenerated() | records.GroupScored() | records.GroupReturned() | records.GroupDiscarded():
            _group(state, kept)
        case _:
            pass  # what is only told to whoever reads the journal


def _open(state: State, opened: records.EvaluationOpened) -> None:
    state.evaluation = Evaluation(
        opened.number,
        opened.version,
        opened.cause,
        state.held_out,
        num_completions=opened.num_completions,
        max_tries=state.ledger.max_tries,
        first=opened.first,
        deadline=float("inf"),
    )
    if opened.request:
        state.granted.add(opened.request)
        state.requested = [wanted for wanted in state.requested if wanted.request != opened.request]
    state.num_evaluations, state.num_eval_groups = opened.number, state.evaluation.num_admitted


def _group(state: State, kept: Kept) -> None:
    record = kept.record
    assert isinstance(
        record, records.GroupGenerated | records.GroupScored | records.GroupReturned | records.GroupDiscarded
    )
    found = state.find(record.key)
    if found is None:
        return  # of an evaluation that is over, or given up
    groups, group = found
    match record:
        case records.GroupGenerated(trajectories=trajectories, tensors=tensors, temperature=temperature):
            group.temperature = temperature
            state.has_generated = state.has_generated or group.purpose == "train"
            groups.generated(group, trajectories, tensors, kept.payload)
        case records.GroupScored(rewards=rewards, components=components):
            groups.scored(group, rewards, components)
        case records.GroupReturned(tries=tries):
            group.tries, group.trajectories, group.tensors, group.buffers = tries, (), (), ()
            group.scoring = False
            groups.move(group, GroupState.WAITING)
        case records.GroupDiscarded():
            groups.discard(group)

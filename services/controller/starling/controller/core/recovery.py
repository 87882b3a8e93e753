"""Recovery: rebuild the controller's state from the records of the journal.

No record holds the leases of replicas. They report them, and `replicas/reclaim.py` puts them in force again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import RequestEvaluation
from starling.controller.core import records
from starling.controller.core.compaction import fill, restore_compacted
from starling.controller.core.evaluation.schedule import open_evaluation
from starling.controller.core.events import Buffers
from starling.controller.core.groups.admission import admit_prompts
from starling.controller.core.groups.partial import PartialCompletions
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import JournalEntry
from starling.controller.core.state import ControllerState
from starling.controller.core.training.alarms import from_fields

GroupRecord = (
    records.CompletionsStored
    | records.PartialCompletionsStored
    | records.RewardsStored
    | records.TeacherLogprobsStored
    | records.GroupRequeued
    | records.GroupDiscarded
)
ReplicaRecord = (
    records.MemberJoined
    | records.MemberLeft
    | records.VersionAdopted
    | records.ReplicaCounted
    | records.SourceEvicted
    | records.FilterCountReset
    | records.ReplicasScaled
)
TrainingRecord = (
    records.GroupsOpened
    | records.StepFrozen
    | records.StepReopened
    | records.StepCommitted
    | records.SettingChanged
    | records.CheckpointWritten
    | records.CheckpointRequested
)
WeightsRecord = records.VersionPublished | records.CheckpointLoaded
EvaluationRecord = records.EvaluationRequested | records.EvaluationOpened | records.EvaluationClosed
LifecycleRecord = records.StopAsked | records.RunStopped | records.RunEnded

MAX_LEASE_NUMBER: Final = 1 << 62
"""Greater than the number of any lease."""


def restore(state: ControllerState, journal: Iterable[JournalEntry]) -> None:
    """Bring a fresh `state` to where the records of the journal end.

    Raises ConfigError when they do not follow from each other: rows were lost, exchanged, or are those of another run.
    """
    incarnation = 0
    for number, entry in enumerate(journal, start=1):
        if isinstance(entry.record, records.ControllerStarted | records.StateCompacted):
            incarnation = entry.record.incarnation
        try:
            if entry.kept:
                _fill(state, entry)
            else:
                _apply(state, entry, incarnation)
        except StarlingError:
            raise
        except (AssertionError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"record {number} of the journal ({type(entry.record).__name__}) does not follow from those before it: "
                f"{type(error).__name__} {error!s:.200}; restore the journal, or begin a new run"
            ) from error


def _fill(state: ControllerState, entry: JournalEntry) -> None:
    found = state.find_group(getattr(entry.record, "key", ""))
    if found is not None:
        fill(found[1], entry)


def _apply(state: ControllerState, entry: JournalEntry, incarnation: int) -> None:
    """Apply the record of an entry that a controller of this incarnation wrote."""
    record = entry.record
    if isinstance(record, GroupRecord):
        _apply_to_group(state, record, entry.payload)
    elif isinstance(record, TrainingRecord):
        _apply_to_training(state, record)
    elif isinstance(record, ReplicaRecord):
        _apply_to_replicas(state, record)
    elif isinstance(record, WeightsRecord):
        _apply_to_weights(state, record)
    elif isinstance(record, EvaluationRecord):
        _apply_to_evaluations(state, record)
    elif isinstance(record, LifecycleRecord):
        _apply_to_lifecycle(state, record)
    elif isinstance(record, records.StateCompacted):
        restore_compacted(state, record)
    elif isinstance(record, records.DataRead) and record.is_changed:
        _regenerate_all(state, (incarnation, MAX_LEASE_NUMBER))  # work on the prompts before is not reclaimed
    # Others are only for readers of the journal.


def _regenerate_all(state: ControllerState, floor: tuple[int, int]) -> None:
    """Generate the groups of no step anew; leases up to `floor` are not reclaimed."""
    state.buffer.regenerate_all(floor)
    state.buffer.filtering.clear_row()
    if state.evaluations.current is not None:
        state.evaluations.current.regenerate_all(floor)


def _apply_to_replicas(state: ControllerState, record: ReplicaRecord) -> None:
    membership = state.replicas.membership
    match record:
        case records.MemberJoined(name=name, epoch=epoch, limits=limits):
            membership.restore(name, epoch)
            state.training.limits = limits or state.training.limits
        case records.MemberLeft(name=name):
            membership.awaited.discard(name)
            membership.note_gone(name)
            state.replicas.desired.forget(name)
            state.buffer.filtering.counts.forget(name)
        case records.VersionAdopted(name=name, epoch=epoch, version=version):
            membership.proven[name] = (epoch, version)
        case records.ReplicaCounted(name=name, num=num):
            membership.num_invalid[name] = num
        case records.SourceEvicted(name=name, reader=reader):
            membership.accused[name], membership.accusers[reader] = None, True
        case records.ReplicasScaled(role=role, num=num, drained=drained, request=request, answer=answer):
            state.replicas.desired.set(role, num, drained, request, answer)
        case records.FilterCountReset(name=name):
            state.buffer.filtering.forget(name)


def _apply_to_training(state: ControllerState, record: TrainingRecord) -> None:
    match record:
        case records.GroupsOpened(first=first, num=num):
            assert first == state.buffer.num_admitted, "groups are opened in order"
            admit_prompts(state, num)
        case records.StepFrozen(step=step, ordinals=ordinals):
            groups = [state.buffer.get(ordinal) for ordinal in ordinals]
            state.buffer.freeze(step, [group for group in groups if group is not None])
        case records.StepReopened(step=step):
            state.buffer.reopen(step)
        case records.StepCommitted():
            _commit(state, record)
        case records.SettingChanged(key=key, value=value, step=step, request=request):
            state.training.change_setting(state.buffer, key, value, step, request)
        case records.CheckpointWritten(step=step, state=True):
            state.training.saved.add(step)
        case records.CheckpointRequested(version=version):
            state.training.saved.asked = version


def _commit(state: ControllerState, committed: records.StepCommitted) -> None:
    plan, step = state.plan, committed.step
    state.version = step
    if plan.kind.reads_trajectories and step > plan.num_supervised_steps:
        state.buffer.skip_loaded()
    elif not plan.kind.publishes(plan):
        state.buffer.retire(step)
    state.training.alarms = from_fields(committed.metrics)
    if plan.kind.trains:
        state.training.evaluated.note(step, committed.metrics)
    state.training.metrics.note_step(committed.metrics)


def _apply_to_weights(state: ControllerState, record: WeightsRecord) -> None:
    match record:
        case records.CheckpointLoaded(digest=digest):
            state.weights.checkpoint = digest
        case records.VersionPublished(version=version):
            before = state.weights.version
            state.weights.add_roots(version, record.root, record.layout_roots)
            for step in range(before + 1, version + 1):
                state.buffer.retire(step)


def _apply_to_evaluations(state: ControllerState, record: EvaluationRecord) -> None:
    match record:
        case records.EvaluationRequested(request=request, num_completions=num_completions):
            state.evaluations.requested.append(RequestEvaluation(request=request, num_completions=num_completions))
        case records.EvaluationOpened():
            open_evaluation(state, record, deadline=float("inf"))
        case records.EvaluationClosed():
            _close_evaluation(state, record)


def _apply_to_lifecycle(state: ControllerState, record: LifecycleRecord) -> None:
    lifecycle = state.lifecycle
    match record:
        case records.StopAsked(reason=reason):
            lifecycle.stopping, lifecycle.stop_is_journaled = reason, True
        case records.RunStopped():
            lifecycle.stopping, lifecycle.stop_is_journaled = "", False
            state.replicas.membership.forgive()  # what was wrong may have been mended before the run is resumed
        case records.RunEnded():
            # Only the goodbyes are left to do. Replicas that have not received the drain get it with a heartbeat.
            lifecycle.enter(RunStage.DRAINING)
            lifecycle.drain_sent = True


def _close_evaluation(state: ControllerState, closed: records.EvaluationClosed) -> None:
    evaluations = state.evaluations
    if evaluations.current is not None and evaluations.current.number == closed.number:
        evaluations.evaluated[evaluations.current.cause] = int(closed.summary["version"])
        state.training.metrics.note_evaluation(closed.summary)
        evaluations.current = None


def _apply_to_group(state: ControllerState, record: GroupRecord, payload: Buffers) -> None:
    found = state.find_group(record.key)
    if found is None:
        return  # of an evaluation that is over, or was moved
    groups, group = found
    match record:
        case records.CompletionsStored(trajectories=trajectories, tensors=tensors, lease=lease):
            group.temperature = record.temperature
            state.replicas.had_quorum = state.replicas.had_quorum or group.purpose == "train"
            groups.store_completions(group, trajectories, tensors, payload, lease)
            group.generator, group.giver = record.generator, record.giver
            if trajectories:
                num_tokens = group.num_tokens / len(trajectories)
                state.replicas.lengths.note(group.prompt.id, group.purpose, num_tokens)
        case records.PartialCompletionsStored(partial=completions, tensors=tensors):
            if len(payload) == len(tensors):  # otherwise a later record has more of the group
                oldest, newest = record.oldest_version, record.newest_version
                partial = PartialCompletions(completions, tensors, payload, oldest, newest, record.giver)
                groups.store_partial(group, partial, record.temperature)
        case records.RewardsStored():
            groups.store_rewards(group, record)
        case records.TeacherLogprobsStored(tensors=tensors):
            groups.store_teacher_logprobs(group, tensors, payload)
        case records.GroupRequeued(tries=tries, floor=floor, anew=anew):
            groups.regenerate(group, tries, floor)
            group.is_anew = group.is_anew or anew
        case records.GroupDiscarded(filtered=True, reward=reward, generator=generator, scorer=scorer):
            group.generator = generator
            state.buffer.filter(group, reward, scorer)
        case records.GroupDiscarded(reason=reason):
            group.problem, group.tries = reason, group.tries + 1
            groups.discard(group)

"""Results of groups: completions, partial completions, rewards, teacher log-probabilities, and failures of any of them.

Stops 3 to 5 of the walk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from starling.common.ids import Purpose, lease_incarnation
from starling.common.wire import messages as wire
from starling.common.wire.tensors import (
    GROUP_TENSORS,
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_TENSORS,
    LOSS_MASK,
    ROUTING,
    ROUTING_TENSORS,
)
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Received
from starling.controller.core.groups.admission import newest_allowed, num_completions
from starling.controller.core.groups.group import Group, Groups, GroupState, read_by_scorers
from starling.controller.core.groups.partial import parse_partial
from starling.controller.core.groups.validation.limits import MAX_TIED
from starling.controller.core.groups.validation.scores import are_equal
from starling.controller.core.groups.validation.validation import (
    InvalidResultError,
    UnusableResultError,
    check_contents,
    check_num_media,
    check_num_sampled,
    check_rewards,
    check_scores,
    check_teacher_names,
    check_trajectories,
    usable_scores,
)
from starling.controller.core.records import (
    CompletionsStored,
    GroupDiscarded,
    GroupRequeued,
    PartialCompletionsStored,
    RewardsStored,
    TeacherLogprobsStored,
)
from starling.controller.core.replicas.assignments import revoke
from starling.controller.core.replicas.conduct import (
    note_answered,
    note_scored,
    note_unanswered,
    note_unscored,
    note_used,
)
from starling.controller.core.replicas.departure import distrust
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState

T = TypeVar("T")

MAX_LOST_ENGINES = 2
"""Number of engines that may die with a group before this counts as a failure of the group: a prompt that kills every
engine must not use up all of them. Groups that ran on the same engines count it too, and are generated again."""
MAX_REASON_CHARACTERS = 2000
"""Of the reason why a group is generated again, which may hold what a replica sent."""


def on_generated(
    state: ControllerState, member: Member, lease: Lease, message: wire.GroupGenerated, event: Received
) -> None:
    """Store the completions of a group if they are those that were requested."""
    state.dirty |= Dirty.SCORE | Dirty.DISPATCH
    note_answered(state, member, lease)
    found = state.group_of_lease(message.lease)
    if found is None:
        return
    groups, group = found
    try:
        problem = _problem(state, groups, group, message)
        if problem is not None:
            reason, retryable, status = problem
            retry(state, groups, group, reason, member.name, retryable=retryable, status=status)
            return
        check_trajectories(message.trajectories, newest_allowed(state, group), group.prompt)
        numbers = [one.num_tokens - one.num_masked for one in message.trajectories]
        _check_num_sampled(state, group, lease, numbers)
        check_contents(event, state.group_limits, state.training.limits)
        _check_temperature(state, lease, group, message.temperature)
        _check_recording(state, group, message.tensors, message.tensors[1].shape[0])
        if group.purpose == "train" and state.plan.kind.keeps_tokens and not any(numbers):
            # A step of such groups could not be trained, and would end the run.
            raise UnusableResultError("none of its completions has a sampled token: there is nothing to train")
    except InvalidResultError as error:
        _reject(state, member, groups, group, error)
        return
    if message.temperature >= 0:  # a controller that took the work over did not request it
        group.temperature = message.temperature
    tensors, buffers = _kept(state, group, message, event.buffers)
    trajectories = _with_known_names(state, member, message.trajectories, group.purpose)
    if any(one.problem for one in trajectories):  # none of them has failed, and it would be kept
        trajectories = tuple([msgspec.structs.replace(one, problem="") for one in trajectories])
    giver = group.partial.giver_for(member.name) if group.partial is not None else None
    groups.store_completions(group, trajectories, tensors, buffers, message.lease)
    group.generator, group.giver = member.name, giver
    # The form of its tensors was checked: there is one token id for each token of its completions.
    _update_estimates(state, member, lease, group, message.tensors[1].shape[0])
    record = CompletionsStored(
        key=group.key,
        trajectories=trajectories,
        tensors=tensors,
        temperature=group.temperature,
        lease=message.lease,
        generator=member.name,
        giver=giver,
    )
    state.outbox.write(record, buffers)
    if not state.plan.num_rewards:
        store_zero_rewards(state, groups, group)


def _kept(
    state: ControllerState, group: Group, message: wire.GroupGenerated, buffers: Buffers
) -> tuple[tuple[wire.TensorMeta, ...], Buffers]:
    """Return the tensors of a group that are still needed.

    Nothing of an evaluation is trained. Its rewards need only the message and what scorers get, and its tokens would
    take memory until it closes, and space in the journal.
    """
    if group.purpose == "train" and state.plan.kind.keeps_tokens:
        return message.tensors, buffers
    return read_by_scorers(message.tensors, buffers)


def _with_known_names(
    state: ControllerState, member: Member, trajectories: tuple[wire.TrajectoryMeta, ...], purpose: Purpose
) -> tuple[wire.TrajectoryMeta, ...]:
    """Return trajectories without metrics beyond the names that a run may have, and without any where none is read."""
    if not [one for one in trajectories if one.metrics]:
        return trajectories
    if purpose == "evaluate":
        return tuple([msgspec.structs.replace(one, metrics={}) for one in trajectories])
    known = [_known_names(state, member, one.metrics) for one in trajectories]
    return tuple(
        [msgspec.structs.replace(one, metrics=metrics) for one, metrics in zip(trajectories, known, strict=True)]
    )


def _known_names(state: ControllerState, member: Member, values: dict[str, T]) -> dict[str, T]:
    """Return scores or metrics without those beyond the names that a run may have, noting the first that is not."""
    names = state.training.metric_names
    was_full = names.is_full
    known = names.known(member.name, values)
    if names.is_full and not was_full:
        first = next(name for name in values if name not in known)
        state.outbox.note("names_left_out", replica=member.name, name=first, limit=names.limit)
    return known


def _problem(
    state: ControllerState, groups: Groups, group: Group, message: wire.GroupGenerated
) -> tuple[str, bool, wire.Status | None] | None:
    """Return why completions cannot be used, whether to retry, and the status of one that failed; None if there is no
    such reason.

    Raises:
        InvalidResultError: they are not those that were asked for.
    """
    wanted = num_completions(state, group.purpose)
    if len(message.trajectories) != wanted:
        raise InvalidResultError(f"{len(message.trajectories)} completions came instead of {wanted}")
    if len(message.tensors) < len(GROUP_TENSORS):
        raise InvalidResultError(f"{len(message.tensors)} tensors came instead of {len(GROUP_TENSORS)} or more")
    oldest = min([one.oldest_version for one in message.trajectories])
    if oldest < group.min_version:
        return f"a token is of version {oldest}, older than {group.min_version}", True, None
    if group.purpose == "evaluate" and any(t.newest_version != group.min_version for t in message.trajectories):
        return f"a token is of another version than {group.min_version}", True, None
    if failed := [one for one in message.trajectories if one.status not in wire.TRAINABLE_STATUSES]:
        first, index = failed[0], message.trajectories.index(failed[0])
        reason = f"{len(failed)} of its completions failed, completion {index} by {first.status}: {first.problem}"
        return reason, True, first.status
    check_num_media(group.prompt, message.tensors, state.training.limits)
    further = message.tensors[len(GROUP_TENSORS) :]
    names = {tensor.name for tensor in further} if further else set[str]()
    if groups.needs_teacher and names - {LOSS_MASK, *KEPT_TENSORS, *ROUTING_TENSORS}:
        return "its prompt has more than tokens, and a teacher reads nothing else", False, None
    if _is_recorded(state, group) and KEPT_COUNTS not in names:
        return "its engine does not record kept tokens; set sampling.logprobs = 'full'", True, None
    if _is_routed(state, group) and ROUTING not in names:
        return "its engine does not record the experts of its tokens; set sampling.routing = 'own'", True, None
    return None


def _is_recorded(state: ControllerState, group: Group) -> bool:
    """Say whether the tokens that truncation keeps are recorded for a group."""
    return group.purpose == "train" and state.plan.sampling.logprobs == "truncated"


def _is_routed(state: ControllerState, group: Group) -> bool:
    """Say whether the experts of its tokens are recorded for a group."""
    return group.purpose == "train" and state.plan.sampling.routing == "replayed"


def check_recorded(state: ControllerState, group: Group, tensors: Sequence[wire.TensorMeta]) -> None:
    """Check that kept tokens and experts are there only if they are recorded: no policy expects those of some groups.

    Raises:
        InvalidResultError: naming which of them are not recorded.
    """
    names = {tensor.name for tensor in tensors}
    if not _is_routed(state, group) and not names.isdisjoint(ROUTING_TENSORS):
        raise InvalidResultError("experts of its tokens came, and sampling.routing is 'own'")
    if not _is_recorded(state, group) and not names.isdisjoint(KEPT_TENSORS):
        raise InvalidResultError("kept tokens came, and sampling.logprobs is 'full'")


def check_partial_recorded(state: ControllerState, group: Group, tensors: Sequence[wire.TensorMeta]) -> None:
    """Check that all that is recorded for a group is there: else the rollout that resumes it would be blamed.

    Raises:
        UnusableResultError: naming what is not there.
    """
    names = {tensor.name for tensor in tensors}
    if _is_recorded(state, group) and KEPT_COUNTS not in names:
        raise UnusableResultError("its engine does not record kept tokens")
    if _is_routed(state, group) and ROUTING not in names:
        raise UnusableResultError("its engine does not record the experts of its tokens")


def _check_recording(state: ControllerState, group: Group, tensors: Sequence[wire.TensorMeta], num_tokens: int) -> None:
    """Check that kept tokens and experts came only if they are recorded, and no more tokens than truncation keeps.

    The controller holds those of all groups of some steps.
    """
    check_recorded(state, group, tensors)
    if not _is_recorded(state, group):
        return
    most = 2 * int(max(_settings_so_far(state, group, "top_k"))) + MAX_TIED
    for tensor in tensors:
        if tensor.name == KEPT_IDS and tensor.shape[0] > most * num_tokens:
            raise UnusableResultError(
                f"{tensor.shape[0]} kept tokens came for {num_tokens} tokens, and by sampling.top_k at most {most} "
                "are kept for each"
            )


def _check_num_sampled(state: ControllerState, group: Group, lease: Lease, numbers: Sequence[int]) -> None:
    """Check how many tokens were sampled of each completion of a group.

    Only the holder of work of an earlier controller knows what was requested. It was at most what any setting of this
    run allowed, unless the run was resumed with another setting: so more costs the group a try, and nothing else.
    """
    if lease.send is not None and isinstance(lease.send.message, wire.GenerateGroup):
        request = lease.send.message
        limit = request.sampling.max_tokens
        if request.partial:
            limit = max(limit, *[one.num_tokens for one in request.partial])
        check_num_sampled(numbers, limit)
        return
    partial = [one.num_tokens for one in group.partial.completions] if group.partial is not None else []
    try:
        check_num_sampled(numbers, int(max([*_settings_so_far(state, group, "max_tokens"), *partial])))
    except InvalidResultError as error:
        raise UnusableResultError(str(error)) from None


def _settings_so_far(state: ControllerState, group: Group, name: str) -> list[float]:
    """Return the values that a field of `Sampling` has had in this run for groups of the purpose of `group`."""
    if group.purpose == "evaluate":
        return [getattr(state.plan.eval_sampling, name)]
    changes = state.training.changes.in_order()
    return [getattr(state.plan.sampling, name), *[value for key, value, _ in changes if key == f"sampling.{name}"]]


def _check_temperature(state: ControllerState, lease: Lease, group: Group, temperature: float) -> None:
    """Check the temperature that a rollout reports against the one that it was sent.

    Where that is not known, because an earlier controller sent it or the lease was lost meanwhile, it is one that this
    run has had: the policy divides by it, and the next rollout of a partial group samples at it.
    """
    if not -1 <= temperature < math.inf:
        raise InvalidResultError(f"its tokens were sampled at temperature {temperature}")
    if temperature < 0 or temperature == group.temperature:
        return
    if lease.send is not None:
        raise InvalidResultError(f"its tokens were sampled at temperature {temperature} instead of {group.temperature}")
    if temperature not in _settings_so_far(state, group, "temperature"):
        raise UnusableResultError(f"its tokens were sampled at temperature {temperature}, which this run has not had")


def _reject(state: ControllerState, member: Member, groups: Groups, group: Group, error: InvalidResultError) -> None:
    """Count a result that cannot be used as a failed try of its group, and distrust the replica if it is malformed."""
    if member.role in state.replicas.membership.unscored:
        note_unscored(state, group, member)
    retry(state, groups, group, str(error), member.name)
    if error.is_malformed:
        distrust(state, member, f"{member.name} answered for prompt {group.prompt.id}: {error}")


def _update_estimates(state: ControllerState, member: Member, lease: Lease, group: Group, num_tokens: int) -> None:
    """Update the estimates of the length of a group, of `num_tokens`, and of the speed of its rollout.

    Work from before this controller gives no speed, because it is not known when it began.
    """
    state.replicas.lengths.note(group.prompt.id, group.purpose, num_tokens / len(group.trajectories))
    if lease.send is not None and isinstance(lease.send.message, wire.GenerateGroup):
        resumed = sum([completion.num_tokens for completion in lease.send.message.partial])
        state.replicas.slots.rates.note(member.name, num_tokens - resumed, state.now - lease.begun_at)


def on_interrupted(
    state: ControllerState, member: Member, lease: Lease, message: wire.GroupInterrupted, event: Received
) -> None:
    """Requeue a group that a rollout cannot finish, with its tokens so far where they may be trained.

    A rollout that gives a group back is about to leave, or has lost its engine, so it gets no other for a while.
    """
    state.dirty |= Dirty.DISPATCH | Dirty.EVALUATE
    state.replicas.slots.cool_down(member, state.now + state.plan.lease_s)
    evaluation = state.evaluations.current
    if evaluation is not None and state.replicas.sharing.has_devices(member):  # else it was told to sleep
        evaluation.given_back_by.add(member.name)
        state.dirty |= Dirty.PIN
    found = state.group_of_lease(message.lease)
    if found is None:
        return
    groups, group = found
    groups.requeue(group, "generate")
    fields: dict[str, object] = {}
    malformed: InvalidResultError | None = None
    try:
        _check_num_sampled(state, group, lease, [one.num_tokens for one in message.partial])
        _check_temperature(state, lease, group, message.temperature)
        fields["num_tokens"] = _store_partial(state, member, groups, group, message, event.buffers)
    except InvalidResultError as error:
        fields = {"num_tokens": 0, "thrown_away": str(error)}
        malformed = error if error.is_malformed else None
    if fields["num_tokens"]:
        note_answered(state, member, lease)
    else:
        note_unanswered(state, member, [lease])
    reason = message.reason[:MAX_REASON_CHARACTERS]
    state.outbox.note("interrupted", prompt=group.prompt.id, replica=member.name, reason=reason, **fields)
    group.num_lost_engines += message.lost
    if malformed is not None:
        _reject(state, member, groups, group, malformed)
    elif group.num_lost_engines >= MAX_LOST_ENGINES:
        group.num_lost_engines = 0
        retry(state, groups, group, f"{MAX_LOST_ENGINES} engines died while they worked on it", member.name)


def _store_partial(
    state: ControllerState,
    member: Member,
    groups: Groups,
    group: Group,
    message: wire.GroupInterrupted,
    buffers: Buffers,
) -> int:
    """Keep the partial completions of a group. Returns the number of their tokens.

    Raises:
        InvalidResultError: they may not be trained; one sentence.
    """
    num = num_completions(state, group.purpose)
    partial = parse_partial(message.partial, message.tensors, buffers, num, state.training.limits)
    if partial is None or group.is_anew:
        return 0
    _check_recording(state, group, partial.tensors, partial.num_tokens)
    check_partial_recorded(state, group, partial.tensors)
    oldest, newest = partial.oldest_version, partial.newest_version
    if not partial.is_within(group.min_version, newest_allowed(state, group)):
        raise UnusableResultError(
            f"tokens of versions {oldest} to {newest} were returned, and {group.min_version} was the oldest allowed"
        )
    # A controller that took the work over did not choose the temperature, and knows it only from the message.
    chosen = group.temperature if lease_incarnation(message.lease) == state.incarnation else -1.0
    temperature = message.temperature if message.temperature >= 0 else chosen
    if not 0 <= temperature < math.inf:
        raise UnusableResultError("the temperature at which the tokens were sampled is not known")
    if group.partial is None or group.partial.giver == member.name:  # else it may have resumed those of another
        partial = dataclasses.replace(partial, giver=member.name)
    if not groups.store_partial(group, partial, temperature):
        return 0
    record = PartialCompletionsStored(
        key=group.key,
        partial=partial.completions,
        tensors=partial.tensors,
        oldest_version=oldest,
        newest_version=newest,
        temperature=temperature,
        giver=partial.giver,
    )
    state.outbox.write(record, partial.buffers)
    return partial.num_tokens


def store_zero_rewards(state: ControllerState, groups: Groups, group: Group) -> None:
    """Store rewards of 0 in a run that scores nothing: it learns only from its teacher's log-probabilities."""
    stored = RewardsStored(key=group.key, rewards=(0.0,) * len(group.trajectories))
    groups.store_rewards(group, stored)
    _note_if_complete(state, group)
    state.outbox.write(stored)
    state.dirty |= Dirty.TRAIN


def on_scored(state: ControllerState, member: Member, lease: Lease, message: wire.GroupScored) -> None:
    """Store the rewards of a group, unless some scorer failed."""
    state.dirty |= Dirty.SCORE
    note_answered(state, member, lease)
    found = state.group_of_lease(message.lease)
    if found is None:
        return
    groups, group = found
    if not wire.TRAINABLE_STATUSES.issuperset(message.statuses) or None in message.rewards:
        reason = "; ".join([problem[:MAX_REASON_CHARACTERS] for problem in message.problems[:3]])
        note_unscored(state, group, member)
        failed = next((one for one in message.statuses if one not in wire.TRAINABLE_STATUSES), wire.Status.REWARD_ERROR)
        retry(state, groups, group, reason or "a scorer gave no reward", member.name, status=failed)
        return
    try:
        check_rewards(message, len(group.trajectories), state.plan.num_scorers)
        check_scores(message, state.plan.scorers, group.prompt)
    except InvalidResultError as error:
        _reject(state, member, groups, group, error)
        return
    note_scored(state, group, member)
    rewards = message.rewards
    if state.plan.dynamic_sampling and group.purpose == "train" and _teaches_nothing(state, message):
        if group.giver is not None:
            _begin_anew(state, groups, group, group.giver, f"all its rewards are {rewards[0]:g}")
            return
        note_used(state, group.generator)
        state.buffer.note_not_discarded()
        _filter(state, group, rewards[0] or 0.0, member.name)
        return
    stored = RewardsStored(
        key=group.key,
        rewards=message.rewards,
        components=_known_names(state, member, message.components),
        scorer=member.name,
        evaluation_scores=_evaluation_scores(state, member, group, message),
    )
    groups.store_rewards(group, stored)
    _note_if_complete(state, group)
    state.outbox.write(stored)
    if group.purpose == "evaluate":
        group.tensors, group.buffers = (), ()  # what the scorers have read
        state.dirty |= Dirty.EVALUATE
    elif state.buffer.is_full():  # most groups are not the last of their step
        state.dirty |= Dirty.TRAIN


def _evaluation_scores(
    state: ControllerState, member: Member, group: Group, message: wire.GroupScored
) -> dict[str, tuple[float | None, ...]]:
    """Return the evaluation scores of a group, which has none if they were not asked for."""
    if not message.evaluation_scores or not state.plan.evaluates(group.purpose, group.ordinal):
        return {}
    return _known_names(state, member, usable_scores(message.evaluation_scores))


def _teaches_nothing(state: ControllerState, message: wire.GroupScored) -> bool:
    """Say whether all completions of a group are equally good, so that their advantages are 0."""
    if state.plan.compares_scores:
        return are_equal(message.components, state.plan.scorers)
    return len(set(message.rewards)) == 1


def on_tokens_scored(
    state: ControllerState, member: Member, lease: Lease, message: wire.TokensScored, event: Received
) -> None:
    """Store the teacher's log-probabilities of a group."""
    state.dirty |= Dirty.SCORE | Dirty.TRAIN
    note_answered(state, member, lease)
    found = state.group_of_lease(message.lease)
    if found is None:
        return
    groups, group = found
    try:
        check_teacher_names(group.num_tokens, message.tensors, state.plan.teacher_top_k)
        check_contents(event, state.group_limits, state.training.limits)
    except InvalidResultError as error:
        _reject(state, member, groups, group, error)
        return
    note_scored(state, group, member)
    groups.store_teacher_logprobs(group, message.tensors, event.buffers)
    _note_if_complete(state, group)
    state.outbox.write(TeacherLogprobsStored(key=group.key, tensors=message.tensors), event.buffers)


def _note_if_complete(state: ControllerState, group: Group) -> None:
    """Note that a group is of use, once it has its rewards and, in a run with teachers, their log-probabilities.

    Before, what its rollout generated may still turn out to be nothing that a teacher can read.
    """
    if group.state is GroupState.SCORED:
        note_used(state, group.generator)
        state.buffer.note_not_discarded()


def _filter(state: ControllerState, group: Group, reward: float, scorer: str) -> None:
    """Discard a group whose rewards are all equal: its slot is free for the next prompt, and its prompt is used."""
    _revoke_scoring(state, group)
    state.buffer.filter(group, reward, scorer)
    state.dirty |= Dirty.ADMIT | Dirty.TRAIN
    record = GroupDiscarded(
        key=group.key,
        prompt=group.prompt.id,
        reason=f"all its rewards are {reward:g}",
        filtered=True,
        reward=reward,
        generator=group.generator,
        scorer=scorer,
    )
    state.outbox.write(record)
    state.outbox.note("filtered", prompt=group.prompt.id, reward=reward)


def retry(
    state: ControllerState,
    groups: Groups,
    group: Group,
    reason: str,
    replica: str = "",
    *,
    retryable: bool = True,
    status: wire.Status | None = None,
) -> None:
    """Generate a group again, or discard it; begin it anew instead if it was resumed from another rollout's tokens.

    Args:
        replica: whose answer this follows from; empty for none.
        status: the status of a completion that failed, if one did.
    """
    reason, generator = reason[:MAX_REASON_CHARACTERS], group.generator
    giver = group.partial.giver_for(replica) if group.partial is not None else group.giver
    if giver is not None:
        _begin_anew(state, groups, group, giver, reason)
        return
    if replica:
        was_used = group.state in (GroupState.SCORED, GroupState.FROZEN)
        state.replicas.membership.conduct[replica].note_spoiled(was_used=was_used)
    groups.num_env_errors += status is wire.Status.ENV_ERROR
    if group.trajectories:
        group.failed_by, group.spoiled_by = replica, generator
    _revoke_scoring(state, group)
    group.problem = reason
    groups.retry(group, (state.incarnation, state.replicas.leases.num_granted), retryable=retryable)
    state.dirty |= Dirty.DISPATCH | Dirty.ADMIT | Dirty.TRAIN | Dirty.EVALUATE
    if group.state is not GroupState.WAITING:
        # Where each prompt is answered once, a prompt that cannot be answered says nothing about the others.
        state.buffer.num_discarded_in_a_row += state.plan.kind.trains or retryable
        state.buffer.note_discarded_by(generator, replica)
        state.buffer.last_discarded = f"prompt {group.prompt.id}: {reason}"
        state.outbox.write(GroupDiscarded(key=group.key, prompt=group.prompt.id, reason=reason))
    else:
        state.outbox.write(GroupRequeued(key=group.key, tries=group.tries, floor=group.floor))
    kind = GroupState.WAITING if group.state is GroupState.WAITING else GroupState.DISCARDED
    fields = {} if status is None else {"status": str(status)}
    state.outbox.note(str(kind), because_of=replica, prompt=group.prompt.id, tries=group.tries, reason=reason, **fields)


def _begin_anew(state: ControllerState, groups: Groups, group: Group, giver: str, reason: str) -> None:
    """Generate a group again without the partial completions of another rollout, and take no more of them for it.

    They may be why the completed group is of no use. So it counts no try, and nothing against the replicas that resumed
    or scored them.
    """
    if giver:
        state.replicas.membership.conduct[giver].note_spoiled()
    _revoke_scoring(state, group)
    groups.regenerate(group, group.tries, (state.incarnation, state.replicas.leases.num_granted))
    group.is_anew = True
    state.dirty |= Dirty.DISPATCH | Dirty.ADMIT | Dirty.TRAIN | Dirty.EVALUATE
    state.outbox.write(GroupRequeued(key=group.key, tries=group.tries, floor=group.floor, anew=True))
    state.outbox.note("begun_anew", because_of=giver, prompt=group.prompt.id, reason=reason)


def _revoke_scoring(state: ControllerState, group: Group) -> None:
    """Revoke the scoring leases of a group whose completions are dropped."""
    replicas = state.replicas
    for lease in (group.score_lease, group.teacher_lease):
        held = replicas.leases.get(lease)
        if held is not None and revoke(state, held.peer, lease):
            replicas.slots.mark(replicas.membership.members[held.peer], held.kind)
            state.dirty |= Dirty.SCORE

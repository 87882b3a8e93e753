"""Dispatch of groups to rollouts (stop 2 of the walk), and of their completions to rewards and teachers (stop 5)."""

from __future__ import annotations

import msgspec

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.admission import newest_allowed, num_completions, required_version, sampling
from starling.controller.core.groups.group import GENERATED, Group, Groups, read_by_scorers
from starling.controller.core.groups.partial import NO_TOKENS, PartialCompletions
from starling.controller.core.groups.results import store_zero_rewards
from starling.controller.core.plan import draw_seed
from starling.controller.core.replicas.assignments import grant
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing.earliest_finish import Route, Routing
from starling.controller.core.replicas.routing.slots import SlotIndex
from starling.controller.core.state import ControllerState


def dispatch(state: ControllerState) -> None:
    """Give waiting groups to the rollouts that will finish them first; groups of an evaluation go first.

    Of groups that need the same version, the longest of a step goes first, so that it does not hold up the step in the
    end. The order of dispatch never changes which step trains a group.
    """
    if state.weights.awaits_checkpoint:
        return
    evaluation = state.evaluations.current
    while evaluation is not None and (group := evaluation.next_longest()) is not None:
        refreshed_slots(state, "rollout")
        route = _route(evaluation.routing, group, evaluation.version)
        if route is None:
            break
        _generate(state, route.member, evaluation, group, evaluation.version)
    if not _may_generate(state):
        return
    buffer = state.buffer
    while (group := buffer.next_waiting()) is not None:
        required = required_version(state, group)
        longest = buffer.next_longest()
        if longest is not None and longest is not group and required_version(state, longest) == required:
            group = longest
        tokens = group.expected_tokens
        routing = refreshed_slots(state, "rollout").routing
        route = _route(routing, group, required)
        if route is None:
            return  # the groups behind it need at least as new a version
        if routing.should_wait(route, required, tokens, buffer.waiting_tokens):
            if state.replicas.slots.slow_down_late(state.now):
                continue
            return
        _generate(state, route.member, buffer, group, required)
    if state.plan.sync_every == 0 and state.version > state.weights.version:
        state.dirty |= Dirty.PUBLISH  # no group waits: rollouts may need the newest version for more


def _route(routing: Routing, group: Group, min_version: int) -> Route | None:
    """Return the rollout that finishes a group first, if possible another one than the one that spoiled it."""
    route = routing.soonest(min_version, group.expected_tokens)
    if route is not None and route.member.name == group.spoiled_by:
        return routing.soonest_but(group.spoiled_by, min_version, group.expected_tokens) or route
    return route


def score(state: ControllerState) -> None:
    """Give generated groups to reward replicas; groups of an evaluation go first."""
    evaluation = state.evaluations.current
    purposes: tuple[Groups, ...] = (state.buffer,) if evaluation is None else (evaluation, state.buffer)
    for groups in purposes:
        while (group := groups.next_to_score()) is not None:
            if not state.plan.num_rewards:  # the journal lost the record of its rewards
                store_zero_rewards(state, groups, group)
                continue
            member = _scorer(state, "reward", group)
            if member is None:
                return
            _score(state, member, group)


def score_with_teachers(state: ControllerState) -> None:
    """Give generated groups to teachers, before or after they have their rewards."""
    while (group := state.buffer.next_to_teacher()) is not None:
        member = _scorer(state, "teacher", group)
        if member is None:
            return
        _score_tokens(state, member, group)


def _scorer(state: ControllerState, role: Role, group: Group) -> Member | None:
    """Return the least busy replica of a role, but another one than has failed this group, if one has a free slot."""
    slots = refreshed_slots(state, role)
    index = slots.rewards if role == "reward" else slots.teachers
    member = index.least_busy()
    if member is not None and member.name == group.failed_by:
        return index.least_busy_but(group.failed_by) or member
    return member


def refreshed_slots(state: ControllerState, role: Role) -> SlotIndex:
    """Return the index of free slots, up to date for the replicas of `role`."""
    return state.replicas.slots.refreshed(role, state.evaluations.current)


def _may_generate(state: ControllerState) -> bool:
    """Say whether training groups may be generated: a version is published, all first replicas are there, no stop."""
    if state.lifecycle.stopping or state.weights.version < 0:
        return False
    replicas = state.replicas
    if not replicas.had_quorum:
        plan = state.plan
        wanted: dict[Role, int] = {
            "rollout": plan.num_rollouts, "reward": plan.num_rewards, "teacher": plan.num_teachers
        }  # fmt: skip
        replicas.had_quorum = all(
            replicas.membership.num(role) >= replicas.desired.at_start(role, num) for role, num in wanted.items()
        )
    return replicas.had_quorum


def _generate(state: ControllerState, member: Member, groups: Groups, group: Group, min_version: int) -> None:
    seed = draw_seed(state.plan.seed, group.purpose, group.ordinal, group.tries)
    how = msgspec.structs.replace(sampling(state, group.purpose), seed=seed)
    partial = _drop_if_stale(state, group, min_version) or NO_TOKENS
    if partial is not NO_TOKENS:  # all tokens of a group are of one temperature
        how = msgspec.structs.replace(how, temperature=group.temperature)
    group.temperature = how.temperature
    groups.lease(group, min_version)
    grant(
        state,
        member,
        "generate",
        group.key,
        lambda lease: wire.GenerateGroup(
            lease=lease,
            purpose=group.purpose,
            prompt=group.prompt,
            num_completions=num_completions(state, group.purpose),
            sampling=how,
            min_version=min_version,
            partial=partial.completions,
            tensors=partial.tensors,
        ),
        partial.buffers,
        max(1, group.expected_tokens - partial.num_tokens),
    )


def _drop_if_stale(state: ControllerState, group: Group, min_version: int) -> PartialCompletions | None:
    """Return the partial completions of a group, after dropping them if they are too old for its step by now."""
    if group.partial is not None and not group.partial.is_within(min_version, newest_allowed(state, group)):
        state.outbox.note("stale", prompt=group.prompt.id, num_tokens=group.partial.num_tokens)
        group.partial = None
    return group.partial


def _score(state: ControllerState, member: Member, group: Group) -> None:
    assert group.state is GENERATED
    completions = [
        wire.CompletionText(text=t.text, status=t.status, num_tokens=t.num_tokens - t.num_masked, reward=t.reward)
        for t in group.trajectories
    ]
    tensors, buffers = read_by_scorers(group.tensors, group.buffers)
    group.score_lease = grant(
        state,
        member,
        "score",
        group.key,
        lambda lease: wire.ScoreGroup(
            lease=lease,
            prompt=group.prompt,
            completions=tuple(completions),
            evaluate=state.plan.evaluates(group.purpose, group.ordinal),
            tensors=tensors,
        ),
        buffers,
    )


def _score_tokens(state: ControllerState, member: Member, group: Group) -> None:
    assert group.state is GENERATED
    group.teacher_lease = grant(
        state,
        member,
        "teach",
        group.key,
        lambda lease: wire.ScoreTokens(
            lease=lease,
            prompt_id=group.prompt.id,
            lengths=tuple(t.num_tokens for t in group.trajectories),
            temperature=group.temperature,
            tensors=group.tensors[:2],
        ),
        group.buffers[:2],
    )

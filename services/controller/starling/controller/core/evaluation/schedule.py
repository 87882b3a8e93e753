"""Schedule of evaluations: begun when due, pinned to rollouts, closed when every prompt is scored or discarded."""

from __future__ import annotations

from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.evaluation import Evaluation, num_pinned
from starling.controller.core.groups.admission import expected_tokens
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import EvaluationClosed, EvaluationOpened, EvaluationRequested
from starling.controller.core.replicas.assignments import revoke
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.weights.distribution import find_source
from starling.controller.core.weights.versions import check_outdated


def evaluate(state: ControllerState, *, all_rollouts: bool) -> None:
    """Close an evaluation that is done or late, begin the one that is due, and pin it to rollouts.

    `all_rollouts`: look at all rollouts for that; otherwise only at those whose version changed.
    """
    evaluations, membership = state.evaluations, state.replicas.membership
    evaluation = evaluations.current
    if evaluation is not None and evaluation.deadline == float("inf"):  # it began before the controller's restart
        evaluation.deadline = state.now + state.plan.evaluation_s
    if evaluation is not None and not evaluation.is_done and state.now >= evaluation.deadline:
        evaluation.give_up()
        _revoke_all(state)
    if evaluation is not None and evaluation.is_done:
        _close(state, evaluation)
    if evaluations.current is None and state.lifecycle.stage is RunStage.RUNNING and not state.lifecycle.stopping:
        _begin_next(state)
        all_rollouts = True
    if evaluations.current is not None and (all_rollouts or evaluations.unpinned):
        changed = (membership.members.get(name) for name in sorted(evaluations.unpinned))
        rollouts = membership.of("rollout") if all_rollouts else [member for member in changed if member is not None]
        _pin(state, evaluations.current, rollouts)
    evaluations.unpinned.clear()


def request_evaluation(state: ControllerState, message: wire.RequestEvaluation) -> str:
    """Queue an evaluation that an operator requests. Returns the answer to the operator."""
    evaluations = state.evaluations
    if message.request in evaluations.granted:
        return "the evaluation of this request has begun already"
    if all(message.request != other.request for other in evaluations.requested):
        evaluations.requested.append(message)
        state.outbox.write(EvaluationRequested(request=message.request, num_completions=message.num_completions))
        state.dirty |= Dirty.EVALUATE
    if evaluations.current is not None:
        return f"the newest version will be evaluated after the evaluation of version {evaluations.current.version}"
    return f"version {max(0, state.weights.version)} is being evaluated"


def _close(state: ControllerState, evaluation: Evaluation) -> None:
    """Record the results, and unpin the rollouts."""
    summary = evaluation.summary()
    state.outbox.note("evaluation", **summary)
    state.outbox.write(EvaluationClosed(number=evaluation.number, summary=summary))
    state.training.metrics.note_evaluation(summary)
    state.evaluations.evaluated[evaluation.cause] = evaluation.version
    state.evaluations.current = None
    for name in sorted(evaluation.pinned):
        check_outdated(state, state.replicas.membership.members[name])
    state.dirty |= Dirty.END | Dirty.DISPATCH | Dirty.SCORE


def _begin_next(state: ControllerState) -> None:
    """Begin the evaluation that is due first."""
    cause = _due_cause(state)
    if cause is None or not state.data.held_out:
        return
    num_completions, request = state.plan.eval_completions, ""
    if cause == "request":
        wanted = state.evaluations.requested.pop(0)
        num_completions, request = wanted.num_completions or num_completions, wanted.request
    _begin(state, cause, num_completions, request)


def _due_cause(state: ControllerState) -> str | None:
    """Return why the newest published version should be evaluated now, or None."""
    plan, version, evaluated = state.plan, state.weights.version, state.evaluations.evaluated
    if version < plan.num_supervised_steps or version < 0:
        return None
    if plan.evaluate_at_start and "start" not in evaluated:
        return "start"
    if plan.evaluate_at_end and version == plan.last_step and "end" not in evaluated:
        return "end"
    every = int(state.training.changes.now("evaluation.every", plan.evaluate_every))
    if every:
        latest = plan.num_supervised_steps + (version - plan.num_supervised_steps) // every * every
        is_end = latest == plan.last_step and plan.evaluate_at_end
        # The version that the run begins with was evaluated by the run that made it.
        begun = max(plan.num_supervised_steps, plan.begin_version)
        if latest > max(begun, evaluated.get("step", -1)) and not is_end:
            return "step"
    return "request" if state.evaluations.requested else None


def _begin(state: ControllerState, cause: str, num_completions: int, request: str = "") -> None:
    """Begin to evaluate the newest published version."""
    opened = EvaluationOpened(
        number=state.evaluations.num_begun + 1,
        version=state.weights.version,
        cause=cause,
        num_completions=num_completions,
        first=state.evaluations.num_groups,
        request=request,
    )
    open_evaluation(state, opened, deadline=state.now + state.plan.evaluation_s)
    state.outbox.write(opened)


def open_evaluation(state: ControllerState, opened: EvaluationOpened, deadline: float) -> None:
    """Make the evaluation of this record the current one."""
    evaluations, num_completions = state.evaluations, opened.num_completions
    evaluation = Evaluation(
        opened.number,
        opened.version,
        opened.cause,
        state.data.held_out,
        num_completions=num_completions,
        max_tries=state.buffer.max_tries,
        first=opened.first,
        deadline=deadline,
        expected=lambda prompt: expected_tokens(state, prompt, "evaluate", num_completions),
    )
    if opened.request:
        evaluations.granted.add(opened.request)
        evaluations.requested = [wanted for wanted in evaluations.requested if wanted.request != opened.request]
    evaluations.num_begun, evaluations.num_groups = opened.number, evaluation.num_admitted
    evaluations.current = evaluation


def _pin(state: ControllerState, evaluation: Evaluation, rollouts: list[Member]) -> None:
    """Pin the evaluation to as many rollouts as it may have; restart it when its version is lost."""
    num = state.replicas.membership.num("rollout")
    _unpin_waiting(state, evaluation, rollouts)
    _unpin_given_back(state, evaluation)
    if num <= 2:  # the only rollout gives it half of its slots, and all of them once there is another rollout
        for name in sorted(evaluation.pinned):
            state.replicas.slots.mark(state.replicas.membership.members[name])
    is_last = evaluation.version == state.plan.last_step  # nothing else is left to do
    wanted = num if is_last else num_pinned(num, state.plan.eval_share)
    if len(evaluation.pinned) < wanted:
        _pin_more(state, evaluation, wanted - len(evaluation.pinned), rollouts)
    if num and not evaluation.pinned and evaluation.version < state.weights.version:
        # Every holder of the version is gone, or adopted another one: the newest version is evaluated in its place.
        state.outbox.note("evaluation_moved", version=evaluation.version, to=state.weights.version)
        _revoke_all(state)
        state.evaluations.current = None
        _begin(state, evaluation.cause, evaluation.num_completions)
        assert state.evaluations.current is not None
        state.evaluations.current.deadline = evaluation.deadline
        state.evaluations.current.given_back_by = evaluation.given_back_by
        state.dirty |= Dirty.EVALUATE | Dirty.PIN


def _revoke_all(state: ControllerState) -> None:
    """Take back all groups of the evaluation that are being generated or scored."""
    leases = [
        (member, lease)
        for role in ("rollout", "reward")
        for member in state.replicas.membership.of(role)
        for lease in state.replicas.leases.of(member.name, "generate", "score")
        if lease_subject(lease).startswith("e")
    ]
    for member, lease in leases:
        revoke(state, member.name, lease)
        state.replicas.slots.mark(member)


def _unpin_waiting(state: ControllerState, evaluation: Evaluation, rollouts: list[Member]) -> None:
    """Unpin rollouts that wait for a version that is no longer on offer to them."""
    if evaluation.version == state.weights.version:
        return
    for member in rollouts:
        if member.name not in evaluation.pinned or member.version == evaluation.version:
            continue
        is_adopting = state.replicas.leases.num(member.name, "adopt") > 0
        if not is_adopting and find_source(state, member, evaluation.version) is None:
            evaluation.pinned.discard(member.name)
            evaluation.routing.drop(member)
            check_outdated(state, member)


def _unpin_given_back(state: ControllerState, evaluation: Evaluation) -> None:
    """Unpin rollouts that have given groups back, if there are others: the evaluation would wait for them alone."""
    for name in sorted(evaluation.pinned & _passed_over(state, evaluation)):
        member = state.replicas.membership.members[name]
        evaluation.pinned.discard(name)
        evaluation.routing.drop(member)
        check_outdated(state, member)


def _passed_over(state: ControllerState, evaluation: Evaluation) -> set[str]:
    """Return the rollouts that have given groups back; none if no other one could be pinned in their place."""
    present = {member.name for member in state.replicas.membership.of("rollout")}
    return evaluation.given_back_by if present - evaluation.given_back_by else set()


def _pin_more(state: ControllerState, evaluation: Evaluation, num: int, rollouts: list[Member]) -> None:
    version, leases, free = evaluation.version, state.replicas.leases, []
    excluded = evaluation.pinned | _passed_over(state, evaluation)
    for member in rollouts:
        if member.name in excluded or member.is_follower or member.name in state.replicas.desired.draining:
            continue
        adopting = leases.num(member.name, "adopt") > 0
        holds = member.version == version and not adopting
        may_adopt = member.version < version and not (adopting and version != state.weights.version)
        if holds or (may_adopt and find_source(state, member, version) is not None):
            free.append((not holds, leases.num(member.name, "generate"), member.name, member))
    for _, _, name, member in sorted(free, key=lambda entry: entry[:3])[:num]:
        evaluation.pinned.add(name)
        state.replicas.slots.mark(member)
        check_outdated(state, member)

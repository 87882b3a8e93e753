"""Evaluations: opened when one is due, bound to rollouts, closed when every prompt is scored or given up."""

from __future__ import annotations

from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.evaluation import Evaluation, num_pinned
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.records import EvaluationClosed, EvaluationOpened, EvaluationRequested
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState


def evaluate(state: ControllerState, *, everybody: bool) -> None:
    """Close an evaluation that is done or late, open the one that is due, and bind the present one to rollouts.

    It looks at all rollouts for that only when `everybody` may be another; else at those that were noted as loose.
    """
    evaluation = state.evaluation
    if evaluation is not None and evaluation.deadline == float("inf"):  # it was opened before the controller's restart
        evaluation.deadline = state.now + state.plan.evaluation_s
    if evaluation is not None and not evaluation.done and state.now >= evaluation.deadline:
        evaluation.give_up()
        _take_back(state)
    if evaluation is not None and evaluation.done:
        close(state, evaluation)
    if state.evaluation is None and state.ending.stage is RunStage.RUNNING and not state.ending.stopping:
        open_next(state)
        everybody = True
    if state.evaluation is not None and (everybody or state.loose):
        loose = (state.membership.members.get(name) for name in sorted(state.loose))
        among = state.membership.of("rollout") if everybody else [member for member in loose if member is not None]
        bind(state, state.evaluation, among)
    state.loose.clear()


def close(state: ControllerState, evaluation: Evaluation) -> None:
    """Tell what came out, and let its rollouts go on."""
    summary = evaluation.summary()
    state.note("evaluation", **summary)
    state.write(EvaluationClosed(number=evaluation.number, summary=summary))
    state.known.evaluation(summary)
    state.evaluated[evaluation.cause] = evaluation.version
    state.evaluation = None
    for name in sorted(evaluation.pinned):
        state.look_behind(state.membership.members[name])
    state.due |= Dirty.END | Dirty.DISPATCH | Dirty.SCORE


def open_next(state: ControllerState) -> None:
    """Open the evaluation that is due first."""
    cause = due_cause(state)
    if cause is None or not state.held_out:
        return
    num_completions, request = state.plan.eval_completions, ""
    if cause == "request":
        wanted = state.requested.pop(0)
        num_completions, request = wanted.num_completions or num_completions, wanted.request
    begin(state, cause, num_completions, request)


def due_cause(state: ControllerState) -> str | None:
    """Return why the newest published version is to be evaluated now, or None."""
    plan, version, evaluated = state.plan, state.rounds.version, state.evaluated
    if version < plan.num_supervised_steps or version < 0:
        return None
    if plan.evaluate_at_start and "start" not in evaluated:
        return "start"
    if plan.evaluate_at_end and version == plan.last_step and "end" not in evaluated:
        return "end"
    every = int(state.setting("evaluation.every", plan.evaluate_every))
    if every:
        latest = plan.num_supervised_steps + (version - plan.num_supervised_steps) // every * every
        skipped = latest == plan.last_step and plan.evaluate_at_end
        # What the run begins with, the run that made it has evaluated.
        begun = max(plan.num_supervised_steps, plan.begin_version)
        if latest > max(begun, evaluated.get("step", -1)) and not skipped:
            return "step"
    return "request" if state.requested else None


def begin(state: ControllerState, cause: str, num_completions: int, request: str = "") -> None:
    """Begin to evaluate the newest published version."""
    state.num_evaluations += 1
    evaluation = Evaluation(
        state.num_evaluations,
        state.rounds.version,
        cause,
        state.held_out,
        num_completions=num_completions,
        max_tries=state.ledger.max_tries,
        first=state.num_eval_groups,
        deadline=state.now + state.plan.evaluation_s,
        expected=lambda prompt: state.expected_tokens(prompt, "evaluate", num_completions),
    )
    state.write(
        EvaluationOpened(
            number=evaluation.number,
            version=evaluation.version,
            cause=cause,
            num_completions=num_completions,
            first=evaluation.first,
            request=request,
        )
    )
    if request:
        state.granted.add(request)
    state.num_eval_groups = evaluation.num_admitted
    state.evaluation = evaluation


def bind(state: ControllerState, evaluation: Evaluation, among: list[Member]) -> None:
    """Bind the evaluation to as many rollouts as it may have; begin it anew when its version is lost."""
    num = state.membership.num("rollout")
    _unbind(state, evaluation, among)
    if num <= 2:  # the only rollout gives it half of its slots, and all of them once it is not alone
        for name in sorted(evaluation.pinned):
            state.update_free(state.membership.members[name])
    over = evaluation.version == state.plan.last_step  # nothing else is left to do
    wanted = num if over else num_pinned(num, state.plan.eval_share)
    if len(evaluation.pinned) < wanted:
        _bind_more(state, evaluation, wanted - len(evaluation.pinned), among)
    if num and not evaluation.pinned and evaluation.version < state.rounds.version:
        # Whoever held the version is gone, or went on: the newest one is evaluated in its place.
        state.note("evaluation_moved", version=evaluation.version, to=state.rounds.version)
        _take_back(state)
        state.evaluation = None
        begin(state, evaluation.cause, evaluation.num_completions)
        assert state.evaluation is not None
        state.evaluation.deadline = evaluation.deadline
        state.due |= Dirty.EVALUATE | Dirty.BIND


def _take_back(state: ControllerState) -> None:
    """Take the groups of the evaluation from whoever generates or scores them: nobody wants them any more."""
    leases = [
        (member, lease)
        for role in ("rollout", "reward")
        for member in state.membership.of(role)
        for lease in state.leases.of(member.name, "generate", "score")
        if lease_subject(lease).startswith("e")
    ]
    for member, lease in leases:
        state.leases.settle(lease, member.name)
        state.release(member.name, lease)
        state.update_free(member)


def _unbind(state: ControllerState, evaluation: Evaluation, among: list[Member]) -> None:
    """Let those go that wait for a version that nobody offers any more."""
    if evaluation.version == state.rounds.version or state.rounds.is_offered(evaluation.version):
        return
    for member in among:
        is_pinned = member.name in evaluation.pinned
        if is_pinned and member.version != evaluation.version and not state.leases.num(member.name, "adopt"):
            evaluation.pinned.discard(member.name)
            evaluation.free.drop(member)
            state.look_behind(member)


def _bind_more(state: ControllerState, evaluation: Evaluation, num: int, among: list[Member]) -> None:
    version, free = evaluation.version, []
    on_offer = state.rounds.is_offered(version)
    for member in among:
        if member.name in evaluation.pinned:
            continue
        adopting = state.leases.num(member.name, "adopt") > 0
        holds = member.version == version and not adopting
        may_take = on_offer and member.version < version and not (adopting and version != state.rounds.version)
        if holds or may_take:
            free.append((not holds, state.leases.num(member.name, "generate"), member.name, member))
    for _, _, name, member in sorted(free, key=lambda entry: entry[:3])[:num]:
        evaluation.pinned.add(name)
        _pin(state, member)


def _pin(state: ControllerState, member: Member) -> None:
    state.update_free(member)
    state.look_behind(member)


def request(state: ControllerState, message: wire.RequestEvaluation) -> str:
    """Queue an evaluation that an operator wants. Returns what becomes of it, in words."""
    if message.request in state.granted:
        return "the evaluation of this request has begun already"
    if all(message.request != other.request for other in state.requested):
        state.requested.append(message)
        state.write(EvaluationRequested(request=message.request, num_completions=message.num_completions))
        state.due |= Dirty.EVALUATE
    if state.evaluation is not None:
        return f"the newest version will be evaluated after the evaluation of version {state.evaluation.version}"
    return f"version {max(0, state.rounds.version)} is being evaluated"

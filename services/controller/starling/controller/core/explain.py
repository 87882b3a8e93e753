"""Why nothing happens, in words, and when waiting has been too long."""

from __future__ import annotations

from starling.common.ids import lease_subject
from starling.common.wire.messages import LeaseProgress
from starling.controller.core.finish import Stage
from starling.controller.core.ledger import GroupState
from starling.controller.core.membership import Member
from starling.controller.core.state import State

MAX_DROPS = 3
"""The run fails when this many steps' worth of groups were discarded in a row."""


def explain(state: State) -> str:
    """Say what the run waits for now."""
    leases, plan = state.leases, state.plan
    if state.ending.stage is not Stage.RUNNING:
        names = ", ".join(sorted(state.membership.members)) or "nobody"
        return f"{state.ending.stage}: {names}"
    missing = missing_role(state)
    if missing is not None:
        return missing
    if leases.has("train"):
        return f"the policy trains step {state.version + 1}"
    if leases.has("publish"):
        return f"the policy publishes version {state.rounds.asked}"
    unpublished = state.version > state.rounds.version
    if state.evaluation is not None and (unpublished or state.ledger.num_sealed in (0, plan.num_steps)):
        done = state.evaluation.count(GroupState.SCORED)
        return f"evaluation of version {state.evaluation.version}: {done} of {state.evaluation.num_prompts} prompts"
    adopting = [m for m in state.membership.of("rollout") if leases.of(m.name, "adopt")]
    if adopting and not leases.has("generate"):
        return _adoptions(state, adopting)
    scored = state.ledger.count(GroupState.SCORED)
    return (
        f"the groups of step {state.version + 1}: {state.ledger.count(GroupState.LEASED)} being generated, "
        f"{state.ledger.count(GroupState.GENERATED)} being scored, {scored} scored of {plan.prompts_per_step}"
    )


def pull_of(state: State, member: Member) -> tuple[int, LeaseProgress] | None:
    """Return the version that a rollout pulls and how far it is, or None when it pulls none or has not told yet."""
    for lease in state.leases.of(member.name, "adopt"):
        if lease in member.progress:
            return int(lease_subject(lease)), member.progress[lease]
    return None


def _adoptions(state: State, adopting: list[Member]) -> str:
    pulls = [(member.name, pull_of(state, member)) for member in adopting]
    told = [f"{name} pulls version {pull[0]}: {pull[1]}" for name, pull in pulls if pull is not None]
    others = ", ".join(name for name, pull in pulls if pull is None)
    return "; ".join(told + ([f"{others} to adopt version {state.rounds.version}"] if others else []))


def missing_role(state: State) -> str | None:
    """Name the first role that has too few replicas for the run to go on, or return None."""
    plan, members = state.plan, state.membership
    if not members.of("policy"):
        return "needs the policy, which has not joined"
    if not plan.needs_rollouts or state.version < plan.num_sft_steps:
        return None
    begun = state.ledger.num_sealed > 0
    wanted = {"rollout": 1 if begun else plan.num_rollouts, "reward": 1 if begun else plan.num_rewards}
    for role in ("rollout", "reward"):
        num = len(members.of(role))
        if num < wanted[role]:
            return f"needs {wanted[role]} {role} replica{'s' * (wanted[role] > 1)}, has {num}"
    return None


def overdue(state: State, now: float) -> str | None:
    """Return why the run must fail: a role stayed empty too long, nothing can be scored, or a stop takes too long."""
    missing = missing_role(state)
    if missing is None:
        state.missing_since = None
    elif state.missing_since is None:
        state.missing_since = now
    elif now - state.missing_since > state.plan.start_s:
        return (
            f"the run {missing}, for {state.plan.start_s:g} s; start what is missing or lower the number in the recipe"
        )
    if state.drops_in_a_row >= MAX_DROPS * state.plan.prompts_per_step:
        return f"the last {state.drops_in_a_row} groups were all discarded; the last one, {state.last_drop}"
    return None

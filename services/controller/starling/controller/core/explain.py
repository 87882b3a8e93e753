"""Explanations: what the run waits for, in words and as a graph of waits, and when a wait is too long."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from starling.common.counts import counted
from starling.common.ids import LEASE_KINDS, Role, lease_subject
from starling.common.observe.terminal import one_line
from starling.common.wire.messages import LeaseProgress
from starling.controller.core.groups.group import GONE, GroupState
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.plan import RunPlan
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.scaling.desired import named
from starling.controller.core.state import ControllerState
from starling.controller.core.weights.versions import is_publication_due

WORK = {
    "generate": ("group", "groups", "to generate"),
    "score": ("group", "groups", "to score"),
    "teach": ("group", "groups", "to score as a teacher"),
    "train": ("step", "steps", "to train"),
    "publish": ("version", "versions", "to publish"),
    "adopt": ("version", "versions", "to adopt"),
    "checkpoint": ("checkpoint", "checkpoints", "to write"),
    "save": ("state", "states", "to save"),
    "sleep": ("replica", "replicas", "to release its devices"),
    "wake": ("replica", "replicas", "to take its devices again"),
}

GROUPS: Final = ("generate", "score", "teach")
"""Kinds of work on groups."""


def run_phase(state: ControllerState) -> str:
    """Return what the run does now: sft, dpo, reward_model, or what it does with groups; or the stage of its end."""
    if state.lifecycle.stage is not RunStage.RUNNING:
        return str(state.lifecycle.stage)
    return state.plan.phase(min(state.version + 1, state.plan.last_step))


class Cause(NamedTuple):
    """What the run waits for now."""

    text: str
    kinds: tuple[str, ...] = ()
    """Kinds of the controller's waits that this is: kinds of leases, or `missing`, `restart`, `goodbye`, `digest`.
    Empty where the controller waits for no replica."""
    on: str = ""
    """The one replica that is waited for; empty for any."""

    def includes(self, kind: str, wait: dict[str, Any]) -> bool:
        """Return whether one of the controller's waits is part of this."""
        return kind in self.kinds and self.on in ("", wait["on"])


def explain(state: ControllerState) -> str:
    """Return what the run waits for now."""
    return _cause(state).text


def _cause(state: ControllerState) -> Cause:
    leases, membership, plan, weights = state.replicas.leases, state.replicas.membership, state.plan, state.weights
    buffer, evaluation = state.buffer, state.evaluations.current
    if state.lifecycle.stage is not RunStage.RUNNING:
        names = ", ".join(sorted(membership.members)) or "no replica"
        return Cause(f"{state.lifecycle.stage}: {names}", ("goodbye", "checkpoint", "save"))
    if membership.is_awaiting(state.now):
        awaited = ", ".join(sorted(membership.awaited))
        return Cause(f"the replicas from before the controller's restart: {awaited}", ("restart",))
    missing = missing_role(state)
    if missing is not None:
        return Cause(missing, ("missing",))
    switch = _device_switch(state)
    if switch is not None:
        return switch
    outdated = state.replicas.outdated_policies(state.weights_version)
    if outdated:
        name, version = outdated[0].name, outdated[0].version
        return Cause(f"{name} to catch up: it holds version {version} of {state.version}", tuple(WORK), name)
    if leases.has("train"):
        return Cause(f"the policy to train step {state.version + 1}", ("train",))
    if leases.has("save") and _ends(state):
        return Cause(f"the policy to save its state of version {state.version}", ("save",))
    if leases.has("publish"):
        return Cause(f"the policy to publish version {weights.requested}", ("publish",))
    is_unpublished = is_publication_due(state)
    if evaluation is not None and (is_unpublished or buffer.num_frozen_steps in (0, plan.num_steps)):
        done = evaluation.count(GroupState.SCORED)
        return Cause(f"evaluation of version {evaluation.version}: {done} of {evaluation.num_prompts} prompts", GROUPS)
    if leases.has("adopt") and not leases.has("generate"):
        adopting = [m for m in membership.adopters() if leases.num(m.name, "adopt")]
        return Cause(_adoptions(state, adopting), ("adopt",))
    failing = sorted(weights.outdated.keys() & weights.failures.keys())
    if failing and not leases.has("generate"):
        name, (num, reason) = failing[0], weights.failures[failing[0]]
        return Cause(
            f"{name} to adopt version {weights.version} again in {weights.retry_in_s(name, state.now):.0f} s, after "
            f"{counted(num, 'failure')} in a row: {reason}"
        )
    if weights.outdated and not leases.has("generate"):
        return Cause(f"a replica that offers version {weights.version} to {', '.join(sorted(weights.outdated)[:3])}")
    if plan.kind.serves_requests:
        return Cause("requests at the endpoints of its rollouts")
    if weights.awaits_checkpoint:
        return Cause("the digest of the checkpoint, which the controller reads", ("digest",))
    if plan.kind.reads_trajectories:
        return Cause(f"the files to give the groups of step {state.version + 1}")
    return Cause(
        f"the groups of step {state.version + 1}: {buffer.count(GroupState.LEASED)} being generated, "
        f"{buffer.count(GroupState.GENERATED)} being {_scoring(plan)}, {buffer.count(GroupState.SCORED)} scored of "
        f"{plan.prompts_per_step}",
        GROUPS,
    )


def _device_switch(state: ControllerState) -> Cause | None:
    """Return what the side that is due waits for before it has the devices, or None when it has them."""
    sharing, membership = state.replicas.sharing, state.replicas.membership
    if not sharing.shared or all(map(sharing.has_devices, membership.of(sharing.active))):
        return None
    plural = "policies" if sharing.active == "policy" else "rollouts"
    obstacle = sharing.obstacle(membership.of(sharing.inactive), state.now)
    if obstacle:
        return Cause(f"{obstacle} to sleep: the {plural} are due", tuple(WORK))
    return Cause(f"the {plural} to wake", ("wake",))


def _scoring(plan: RunPlan) -> str:
    """Return what is done with the groups that have their completions."""
    return " and ".join(["scored"] * (plan.num_rewards > 0) + ["scored by a teacher"] * plan.has_teachers) or "kept"


def pull_of(state: ControllerState, member: Member) -> tuple[int, LeaseProgress] | None:
    """Return the version that a rollout pulls, and its progress; None when it pulls none, or has not reported yet."""
    for lease in state.replicas.leases.of(member.name, "adopt"):
        if lease in member.progress:
            return int(lease_subject(lease)), member.progress[lease]
    return None


def _adoptions(state: ControllerState, adopting: list[Member]) -> str:
    pulls = [(member.name, pull_of(state, member)) for member in adopting]
    reported = [f"{name} pulls version {pull[0]}: {pull[1]}" for name, pull in pulls if pull is not None]
    others = ", ".join(name for name, pull in pulls if pull is None)
    return "; ".join(reported + ([f"{others} to adopt version {state.weights.version}"] if others else []))


def missing_role(state: ControllerState) -> str | None:
    """Return which role has too few replicas for the run to continue, or None."""
    plan, members = state.plan, state.replicas.membership
    num = members.num("policy")
    if plan.kind.trains and num == 0:
        was_there = state.version > 0 or state.weights.version >= 0
        return "needs a policy, which is gone" if was_there else "needs the policy, which has not joined"
    if plan.fans_out and num == 0 and state.weights.version < 0:
        return "needs the policy that publishes the weights of the model folder, which has not joined"
    desired = state.replicas.desired
    num_policies = desired.at_start("policy", plan.num_policies)
    if plan.kind.trains and not state.has_begun and num < num_policies:
        return f"needs {counted(num_policies, 'policy replica')}, has {num}"
    if not generates_more(state):
        return None
    begun = state.replicas.had_quorum
    first: dict[Role, int] = {"rollout": plan.num_rollouts, "reward": plan.num_rewards}
    if state.buffer.num_frozen_steps < plan.num_steps:
        first["teacher"] = plan.num_teachers
    for role, wanted in first.items():
        wanted = min(wanted, 1) if begun else desired.at_start(role, wanted)
        num = members.num(role)
        if num < wanted:
            return f"needs {counted(wanted, f'{role} replica')}, has {num}"
    return None


def generates_more(state: ControllerState) -> bool:
    """Say whether the run needs anything generated, now or before it ends."""
    plan, evaluated = state.plan, state.evaluations.evaluated
    if state.lifecycle.stage is not RunStage.RUNNING or state.lifecycle.stopping:
        return False
    if not plan.kind.needs_rollouts(plan) or state.version < plan.num_supervised_steps:
        return False
    at_start = plan.evaluate_at_start and "start" not in evaluated
    at_end = plan.evaluate_at_end and "end" not in evaluated
    evaluates = state.evaluations.current is not None or bool(state.evaluations.requested) or at_start or at_end
    return evaluates or plan.kind.needs_more_groups(state.buffer.num_frozen_steps, plan.num_steps)


def overdue(state: ControllerState) -> str | None:
    """Return why the run must fail: something is missing or a stop takes too long, or nothing can be scored."""
    now, missing = state.now, missing_role(state)
    if missing is None:
        state.replicas.membership.missing_since = None
    elif state.replicas.membership.missing_since is None:
        state.replicas.membership.missing_since = now
    elif now - state.replicas.membership.missing_since > state.plan.start_s:
        return (
            f"the run {missing}, for {state.plan.start_s:g} s; start what is missing or lower the number in the recipe"
        )
    if missing is None and (problem := _checkpoint_overdue(state)) is not None:
        return problem
    buffer = state.buffer
    num_discarded, num_filtered = buffer.num_discarded_in_a_row, buffer.filtering.num_in_a_row
    if num_discarded >= state.plan.max_discarded:
        return f"the last {num_discarded} groups were all discarded; the last one, {buffer.last_discarded}"
    membership = state.replicas.membership
    # Most rows are short, and need no second look.
    limit = state.plan.max_filtered if state.plan.dynamic_sampling else math.inf
    if (
        num_filtered
        >= limit
        <= buffer.filtering.num_of_several(lambda role: [member.name for member in membership.of(role)])
    ):
        return (
            f"the last {num_filtered} groups were all filtered out, because the rewards of each were equal, and "
            "rl.filter_limit allows no more; give prompts that the model sometimes solves, raise rl.group_size or "
            "rl.filter_limit, or set rl.dynamic_sampling = false"
        )
    if state.lifecycle.stopping and now > state.lifecycle.deadline:
        return f"the run did not stop gracefully within {state.plan.stop_s:g} s; it waits for {explain(state)}"
    return None


def _checkpoint_overdue(state: ControllerState) -> str | None:
    """Return that the controller reads the checkpoint for too long, with all replicas there, or None."""
    weights, plan = state.weights, state.plan
    if not weights.awaits_checkpoint or plan.kind.serves_requests:
        return None
    weights.checkpoint_deadline = min(weights.checkpoint_deadline, state.now + plan.start_s)
    if state.now <= weights.checkpoint_deadline:
        return None
    return (
        f"the controller has not read the checkpoint within {plan.start_s:g} s after its replicas have joined; check "
        "the disk of model.path on its machine, or raise controller.start_s"
    )


def status(state: ControllerState) -> tuple[str, dict[str, Any]]:
    """Return the state of the run, in words and for programs."""
    members = [
        _member(state, member) for member in sorted(state.replicas.membership.members.values(), key=lambda m: m.name)
    ]
    groups = {str(s): state.buffer.count(s) for s in GroupState if s not in GONE}
    data: dict[str, Any] = {
        "phase": run_phase(state),
        "incarnation": state.incarnation,
        "version": state.version,
        "last_step": state.plan.last_step,
        "published": state.weights.version,
        "saved": state.training.saved.newest,
        "groups": groups,
        "num_trained": state.buffer.num_trained_groups - state.plan.begin_prompt,
        "num_discarded": state.buffer.num_discarded,
        "num_filtered": state.buffer.num_filtered,
        "evaluating": None if state.evaluations.current is None else state.evaluations.current.version,
        "settings": state.training.changes.all(),
        "waiting_for": explain(state),
        "desired": dict(state.replicas.desired.counts),
        "draining": sorted(state.replicas.desired.draining),
        "members": members,
    }
    lines = [
        f"{data['phase']}: version {state.version} of {state.plan.last_step}, published "
        f"{_version_text(state.weights.version)}, saved {_version_text(state.training.saved.newest)}; "
        f"controller's incarnation {state.incarnation}",
        "groups: " + ", ".join(f"{num} {name}" for name, num in groups.items()),
        waiting(data["waiting_for"]),
    ]
    lines += [f"set: {key} = {value:g}" for key, value in state.training.changes.all().items()]
    lines += [f"desired: {named(num, role)}" for role, num in data["desired"].items()]
    for member in members:
        work = ", ".join(f"{num} {kind}" for kind, num in member["work"].items()) or "no work"
        pinned = f", pinned to the evaluation of version {data['evaluating']}" if member["pinned"] else ""
        pinned += ", being drained" if member["name"] in data["draining"] else ""
        version = f"version {_version_text(member['version'])}, " if member["role"] in ("policy", "rollout") else ""
        lines.append(f"  {member['name']} on {one_line(member['host'])}: {version}{work}{pinned}")
    return "\n".join(lines), data


def _version_text(version: int) -> str:
    """Return a version in words: before the first one it is -1, which a reader need not know."""
    return str(version) if version >= 0 else "none"


def _member(state: ControllerState, member: Member) -> dict[str, Any]:
    kinds = {kind: state.replicas.leases.num(member.name, kind) for kind in LEASE_KINDS}
    return {
        "name": member.name,
        "role": member.role,
        "host": member.host,
        "epoch": member.incarnation,
        "version": member.version,
        "num_slots": member.num_slots,
        "work": {kind: num for kind, num in kinds.items() if num},
        "silent_s": round(state.now - member.heard_at, 3),
        "pinned": state.evaluations.current is not None and member.name in state.evaluations.current.pinned,
        "gauges": member.gauges,
    }


def waits(state: ControllerState) -> list[dict[str, Any]]:
    """Return every known wait: its owner, what for, on whom, since when, and for how long at most.

    The controller's waits come from its leases, those of the replicas from their heartbeats. Seconds are as of the
    last message of each.
    """
    return [wait for _, wait in _waits(state)]


def _waits(state: ControllerState) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every known wait with its kind, as in `Cause.kinds`; empty for those of replicas."""
    membership, now = state.replicas.membership, state.now
    if membership.is_awaiting(now):
        left = membership.await_until - now
        for name in sorted(membership.awaited):
            yield "restart", _wait("controller", "a heartbeat after its restart", name, 0.0, left)
    if membership.missing_since is not None:
        since = now - membership.missing_since
        missing = (missing_role(state) or "").removeprefix("needs ")
        yield "missing", _wait("controller", missing, "launcher", since, state.plan.start_s - since)
    if state.weights.awaits_checkpoint and state.weights.checkpoint_deadline < math.inf:
        left = state.weights.checkpoint_deadline - now
        what = "the digest of the checkpoint"
        yield "digest", _wait("controller", what, "the model folder", state.plan.start_s - left, left)
    if state.lifecycle.stage is RunStage.DRAINING:
        left = state.lifecycle.deadline - now
        for name in sorted(membership.members):
            yield "goodbye", _wait("controller", "its goodbye", name, 0.0, left)
    for name, draining in sorted(state.replicas.desired.draining.items()):
        begun = draining.deadline - state.plan.drain_s
        yield "drain", _wait("controller", "its goodbye", name, now - begun, draining.deadline - now)
    for name, member in sorted(membership.members.items()):
        yield from _waits_for_work(state, name)
        for wait in member.waits:
            yield "", _wait(name, wait.what, wait.on, wait.since_s, wait.seconds_left)


def _waits_for_work(state: ControllerState, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one wait for each kind of work that a replica has."""
    leases = state.replicas.leases.all_of(name)
    for kind, num in Counter(lease.kind for lease in leases).items():
        if kind == "save" and not _ends(state):
            continue  # the steps continue meanwhile; if they do not, the policy reports that it waits
        oldest = min((lease for lease in leases if lease.kind == kind), key=lambda lease: lease.begun_at)
        one, many, verb = WORK[kind]
        what = f"{num} {many if num > 1 else one} {verb}, the oldest {lease_subject(oldest.id)}"
        yield kind, _wait("controller", what, name, state.now - oldest.begun_at, oldest.deadline - state.now)


def _ends(state: ControllerState) -> bool:
    """Say whether no further step will be made, so that the end waits for a save."""
    return state.version >= state.plan.last_step or bool(state.lifecycle.stopping)


def _wait(owner: str, what: str, on: str, since_s: float, seconds_left: float) -> dict[str, Any]:
    return {
        "owner": owner,
        "what": one_line(what),
        "on": one_line(on),
        "since_s": round(since_s, 3),
        "seconds_left": round(seconds_left, 3),
    }


def why(state: ControllerState) -> tuple[str, dict[str, Any]]:
    """Return what the run waits for, the graph of waits, and the wait at the root of what it waits for."""
    cause, tagged = _cause(state), list(_waits(state))
    found, sentence = [wait for _, wait in tagged], cause.text
    by_owner: dict[str, list[dict[str, Any]]] = {}
    for wait in found:
        by_owner.setdefault(wait["owner"], []).append(wait)
    begun = [wait for kind, wait in tagged if cause.includes(kind, wait)]
    root = _root(begun, by_owner)
    lines = [f"the run {waiting(sentence)}"]
    if root is not None:
        lines.append(
            f"at the root: {root['owner']} waits for {root['what']} on {root['on']}, for {root['since_s']:.1f} s, "
            f"and gives up in {root['seconds_left']:.1f} s"
        )
    for wait in by_owner.get("controller", []):
        lines.append(f"  {_line(wait)}")
        lines += [f"    {_line(inner)}" for inner in by_owner.get(wait["on"], [])]
    return "\n".join(lines), {"waiting_for": sentence, "root": root, "waits": found}


def waiting(sentence: str) -> str:
    """Return what a run waits for, or needs, as the predicate of a sentence."""
    return sentence if sentence.startswith("needs ") else f"waits for {sentence}"


def _line(wait: dict[str, Any]) -> str:
    times = f"{wait['since_s']:.1f} s, {wait['seconds_left']:.0f} s left"
    return f"{wait['owner']} <- {wait['on']}: {wait['what']} ({times})"


def _root(begun: list[dict[str, Any]], by_owner: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Follow the oldest waits from those of the controller in `begun` to a replica that waits for no other."""
    seen, last, following = {"controller"}, None, begun
    while following:
        last = max(following, key=lambda wait: wait["since_s"])
        following = [] if last["on"] in seen else by_owner.get(last["on"], [])
        seen.add(last["on"])
    return last

"""Dispatch and commit of steps (stop 8 of the walk), and the states that are saved between steps."""

from __future__ import annotations

import functools
import math
from typing import Final

import msgspec

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Prune
from starling.controller.core.groups.files import freeze_next, load_groups, store, write_file
from starling.controller.core.groups.group import Group
from starling.controller.core.records import StepCommitted
from starling.controller.core.replicas.assignments import grant, revoke
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training import alarms
from starling.controller.core.training.metrics import file_metrics, filtered_metrics, mean_by_name, step_metrics
from starling.controller.core.training.samples import choose, to_row
from starling.controller.core.training.step import ActiveStep, PolicyGroup
from starling.controller.core.training.train_groups import buffers_of, to_train_group
from starling.controller.core.weights.versions import is_publication_due

MAX_FAILED_TOGETHER: Final = 16
"""Failures of shared steps in a row after which the run fails."""

# --- commit -----------------------------------------------------------------------------------------------------------


def commit(state: ControllerState) -> None:
    """Commit the active step when it is made, or drop it to be dispatched again when no policy can make it."""
    step = state.training.step
    if step is None or not (step.is_made or step.has_failed):
        return
    for name, lease in step.shares.items():  # these policies wait for one that is gone
        revoke(state, name, lease)
    state.training.step = None
    state.dirty |= Dirty.ALL
    if step.broken or step.failure:
        state.training.group = PolicyGroup((), "")  # some have left it
    if not step.is_made:
        _drop(state, step)
        return
    if step.disagreement:
        state.lifecycle.fail(step.disagreement, state.now)
    plan = state.plan
    state.version, state.training.num_failed_together, state.training.committed = step.number, 0, step
    before = state.training.alarms
    metrics = _metrics_of(state, step)
    if plan.kind.trains:
        state.training.evaluated.note(step.number, metrics)
    state.training.alarms = alarms.alarms_after(step, state.training.evaluated, before)
    metrics |= alarms.to_fields(state.training.alarms)
    state.training.metrics.note_step(metrics)
    state.outbox.write(StepCommitted(step=step.number, metrics=metrics))
    state.outbox.note("step", step=step.number, **metrics)
    alarms.report(state, step.number, before)
    groups = state.buffer.frozen_groups(step.number)
    if groups:
        _note_groups(state, step.number, groups)
    elif plan.kind.reads_trajectories and step.number > plan.num_supervised_steps:
        state.buffer.skip_loaded()  # it was dispatched before a restart of the controller
    if not plan.kind.publishes(plan):
        state.buffer.retire(step.number)
    if not plan.kind.trains:
        state.outbox.add(Prune(step.number))


def evict_silent(state: ControllerState) -> None:
    """Evict the policies that have neither made nor failed a step that others could not make together with them."""
    step, wait_s = state.training.step, state.plan.lease_s
    if step is None or state.now < step.failed_at + wait_s:
        return
    for name in list(step.shares):
        member = state.replicas.membership.members[name]
        evict(state, member, f"{name} did not answer within {wait_s:g} s, after {step.failure}")


def _drop(state: ControllerState, step: ActiveStep) -> None:
    """Drop a step that no policy has made, to be dispatched again; fail the run if that happens again and again."""
    state.training.num_failed_together += bool(step.failure)
    if state.training.num_failed_together >= MAX_FAILED_TOGETHER:
        state.lifecycle.fail(step.failure, state.now)
    state.outbox.note("step_dispatched_again", step=step.number)


def _metrics_of(state: ControllerState, step: ActiveStep) -> dict[str, object]:
    plan, number = state.plan, step.number
    if plan.kind.trains:
        metrics = {**mean_by_name(list(step.metrics.values())), **step_metrics(state.buffer, number)}
    else:
        metrics = file_metrics(state.buffer.frozen_groups(number), is_scored=plan.num_rewards > 0)
    if plan.dynamic_sampling:
        metrics |= filtered_metrics(state.buffer, number)
    digest = {"batch_digest": step.batch_digest} if step.batch_digest else {}
    changed = {f"set/{key}": value for key, value in state.training.changes.as_of(number).items()}
    return {"phase": plan.phase(number), **metrics, **digest, **changed}


def _note_groups(state: ControllerState, step: int, groups: list[Group]) -> None:
    plan = state.plan
    kind = "trained" if plan.kind.trains else "answered"
    state.outbox.note(kind, step=step, prompts=[group.prompt.id for group in groups])
    if plan.samples_per_step and step % plan.samples_every == 0:
        chosen = choose(groups, plan.samples_per_step, seed=plan.seed, step=step)
        state.outbox.note("samples", step=step, rows=[to_row(group, index) for group, index in chosen])


# --- dispatch ---------------------------------------------------------------------------------------------------------


def train(state: ControllerState) -> None:
    """Freeze the groups of the next step when they are scored, and dispatch it to the policies.

    The version that it starts from need not be on offer yet: the policy takes its snapshot first, and digests it while
    it trains. At most one version is on its way like this, because the next publication waits for the one before.
    """
    if not state.plan.kind.trains:
        write_file(state)
        return
    plan, step, replicas = state.plan, state.version + 1, state.replicas
    if state.training.step is not None or step > plan.last_step or not _has_work(state, step):
        return
    policies = replicas.current_policies(state.version)
    if not policies:
        return
    if not all(member.has_reported for member in policies) or not replicas.policies_have_devices():
        return
    num_policies = replicas.desired.at_start("policy", plan.num_policies)
    if not state.has_begun and replicas.membership.num("policy") < num_policies:
        return
    if replicas.outdated_policies(state.version):
        return  # they adopt this version first, and then take part in the step
    if step <= plan.num_supervised_steps:
        if not state.lifecycle.stopping:
            _dispatch_examples(state, policies, step)
        return
    groups = load_groups(state, step) if plan.kind.reads_trajectories else _frozen_groups(state, step)
    if groups:
        if plan.records:
            store(state, step, groups)
        _dispatch_groups(state, policies, step, groups)


def redispatch(state: ControllerState, policy: Member, step: int, groups: list[Group]) -> None:
    """Have one policy make a step again that was committed before."""
    command = msgspec.structs.replace(_command(state, step), replayed=True)
    if step <= state.plan.num_supervised_steps:
        command = msgspec.structs.replace(command, examples=_examples(state, step))
    else:
        trained = tuple(to_train_group(group, state.plan.scorers) for group in groups)
        command = msgspec.structs.replace(command, groups=trained, next_prompt=_next_prompt(groups))
    _grant(state, policy, command, buffers_of(groups))


def can_be_dispatched(state: ControllerState, step: int) -> bool:
    """Say whether `step`, the next one, may have been dispatched to a policy."""
    has_no_groups = step <= state.plan.num_supervised_steps or state.plan.kind.reads_trajectories
    return has_no_groups or bool(state.buffer.frozen_groups(step))


def _has_work(state: ControllerState, step: int) -> bool:
    """Say whether there is anything to make a step from. Most scored groups are not the last of their step."""
    return state.buffer.is_full() or can_be_dispatched(state, step)


def _may_freeze(state: ControllerState) -> bool:
    """Say whether a further step may begin: no stop is requested, and the version before is, or will be, on offer, if
    it is due."""
    if state.lifecycle.stopping:
        return False
    requested = state.weights.requested >= state.version and state.replicas.is_policy_publishing()
    return requested or not is_publication_due(state)


def _frozen_groups(state: ControllerState, step: int) -> list[Group]:
    """Return the groups of a step, which are frozen now if they have to be and can be."""
    groups = state.buffer.frozen_groups(step)
    return freeze_next(state, step) if not groups and _may_freeze(state) else groups


def _dispatch_examples(state: ControllerState, policies: list[Member], step: int) -> None:
    command = msgspec.structs.replace(_command(state, step), examples=_examples(state, step))
    _dispatch(state, policies, command, ())


def _dispatch_groups(state: ControllerState, policies: list[Member], step: int, groups: list[Group]) -> None:
    command = msgspec.structs.replace(
        _command(state, step),
        groups=tuple(to_train_group(group, state.plan.scorers) for group in groups),
        next_prompt=_next_prompt(groups),
    )
    _dispatch(state, policies, command, buffers_of(groups))


def _dispatch(state: ControllerState, policies: list[Member], command: wire.TrainStep, buffers: Buffers) -> None:
    """Have `policies` make a step together, in the process groups of the step before if they have all of those."""
    training, peers = state.training, tuple(member.peer for member in policies) if len(policies) > 1 else ()
    active = training.step = ActiveStep(command.step, is_shared=bool(peers))
    if training.group.peers != peers:
        training.group = PolicyGroup(peers, "")
    for index, member in enumerate(policies):
        # Only a policy that was asked to publish this version must take its snapshot before the step changes it.
        requested = state.weights.requested == state.version and state.replicas.leases.num(member.name, "publish") > 0
        published = state.version if requested and command.groups else -1
        own = msgspec.structs.replace(
            command, peers=peers, replica=index, group=training.group.name, published=published
        )
        lease = active.shares[member.name] = _grant(state, member, own, buffers)
        active.leases.add(lease)
        if peers and not training.group.name:
            training.group = PolicyGroup(peers, lease)


def _grant(state: ControllerState, member: Member, command: wire.TrainStep, buffers: Buffers) -> str:
    saved = state.training.saved
    if saved.rests_since == -math.inf:  # the run begins with a saved state: nothing could be lost before its first step
        saved.rests_since = state.now

    def leased(lease: str) -> wire.TrainStep:
        group = command.group or lease if command.peers else ""
        return msgspec.structs.replace(command, lease=lease, group=group)

    return grant(state, member, "train", command.step, leased, buffers)


def _examples(state: ControllerState, step: int) -> tuple[wire.Prompt, ...]:
    num = state.plan.examples_per_step
    return tuple(state.data.examples.prompt((step - 1) * num + i) for i in range(num))


def _next_prompt(groups: list[Group]) -> int:
    """Return the position after the last prompt of a step. Steps take groups in order, so none before it is left."""
    return max(group.ordinal for group in groups) + 1


def _command(state: ControllerState, step: int) -> wire.TrainStep:
    """Return the part of the command that is the same for all policies."""
    plan, changes = state.plan, state.training.changes
    supervised = step <= plan.num_supervised_steps
    max_tokens = 0 if supervised else int(changes.as_of(step).get("sampling.max_tokens", plan.sampling.max_tokens))
    return wire.TrainStep(
        lease="",
        step=step,
        temperature=1.0 if supervised else plan.sampling.temperature or 1.0,  # each group carries its own
        max_tokens=max_tokens,
        num_steps=plan.num_supervised_steps if supervised else plan.num_steps,
        ordinal=step if supervised else step - plan.num_supervised_steps,
        settings={} if supervised else changes.for_policies(step),
        objective=plan.kind.objective if supervised and plan.kind.objective != "sft" else "",
    )


# --- saved states -----------------------------------------------------------------------------------------------------


def save(state: ControllerState) -> None:
    """Have a policy save a state to resume from, every `save_every` steps, before it gets the next one; or when an
    operator has asked for one.

    Not within `save_rest_s` after the first step or the last saved state: steps may be short, and a state costs a copy.

    It copies the state when the command comes, and writes it while it makes further steps.
    """
    plan, saved, replicas = state.plan, state.training.saved, state.replicas
    if not plan.kind.trains:
        return
    every = int(state.training.changes.now("controller.save_every", plan.save_every))
    due = every and state.version // every * every > saved.newest and state.version < plan.last_step
    due = due and state.now >= saved.rests_since + plan.save_rest_s
    if (
        not (due or saved.asked > saved.newest)
        or not replicas.policies_have_devices()
        or state.training.step is not None
        or replicas.leases.has("save")
        or state.lifecycle.stopping
    ):
        return
    grant_save(state)


def grant_save(state: ControllerState) -> None:
    """Have a policy save a state of the newest version, unless that has failed just now."""
    version, policies = state.version, state.replicas.current_policies(state.version)
    if policies and state.now >= state.training.saved.not_before:
        metrics = state.training.metrics.all()
        command = functools.partial(wire.SaveCheckpoint, step=version, state=True, metrics=metrics)
        grant(state, policies[0], "save", version, lambda lease: command(lease=lease))

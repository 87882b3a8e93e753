"""Stop 8: the step in hand is committed when it is made, and the next one is sealed and dealt."""

from __future__ import annotations

import msgspec

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers
from starling.controller.core.groups.files import recalled, store, write_file, write_sealed
from starling.controller.core.groups.group import Group
from starling.controller.core.records import StepCommitted
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training import alarms
from starling.controller.core.training.metrics import answered_metrics, filtered_metrics, sealed_metrics
from starling.controller.core.training.samples import choose, row
from starling.controller.core.training.step import ActiveStep, buffers_of, share_of, shares_of, train_group


def commit(state: ControllerState) -> None:
    """Take note of the step that was made, or give up how it was dealt when nobody can make it so."""
    step = state.step
    if step is None or not (step.is_made or step.must_be_dealt_again):
        return
    for name, lease in step.shares.items():  # they wait for somebody who is gone
        if state.leases.settle(lease, name):
            state.release(name, lease)
    state.step = None
    state.due |= Dirty.ALL
    if not step.is_made:
        state.note("dealt_again", step=step.number)
        return
    state.version, state.num_broken = step.number, 0
    phase, groups = state.plan.phase(step.number), state.ledger.sealed(step.number)
    if state.plan.has_policy:
        metrics = {**_mean(list(step.metrics.values())), **sealed_metrics(state.ledger, step.number)}
    else:
        metrics = answered_metrics(groups, is_scored=state.plan.num_rewards > 0)
    if state.plan.dynamic_sampling:
        metrics |= filtered_metrics(state.ledger, step.number)
    before, state.alarms = state.alarms, alarms.alarms_after(step, state.alarms)
    changed = {f"set/{key}": value for key, value in state.changes.as_of(step.number).items()}
    told = {"phase": phase, **metrics, **changed, **alarms.told(state.alarms)}
    state.known.step(told)
    state.write(StepCommitted(step=step.number, metrics=told))
    state.note("step", step=step.number, **told)
    alarms.tell(state, step.number, before)
    if groups:
        done = "trained" if state.plan.has_policy else "answered"
        state.note(done, step=step.number, prompts=[group.prompt.id for group in groups])
        if state.plan.samples_per_step and step.number % state.plan.samples_every == 0:
            chosen = choose(groups, state.plan.samples_per_step, seed=state.plan.seed, step=step.number)
            state.note("samples", step=step.number, rows=[row(group, index) for group, index in chosen])
    elif state.plan.replays and step.number > state.plan.num_supervised_steps:
        state.ledger.recalled()  # it was dealt by a controller that died since
    if not state.plan.publishes:
        state.ledger.trained(step.number)
    if not state.plan.has_policy:
        state.prune(step.number)


def train(state: ControllerState) -> None:
    """Seal the next step when its groups are scored, and deal it to the policies.

    The version that it starts from need not be on offer yet: the policy makes its snapshot first, and digests it
    while it trains. One version at most is on its way so, for the next publication waits for the one before.
    """
    if not state.plan.has_policy:
        write_file(state)
        return
    plan, step = state.plan, state.version + 1
    if state.step is not None or step > plan.last_step or not _has_work(state, step):
        return
    policies = state.current_policies()
    if not policies:
        return
    if not all(member.told for member in policies) or not state.may_policies_work():
        return
    if not state.has_begun and state.membership.num("policy") < plan.num_policies:
        return
    behind = [member for member in state.membership.of("policy") if member.version < state.version]
    if behind:
        return  # they take over the weights of this version, and are then members of the next step
    if step <= plan.num_supervised_steps:
        if not state.ending.stopping:
            _deal_examples(state, policies, step)
        return
    groups = recalled(state, step) if plan.replays else _sealed(state, step)
    if groups:
        if plan.records:
            store(state, step, groups)
        _deal_groups(state, policies, step, groups)


def deal_again(state: ControllerState, policy: Member, step: int, groups: list[Group]) -> None:
    """Have one policy make a step once more that was committed before."""
    command = msgspec.structs.replace(_command(state, step), replayed=True)
    if step <= state.plan.num_supervised_steps:
        command = msgspec.structs.replace(command, examples=_examples(state, step))
    else:
        trained = tuple(train_group(group) for group in groups)
        command = msgspec.structs.replace(command, groups=trained, next_prompt=_next_prompt(groups))
    _deal(state, policy, command, buffers_of(groups))


def _has_work(state: ControllerState, step: int) -> bool:
    """Say whether there is anything to make a step of. Most groups that are scored are not the last of theirs."""
    if step <= state.plan.num_supervised_steps or state.plan.replays:
        return True
    return state.ledger.is_full() or bool(state.ledger.sealed(step))


def _may_seal(state: ControllerState) -> bool:
    """Say whether a further step may be begun: nobody wants to stop, and the version before is safe from it."""
    if state.ending.stopping:
        return False
    asked = state.rounds.asked >= state.version and state.is_publishing()
    return asked or state.rounds.version >= state.version


def _sealed(state: ControllerState, step: int) -> list[Group]:
    """Return the groups of a step, sealed now if they have to be and can be."""
    groups = state.ledger.sealed(step)
    if not groups and _may_seal(state):
        groups = state.ledger.seal(step)
        if groups:
            write_sealed(state, step, groups)
    return groups


def _deal_examples(state: ControllerState, policies: list[Member], step: int) -> None:
    state.step = ActiveStep(step)
    examples = _examples(state, step)
    for index, member in enumerate(policies):
        command = msgspec.structs.replace(
            _command(state, step),
            examples=examples[share_of(len(examples), index, len(policies))],
            replica=index,
            num_replicas=len(policies),
            num_groups=len(examples) if len(policies) > 1 else 0,
        )
        state.step.shares[member.name] = _deal(state, member, command, ())


def _deal_groups(state: ControllerState, policies: list[Member], step: int, groups: list[Group]) -> None:
    state.step = ActiveStep(step)
    shares = shares_of(groups, len(policies))
    for index, (member, share) in enumerate(zip(policies, shares, strict=True)):
        # Only who was asked for a snapshot of this version must take it before the step changes the weights.
        asked = state.rounds.asked == state.version and state.leases.num(member.name, "publish") > 0
        command = msgspec.structs.replace(
            _command(state, step),
            groups=tuple(train_group(group) for group in share),
            published=state.version if asked else -1,
            replica=index,
            num_replicas=len(policies),
            num_groups=len(groups) if len(policies) > 1 else 0,
            next_prompt=_next_prompt(groups),
        )
        state.step.shares[member.name] = _deal(state, member, command, buffers_of(share))


def _deal(state: ControllerState, member: Member, command: wire.TrainStep, buffers: Buffers) -> str:
    return state.grant(
        member, "train", command.step, lambda lease: msgspec.structs.replace(command, lease=lease), buffers
    )


def _examples(state: ControllerState, step: int) -> tuple[wire.Prompt, ...]:
    num = state.plan.examples_per_step
    return tuple(state.examples.prompt((step - 1) * num + i) for i in range(num))


def _next_prompt(groups: list[Group]) -> int:
    """Return the position after the last prompt of a step: steps take groups in order, so none before it is left."""
    return max(group.ordinal for group in groups) + 1


def _command(state: ControllerState, step: int) -> wire.TrainStep:
    """Return what all replicas are told alike of a step."""
    plan = state.plan
    supervised = step <= plan.num_supervised_steps
    return wire.TrainStep(
        lease="",
        step=step,
        temperature=1.0 if supervised else plan.sampling.temperature or 1.0,  # each group says its own
        max_tokens=0
        if supervised
        else int(state.changes.as_of(step).get("sampling.max_tokens", plan.sampling.max_tokens)),
        num_steps=plan.num_supervised_steps if supervised else plan.num_steps,
        ordinal=step if supervised else step - plan.num_supervised_steps,
        settings={} if supervised else state.changes.of_policy(step),
        objective=plan.objective if supervised and plan.objective != "sft" else "",
    )


def _mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of what the policies measured, by name."""
    if len(metrics) == 1:
        return metrics[0]
    names = dict.fromkeys(name for one in metrics for name in one)
    values = {name: [one[name] for one in metrics if name in one] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}

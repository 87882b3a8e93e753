"""Stops 9 and 10: versions are published, rollouts adopt them, and policies that are behind catch up."""

from __future__ import annotations

import functools

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.controller.core.groups.files import groups_of
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import deal_again


def publish(state: ControllerState) -> None:
    """Have a policy offer a version that rollouts need."""
    version = state.version
    due = state.plan.publishes and version >= state.plan.num_supervised_steps and version > state.rounds.version
    if not due or state.is_publishing() or not state.may_policies_work():
        return
    for member in state.current_policies():
        if not state.leases.num(member.name, "train"):
            state.rounds.asked = version
            ask_for_offer(state, member, version)
            return


def ask_for_offer(state: ControllerState, member: Member, version: int) -> None:
    """Have a replica put the version that it holds on offer."""
    state.grant(member, "publish", version, lambda lease: wire.PublishWeights(lease=lease, version=version))


def adopt(state: ControllerState) -> None:
    """Have every rollout that is behind pull the version that it is to have."""
    in_vain = set[int]()
    for name in list(state.behind):
        member = state.membership.members[name]
        version = state.target(member)
        if version in in_vain or not state.rounds.may_try(name, state.now):
            continue
        if not state.turns.may_work(member):  # it sleeps, and pulls when it wakes: from whom is seen to now
            if not state.rounds.is_offered(version):
                _find_holder(state, version)
                in_vain.add(version)
            continue
        nearer = _holder_on_host(state, member, version)
        if nearer is not None:
            if not state.leases.num(nearer.name, "publish"):
                ask_for_offer(state, nearer, version)
            continue
        if not _pull(state, member, version):
            _find_holder(state, version)
            if not state.rounds.is_offered(version):
                in_vain.add(version)  # for all who wait for it


def _pull(state: ControllerState, member: Member, version: int, *, with_state: bool = False) -> bool:
    """Have `member` pull `version` from who is nearest. Returns False when nobody has it on offer."""
    offered = state.rounds.source(member, version, with_state=with_state)
    if offered is None:
        return False
    source = state.membership.members[offered.holder]
    assert source.layout is not None, "who offers weights joined with its layout"
    assert member.layout is not None, "who holds weights joined with its layout"
    try:
        plan = state.rounds.plan(source.layout, member.layout)
    except WeightsError as error:
        state.evict(member, str(error))
        return True
    command = functools.partial(wire.AdoptWeights, version=version, source=source.name, with_state=with_state)
    state.grant(member, "adopt", version, lambda lease: command(lease=lease), (offered.offer, plan))
    state.behind.pop(member.name, None)
    return True


def _holder_on_host(state: ControllerState, member: Member, version: int) -> Member | None:
    """Return a rollout on the host of `member` that should offer `version` to it, or None when nobody should.

    It takes a copy in memory there, and spares the network what would otherwise come from another host.
    """
    offered = state.rounds.source(member, version)
    if offered is not None and offered.host == member.host:
        return None
    return _serving(state, state.holders.get((version, member.host), {}))


def _find_holder(state: ControllerState, version: int) -> None:
    """Have anybody offer `version` again, when nobody does."""
    if state.leases.has("publish"):
        return
    if version == state.version and state.may_policies_work():
        for member in state.current_policies():
            if member.serves and not state.leases.num(member.name, "train"):
                ask_for_offer(state, member, version)
                return
    for host in sorted(host for held, host in state.holders if held == version):
        holder = _serving(state, state.holders[version, host])
        if holder is not None:
            ask_for_offer(state, holder, version)
            return


def _serving(state: ControllerState, names: dict[str, None]) -> Member | None:
    for name in names:
        member = state.membership.members[name]
        may_work = state.turns.may_work(member)
        if may_work and member.serves and state.rounds.may_try(name, state.now) and not state.leases.num(name, "adopt"):
            return member
    return None


def catch_up(state: ControllerState) -> None:
    """Bring policies that are behind to the newest version: from another policy, or step by step from the journal."""
    behind = [member for member in state.membership.of("policy") if member.version < state.version]
    if not behind or not state.may_policies_work():
        return
    current = state.current_policies()
    for member in behind:
        if state.leases.num(member.name, "adopt") or state.leases.num(member.name, "train"):
            continue
        may_try = bool(current) and state.rounds.may_try(member.name, state.now)
        if may_try and not _pull(state, member, state.version, with_state=True):
            _offer_to_policies(state, current)
    if not current:
        leader = max(behind, key=lambda member: (member.version, member.name))
        if not state.leases.num(leader.name, "train") and not state.leases.num(leader.name, "adopt"):
            _replay(state, leader, leader.version + 1)


def _offer_to_policies(state: ControllerState, current: list[Member]) -> None:
    if not any(state.leases.num(member.name, "publish") for member in current):
        idle = [member for member in current if not state.leases.num(member.name, "train")]
        if idle:
            ask_for_offer(state, idle[0], state.version)


def _replay(state: ControllerState, policy: Member, step: int) -> None:
    """Have a policy make `step` again, of the groups that the journal has of it."""
    if step <= state.kept_from:
        state.evict(policy, too_old(state, policy.name, policy.version))
    elif step <= state.plan.num_supervised_steps:
        deal_again(state, policy, step, [])
    elif state.fetched is not None and state.fetched[0] == step:
        groups = groups_of(state, state.fetched[1])
        state.fetched = None
        if len(groups) != state.plan.prompts_per_step:
            state.ending.fail(
                f"{policy.name} begins at version {policy.version}, and the journal has no longer what step {step} was "
                "made of; start the policy from the newest saved state of this run",
                state.now,
            )
            return
        deal_again(state, policy, step, groups)
    elif state.fetching != step:
        state.fetch(step)


def too_old(state: ControllerState, name: str, version: int) -> str:
    """Say why a policy of this version cannot be brought up to date from the journal."""
    return (
        f"{name} is at version {version}, and the journal keeps only what came after version {state.kept_from}, of "
        "which there is a saved state; start it again where it finds that state"
    )

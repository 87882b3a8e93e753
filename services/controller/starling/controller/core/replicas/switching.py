"""Stop 0 where devices are shared: policies and rollouts take turns, each for as long as it has something to do.

| turn of  | for                                                                                              |
|----------|--------------------------------------------------------------------------------------------------|
| policies | steps, publications, states and checkpoints, catching up, and weights that nobody offers any more |
| rollouts | all the rest: adoptions, groups, evaluations                                                      |

A published snapshot is in the memory of the host, so rollouts adopt it while the policies sleep. An evaluation is ended
before the next step. What rollouts have in hand when a step is full (with `max_staleness` above 0) they give back, with
its tokens, and go on with when they wake.
"""

from __future__ import annotations

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.time_sharing import DeviceRole
from starling.controller.core.state import ControllerState

OF_POLICIES = ("train", "publish", "adopt", "save", "checkpoint", "wake")
OF_ROLLOUTS = ("publish", "adopt", "wake")
"""What is ended before a replica is told to sleep."""


def take_turns(state: ControllerState) -> None:
    """Let the one side sleep and then wake the other, if the turn is over."""
    turns = state.turns
    side = whose_turn(state)
    if side != turns.side:
        turns.side = side
        state.note("turn", role=side)
        for member in state.membership.of("rollout"):
            state.update_free(member)
    others = state.membership.of(turns.other)
    for member in others:
        if not turns.sleeps(member) and not _is_busy(state, member):
            turns.told(member)
            state.grant(member, "sleep", member.name, lambda lease: wire.Sleep(lease=lease))
    if turns.obstacle(others, state.now):
        return
    for member in state.membership.of(side):
        if not turns.may_work(member) and not _is_busy(state, member):
            turns.told(member)
            state.grant(member, "wake", member.name, lambda lease: wire.Wake(lease=lease))


def answered(state: ControllerState, member: Member, *, sleeps: bool) -> None:
    """A replica has given its devices away, or has them again."""
    state.turns.answered(member, sleeps=sleeps)
    state.capacity.resting.pop(member.name, None)  # what it gave back, it gave back for its sleep
    state.update_free(member)
    state.due = Dirty.ALL


def whose_turn(state: ControllerState) -> DeviceRole:
    """Return who has the most urgent thing to do on the devices."""
    plan, leases = state.plan, state.leases
    policies = state.membership.of("policy")
    if state.ending.stage is not RunStage.RUNNING or state.ending.stopping or state.step is not None:
        return "policy"
    if any(leases.of(member.name, *OF_POLICIES[:-1]) for member in policies):
        return "policy"
    if state.version < plan.num_supervised_steps or any(member.version < state.version for member in policies):
        return "policy"
    if plan.publishes and (state.version > state.rounds.version or _nobody_offers(state)):
        return "policy"
    if state.evaluation is not None:
        return "rollout"
    if state.ledger.sealed(state.version + 1) or state.ledger.is_full():
        return "policy"
    return "policy" if state.version >= plan.last_step else "rollout"


def _nobody_offers(state: ControllerState) -> bool:
    """Say whether some rollout needs the newest version, and only a policy can offer it."""
    behind = (state.membership.members[name] for name in state.behind)
    return not state.rounds.is_offered(state.rounds.version) and any(
        state.target(member) == state.rounds.version for member in behind
    )


def _is_busy(state: ControllerState, member: Member) -> bool:
    kinds = OF_POLICIES if member.role == "policy" else OF_ROLLOUTS
    return bool(state.leases.of(member.name, "sleep", *kinds)) or not state.turns.may_be_told(member, state.now)

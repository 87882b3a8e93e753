"""The simulation finds what is wrong: each deliberate bug breaks a promise under one of the first ten seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from starling.common.ids import lease_kind
from starling.common.wire import messages as wire
from starling.controller.core.events import Command, Event, Prune, Send, Write
from starling.controller.core.groups import results as handle_groups
from starling.controller.core.groups.buffer import TrainBuffer
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import RewardsStored
from starling.controller.core.replicas import heartbeat as handle
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import Member, Membership
from starling.controller.core.state import ControllerState
from starling.controller.core.weights import distribution as derive_weights
from starling.policy.core.admission import PolicyState
from starling.sim.campaign.campaign import run_seed
from starling.sim.cluster.controller_host import ControllerHost

Patch = Callable[[pytest.MonkeyPatch], None]


def first_complaint(mix: str, seeds: Sequence[int] = range(10)) -> str:
    """Return the first violation under any seed; the test fails when there is none."""
    for seed in seeds:
        outcome = run_seed((mix, seed, 0))
        if outcome.violation:
            return outcome.violation
    pytest.fail("the simulation did not notice")


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    free_slots = TrainBuffer.free_slots
    patch.setattr(TrainBuffer, "free_slots", lambda self: free_slots(self) + 1)


def stale_dispatch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControllerState, "required_version", lambda self, group: 0)


def no_healing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "compare", lambda self, peer, held, now, grace_s: ([], [], []))


def lost_work_stays_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "requeue", lambda self, group, kind: None)


def unproven_versions_count(patch: pytest.MonkeyPatch) -> None:
    join = Membership.join

    def trusting(self: Membership, name, epoch, hello, layout, now) -> Member:  # type: ignore[no-untyped-def]
        member = join(self, name, epoch, hello, layout, now)
        member.version = max(member.version, 0)
        return member

    patch.setattr(Membership, "join", trusting)


def groups_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def seal(self: TrainBuffer, step: int) -> list[Group]:
        scored = self.within(GroupState.SCORED)[: self.prompts_per_step]
        if len(scored) == self.prompts_per_step:
            self._unsealed = [group.ordinal for group in scored]
            self.take(step, scored)
            return scored
        return []

    patch.setattr(TrainBuffer, "is_full", lambda self: True)
    patch.setattr(TrainBuffer, "seal", seal)


def steps_overtake_publications(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PolicyState, "must_wait", lambda self, command: False)


def said_before_it_is_on_disk(patch: pytest.MonkeyPatch) -> None:
    do = ControllerHost._do

    def hasty(self: ControllerHost, command: Command, cause: str) -> None:
        if isinstance(command, Send):
            self._send(command, cause)
        else:
            do(self, command, cause)

    patch.setattr(ControllerHost, "_do", hasty)


def records_come_last(patch: pytest.MonkeyPatch) -> None:
    step = Controller.step

    def disordered(self: Controller, event: Event) -> list[Command]:
        return sorted(step(self, event), key=lambda command: isinstance(command, Write))

    patch.setattr(Controller, "step", disordered)


def claims_are_believed(patch: pytest.MonkeyPatch) -> None:
    def believe(state: ControllerState, member: Member, lease: str) -> bool:
        kind = lease_kind(lease)
        assert kind is not None
        state.claim(member, kind, lease)
        return True

    patch.setattr(handle, "claim", believe)


def a_replay_skips_a_step(patch: pytest.MonkeyPatch) -> None:
    replay = derive_weights._replay
    patch.setattr(
        derive_weights,
        "_replay",
        lambda state, policy, step: replay(state, policy, min(step + 1, state.version)),
    )
    patch.setattr(PolicyState, "objection", lambda self, command: None)


def payload_is_deleted_too_early(patch: pytest.MonkeyPatch) -> None:
    has_state = ControllerState.has_state

    def hasty(self: ControllerState, step: int) -> None:
        has_state(self, step)
        self.out.append(Prune(self.version + 1))

    patch.setattr(ControllerState, "has_state", hasty)


def equal_rewards_are_trained(patch: pytest.MonkeyPatch) -> None:
    def keep(state: ControllerState, group: Group, reward: float) -> None:
        rewards = (reward,) * len(group.trajectories)
        state.ledger.scored(group, rewards, {})
        state.write(RewardsStored(key=group.key, rewards=rewards))

    patch.setattr(handle_groups, "set_aside", keep)


def what_teaches_is_set_aside(patch: pytest.MonkeyPatch) -> None:
    def scored(state: ControllerState, message: wire.GroupScored) -> None:
        found = state.group_of(message.lease)
        assert found is not None
        handle_groups.set_aside(state, found[1], 0.0)

    patch.setattr(handle, "scored", scored)


def nobody_waits_for_teachers(patch: pytest.MonkeyPatch) -> None:
    def complete(self: Groups, group: Group) -> None:
        if group.rewards:
            self.move(group, GroupState.SCORED)

    patch.setattr(Groups, "_complete", complete)


def what_is_thrown_away_stays_with_its_teacher(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handle_groups, "abandon", lambda state, group: None)


def what_is_given_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(handle_groups, "_keep", lambda state, groups, group, message, buffers: 0)


def who_goes_on_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "interrupted", lambda self, group, partial, temperature: True)


@pytest.mark.parametrize(
    ("bug", "mix", "complaint"),
    [
        (one_slot_too_many, "calm", "groups live"),
        (stale_dispatch, "calm", "versions stale"),
        (no_healing, "loss", "is in force"),
        (lost_work_stays_lost, "crashes", "otherwise"),
        (unproven_versions_count, "calm", "never proved"),
        (groups_in_any_order, "reorder", "out of order"),
        (steps_overtake_publications, "reorder", "has no snapshot"),
        (said_before_it_is_on_disk, "calm", "was on disk"),
        (records_come_last, "calm", "was not written"),
        (claims_are_believed, "controller", "otherwise"),
        (a_replay_skips_a_step, "crashes", "was made twice"),
        (payload_is_deleted_too_early, "crashes", "is deleted"),
        (equal_rewards_are_trained, "calm", "teaches nothing"),
        (what_teaches_is_set_aside, "calm", "was set aside"),
        (nobody_waits_for_teachers, "calm", "while it is scored"),
        (what_is_thrown_away_stays_with_its_teacher, "everything", "otherwise"),
        (what_is_given_back_is_forgotten, "preemptions", "were thrown away"),
        (who_goes_on_begins_anew, "preemptions", "were given back"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_controller_is_found_out(
    bug: Patch, mix: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    assert complaint in first_complaint(mix)

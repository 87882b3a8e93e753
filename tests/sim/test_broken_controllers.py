"""Deliberate bugs in the controller: the simulation detects each of them under one of the first ten seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from starling.common.ids import lease_kind
from starling.common.wire import messages as wire
from starling.controller.core import machine
from starling.controller.core.events import Command, Event, Prune, Send, Write
from starling.controller.core.groups import dispatch, results
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import RewardsStored
from starling.controller.core.replicas import heartbeat
from starling.controller.core.replicas.assignments import restore_lease
from starling.controller.core.replicas.leases import Lease, Leases
from starling.controller.core.replicas.membership import Member, Membership
from starling.controller.core.state import ControllerState
from starling.controller.core.weights import distribution
from starling.controller.core.weights.publications import Publications
from starling.policy.core.admission import PolicyState
from starling.sim.campaign.campaign import run_seed
from starling.sim.cluster.controller_host import ControllerHost

Patch = Callable[[pytest.MonkeyPatch], None]


def first_violation(mix: str, seeds: Sequence[int] = range(30)) -> str:
    """Return the first violation under any of the seeds; fail the test if there is none."""
    for seed in seeds:
        result = run_seed((mix, seed, 0))
        if result.violation:
            return result.violation
    pytest.fail("the simulation did not detect the bug")


def one_slot_too_many(patch: pytest.MonkeyPatch) -> None:
    free_slots = GroupBuffer.num_free_slots
    patch.setattr(GroupBuffer, "num_free_slots", lambda self: free_slots(self) + 1)


def dispatch_to_outdated_rollouts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "required_version", lambda state, group: 0)


def heartbeats_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "reconcile", lambda self, peer, held, now, grace_s: ([], [], []))


def lost_groups_are_not_requeued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "requeue", lambda self, group, kind: None)


def unproven_versions_are_trusted(patch: pytest.MonkeyPatch) -> None:
    join = Membership.join

    def trusting(self: Membership, name, incarnation, hello, layout, now) -> Member:  # type: ignore[no-untyped-def]
        member = join(self, name, incarnation, hello, layout, now)
        member.version = max(member.version, 0)
        return member

    patch.setattr(Membership, "join", trusting)


def rollouts_are_believed_about_each_other(patch: pytest.MonkeyPatch) -> None:
    """A pull from a rollout counts if it brought what that rollout offers, as it did before layout roots."""

    def is_proven(state: ControllerState, member: Member, lease: Lease, message: wire.WeightsAdopted) -> bool:
        return state.weights.is_root(message.version, message.root)

    patch.setattr(distribution, "_is_proven", is_proven)
    patch.setattr(distribution, "_of_policies_only", lambda state, member, version: member.role == "policy")
    patch.setattr(Publications, "known_layout_roots", lambda self, version, key: ())


def groups_are_frozen_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def freeze_next(self: GroupBuffer, step: int) -> list[Group]:
        scored = self.within(GroupState.SCORED)[: self.prompts_per_step]
        if len(scored) == self.prompts_per_step:
            self._unfrozen = [group.ordinal for group in scored]
            self.freeze(step, scored)
            return scored
        return []

    patch.setattr(GroupBuffer, "is_full", lambda self: True)
    patch.setattr(GroupBuffer, "freeze_next", freeze_next)


def steps_overtake_publications(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PolicyState, "must_wait", lambda self, command: False)


def sends_do_not_wait_for_the_journal(patch: pytest.MonkeyPatch) -> None:
    do = ControllerHost._execute

    def hasty(self: ControllerHost, command: Command, cause: str) -> None:
        if isinstance(command, Send):
            self._guarantees.on_queued(command)
            self._send(command, cause)
        else:
            do(self, command, cause)

    patch.setattr(ControllerHost, "_execute", hasty)


def records_come_last(patch: pytest.MonkeyPatch) -> None:
    step = Controller.step

    def disordered(self: Controller, event: Event) -> list[Command]:
        return sorted(step(self, event), key=lambda command: isinstance(command, Write))

    patch.setattr(Controller, "step", disordered)


def every_reclaim_is_accepted(patch: pytest.MonkeyPatch) -> None:
    def believe(state: ControllerState, member: Member, lease: str) -> bool:
        kind = lease_kind(lease)
        assert kind is not None
        restore_lease(state, member, kind, lease)
        return True

    patch.setattr(machine, "reclaim", believe)
    patch.setattr(heartbeat, "reclaim", believe)


def replay_skips_a_step(patch: pytest.MonkeyPatch) -> None:
    replay = distribution._replay
    patch.setattr(
        distribution,
        "_replay",
        lambda state, policy, step: replay(state, policy, min(step + 1, state.version)),
    )
    patch.setattr(PolicyState, "objection", lambda self, command: None)


def payload_is_pruned_too_early(patch: pytest.MonkeyPatch) -> None:
    on_saved = machine.on_saved

    def hasty(state: ControllerState, member: Member, message: wire.CheckpointSaved) -> None:
        on_saved(state, member, message)
        if message.state:
            state.outbox.add(Prune(state.version + 1))

    patch.setattr(machine, "on_saved", hasty)


def groups_with_equal_rewards_are_trained(patch: pytest.MonkeyPatch) -> None:
    def keep(state: ControllerState, group: Group, reward: float, scorer: str) -> None:
        rewards = (reward,) * len(group.trajectories)
        state.buffer.store_rewards(group, RewardsStored(key=group.key, rewards=rewards))
        state.outbox.write(RewardsStored(key=group.key, rewards=rewards))

    patch.setattr(results, "_filter", keep)


def groups_with_mixed_rewards_are_filtered(patch: pytest.MonkeyPatch) -> None:
    def scored(state: ControllerState, member: Member, lease: Lease, message: wire.GroupScored) -> None:
        found = state.group_of_lease(message.lease)
        assert found is not None
        results._filter(state, found[1], 0.0, member.name)

    patch.setattr(machine, "on_scored", scored)


def steps_do_not_wait_for_teachers(patch: pytest.MonkeyPatch) -> None:
    def complete(self: Groups, group: Group) -> None:
        if group.rewards:
            self.move(group, GroupState.SCORED)

    patch.setattr(Groups, "_complete", complete)


def discarded_groups_keep_their_teacher_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "_revoke_scoring", lambda state, group: None)


def partial_completions_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "_store_partial", lambda state, member, groups, group, message, buffers: 0)


def resumed_groups_start_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Groups, "store_partial", lambda self, group, partial, temperature: True)


@pytest.mark.parametrize(
    ("bug", "mix", "problem"),
    [
        (one_slot_too_many, "calm", "groups are live"),
        (dispatch_to_outdated_rollouts, "calm", "versions stale"),
        (heartbeats_are_ignored, "loss", "is in force"),
        (lost_groups_are_not_requeued, "crashes", "disagree"),
        (unproven_versions_are_trusted, "calm", "never proved"),
        (rollouts_are_believed_about_each_other, "lies", "samples with weights that are not version"),
        (groups_are_frozen_out_of_order, "reorder", "out of order"),
        (steps_overtake_publications, "reorder", "has no snapshot"),
        (sends_do_not_wait_for_the_journal, "calm", "was durable"),
        (records_come_last, "calm", "was not recorded"),
        (every_reclaim_is_accepted, "controller", "disagree"),
        (replay_skips_a_step, "crashes", "was made twice"),
        (payload_is_pruned_too_early, "crashes", "is deleted"),
        (groups_with_equal_rewards_are_trained, "calm", "rewards are equal"),
        (groups_with_mixed_rewards_are_filtered, "calm", "was filtered"),
        (steps_do_not_wait_for_teachers, "calm", "while it is scored"),
        (discarded_groups_keep_their_teacher_leases, "everything", "disagree"),
        (partial_completions_are_dropped, "preemptions", "were dropped"),
        (resumed_groups_start_over, "preemptions", "that were saved"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_broken_controller_is_detected(bug: Patch, mix: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert problem in first_violation(mix)

"""Tables of legal transitions: of groups, of the stages of a run, and of shared devices."""

from __future__ import annotations

import itertools

import pytest

from starling.common.wire.messages import Prompt
from starling.controller.core.groups.group import TRANSITIONS, Groups, GroupState
from starling.controller.core.lifecycle.stages import STAGE_TRANSITIONS, Lifecycle, RunStage
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.time_sharing import TimeSharing


@pytest.mark.parametrize(("before", "after"), itertools.product(GroupState, GroupState))
def test_group_transitions_follow_the_table(before: GroupState, after: GroupState) -> None:
    groups = Groups("train", max_tries=1)
    group = groups.admit(Prompt(id="p", text="x"))
    group.state = before
    groups._counts[before] += before is not GroupState.WAITING
    groups._counts[GroupState.WAITING] -= before is not GroupState.WAITING
    if (before, after) in TRANSITIONS:
        groups.move(group, after)
        assert group.state is after
    else:
        with pytest.raises(AssertionError, match=f"t0 may not go from {before} to {after}"):
            groups.move(group, after)
        assert group.state is before


@pytest.mark.parametrize(("before", "after"), itertools.product(RunStage, RunStage))
def test_stage_transitions_follow_the_table(before: RunStage, after: RunStage) -> None:
    lifecycle = Lifecycle(drain_s=1.0, stop_s=1.0, stage=before)
    if (before, after) in STAGE_TRANSITIONS:
        lifecycle.enter(after)
        assert lifecycle.stage is after
    else:
        with pytest.raises(AssertionError, match=f"a run may not go from {before} to {after}"):
            lifecycle.enter(after)


def test_only_final_group_states_have_no_transitions() -> None:
    left = {before for before, _ in TRANSITIONS}
    assert set(GroupState) - left == {GroupState.TRAINED, GroupState.DISCARDED}


def test_replica_is_unknown_between_two_device_states() -> None:
    sharing = TimeSharing(shared=True, lease_s=10.0)
    policy = Member(name="policy-0", role="policy", incarnation=1, num_slots=0, heard_at=0.0, version=0)
    sharing.note_answer(policy, asleep=False)
    assert sharing.has_devices(policy)
    sharing.reset(policy)
    assert not sharing.has_devices(policy)
    assert not sharing.is_asleep(policy)
    sharing.note_answer(policy, asleep=True)
    assert sharing.is_asleep(policy)

"""Groups that one rollout gives back with tokens of no use: what follows is counted against no other replica."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from test_controller_conduct import Incarnations, adopts_again, run_of

from starling.common.wire import messages as wire
from starling.controller.core.groups.group import Group
from starling.controller.core.plan import LeaseTimeouts
from starling.controller.core.records import GroupDiscarded

LIAR = "rollout-9"
WARM_S, END_S = 100.0, 450.0
GENERATE_S, SCORE_S, FAIL_S = 20.0, 0.5, 10.0
"""Seconds that an honest rollout takes for a group, and a scorer for a good and for a bad one."""
ENDED = (wire.Status.OK, wire.Status.OK)


def gives_back(script: Incarnations, name: str, lease: str, *statuses: wire.Status | None, version: int = 0) -> None:
    """Let a rollout return a group with one token of each completion, of which some have ended."""
    num = len(statuses)
    tensors = tuple(wire.TensorMeta(dtype=kind, shape=(num,), nbytes=4 * num) for kind in ("int32", "float32", "int32"))
    partial = tuple(wire.PartialCompletionMeta(num_tokens=1, status=status) for status in statuses)
    interrupted = wire.GroupInterrupted(lease=lease, reason="", partial=partial, tensors=tensors)
    script.receive(name, interrupted, bytes(4 * num), bytes(4 * num), struct.pack("<i", version) * num)


# --- a liar that gives all its groups back -------------------------------------------------------------------------


class Spoiled:
    """A run in which the liar gives all its groups back, after a time in which it has worked well.

    Honest rollouts answer at once for groups that they resume. No scorer can score these, or their rewards are equal.
    """

    def __init__(self, num_rollouts: int, num_rewards: int, ending: wire.Status | None, **changes: Any) -> None:
        self.honest = [f"rollout-{number}" for number in range(num_rollouts)]
        self.rewards = [f"reward-{number}" for number in range(num_rewards)]
        self.ending = ending
        timeouts = LeaseTimeouts(generate_s=3600.0, score_s=900.0, adopt_s=900.0)
        changes = {
            "max_tries": 2,
            "num_steps": 1000,
            "max_staleness": 1,
            "timeouts": timeouts,
            "lease_s": 10.0,
        } | changes
        self.script = run_of(*self.honest, LIAR, **changes)
        for name in self.rewards[1:]:
            self.script.joins(name, slots=8)
        self.incarnation = 1
        self._restart_liar()
        self._begun: dict[str, float] = {}
        self._is_bad: dict[str, bool] = {}

    def _restart_liar(self) -> None:
        """Let the liar come with more slots than there are groups."""
        self.script.leaves(LIAR)
        self.incarnation += 1
        self.script.joins(LIAR, slots=64, incarnation=self.incarnation)

    def play(self) -> None:
        """Play the run to its end."""
        script = self.script
        while script.now < END_S and not script.state.lifecycle.failure:
            members = script.state.replicas.membership.members
            for name in (*self.honest, LIAR):
                if name in members and script.held_by(name, "adopt"):
                    adopts_again(script, name, script.state.weights.version)
            if LIAR in members:
                self._lie()
            else:
                self._restart_liar()
            while sum([self._generates(name) for name in self.honest]):
                pass
            for name in self.rewards:
                self._scores(name)
            for lease in script.held_by("policy-0", "train"):
                step = int(lease.split(":")[1])
                script.trains(step)
                script.publishes(step)
            script.wait(0.5)

    def _lie(self) -> None:
        """Let the liar give all its groups back, and pretend that its weights are torn in order to get others."""
        script = self.script
        if script.now < WARM_S:
            self._generates(LIAR)
            return
        member = script.state.replicas.membership.members[LIAR]
        for lease in script.held_by(LIAR, "generate"):
            gives_back(script, LIAR, lease, wire.Status.OK, self.ending, version=member.version)
        if member.version >= 0:
            script.heartbeats(LIAR, version=-1, incarnation=0)
            adopts_again(script, LIAR, script.state.weights.version)

    def _generates(self, name: str) -> int:
        """Let a rollout answer for the groups that are due; return how many there were."""
        script, num = self.script, 0
        for lease in script.held_by(name, "generate"):
            request = script.commands_sent[script.aliases.long(lease)].message
            assert isinstance(request, wire.GenerateGroup)
            begun = self._begun.setdefault(lease, script.now)
            if request.partial or script.now - begun >= GENERATE_S:
                self._is_bad[lease.split(":")[1]] = bool(request.partial)
                script.generates(name, lease, script.state.replicas.membership.members[name].version)
                num += 1
        return num

    def _scores(self, name: str) -> None:
        script = self.script
        for lease in script.held_by(name, "score"):
            is_bad = self._is_bad[lease.split(":")[1]]
            begun = self._begun.setdefault(lease, script.now)
            if script.now - begun >= (FAIL_S if is_bad else SCORE_S):
                bad = (1.0, 1.0) if script.plan.dynamic_sampling else (None, None)
                script.scores(lease, *(bad if is_bad else (1.0, 0.0)), name=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ending", [wire.Status.OK, None], ids=["all ended", "one to be continued"])
@pytest.mark.parametrize("dynamic_sampling", [False, True], ids=["unscored", "filtered"])
@pytest.mark.parametrize(("num_rollouts", "num_rewards"), [(1, 1), (2, 2)])
def test_rollout_that_gives_groups_back_spoils_no_other_replica(
    num_rollouts: int, num_rewards: int, dynamic_sampling: bool, ending: wire.Status | None
) -> None:
    run = Spoiled(num_rollouts, num_rewards, ending, dynamic_sampling=dynamic_sampling)
    run.play()
    state = run.script.state
    assert not state.lifecycle.failure
    assert set(state.replicas.membership.num_invalid) <= {LIAR}
    assert state.replicas.membership.members.keys() >= {*run.honest, *run.rewards}
    assert (state.buffer.num_discarded, state.buffer.num_filtered) == (0, 0)
    assert not any(isinstance(write.record, GroupDiscarded) for write in run.script.journal)
    steps_in_s = (END_S - WARM_S) / GENERATE_S * 4 * num_rollouts / 8
    assert state.version >= steps_in_s / 2, "groups are generated once more at most"
    assert (LIAR in state.replicas.membership.num_invalid) == (ending is not None)


# --- one group -----------------------------------------------------------------------------------------------------


def resuming(*statuses: wire.Status | None, **changes: Any) -> Incarnations:
    """Return a run in which rollout-0 resumes t0, which the liar gave back."""
    script = run_of("rollout-0", LIAR, prompts_per_step=1, max_tries=0, **changes)
    [name] = [name for name in ("rollout-0", LIAR) if script.held_by(name, "generate")]
    if name != LIAR:
        script.leaves(name)
        script.joins(name, slots=4, incarnation=2)
    gives_back(script, LIAR, script.held_by(LIAR, "generate")[0], *(statuses or ENDED))
    if script.held_by("rollout-0", "adopt"):
        adopts_again(script, "rollout-0")
    [command] = [send.message for send in script.commands_sent.values() if getattr(send.message, "partial", ())]
    assert isinstance(command, wire.GenerateGroup)
    return script


def resumed_lease(script: Incarnations) -> str:
    [lease] = script.held_by("rollout-0", "generate")
    return lease


def group_of(script: Incarnations) -> Group:
    group = script.state.buffer.get(0)
    assert group is not None
    return group


def assert_begun_anew(script: Incarnations) -> None:
    """Check that t0 is generated again without partial completions, and takes no others."""
    group = group_of(script)
    assert (group.tries, group.partial, group.giver, group.is_anew) == (0, None, None, True)
    conduct = script.state.replicas.membership.conduct
    assert not [name for name, one in conduct.items() if name != LIAR and (one.num_spoiled or one.excess)]
    lease = resumed_lease(script)
    command = script.commands_sent[script.aliases.long(lease)].message
    assert isinstance(command, wire.GenerateGroup)
    assert command.partial == ()
    gives_back(script, "rollout-0", lease, *ENDED)
    assert group_of(script).partial is None


def test_resumed_group_that_its_rollout_fails_begins_anew() -> None:
    script = resuming()
    script.fails("rollout-0", resumed_lease(script), fatal=True)
    assert_begun_anew(script)


def test_resumed_group_of_which_a_completion_failed_begins_anew() -> None:
    script = resuming()
    lease = script.aliases.long(resumed_lease(script))
    failed = wire.TrajectoryMeta(
        status=wire.Status.ENV_ERROR, num_tokens=0, text="", oldest_version=0, newest_version=0
    )
    tensors = tuple(
        wire.TensorMeta(dtype=kind, shape=(num,), nbytes=4 * num)
        for kind, num in (("int32", 1), ("int32", 0), ("float32", 0), ("int32", 0))
    )
    script.receive(
        "rollout-0",
        wire.GroupGenerated(lease=lease, trajectories=(failed,) * 2, tensors=tensors),
        bytes(4),
        b"",
        b"",
        b"",
    )
    assert_begun_anew(script)


def test_resumed_group_that_a_scorer_fails_begins_anew() -> None:
    script = resuming()
    script.generates("rollout-0", resumed_lease(script))
    script.fails("reward-0", script.held_by("reward-0", "score")[0], fatal=True)
    assert script.state.replicas.membership.conduct[LIAR].num_spoiled == 1
    assert_begun_anew(script)


@pytest.mark.parametrize("compacted", [False, True])
def test_restarted_controller_knows_whose_completions_were_resumed(compacted: bool) -> None:
    script = resuming()
    script.generates("rollout-0", resumed_lease(script))
    script.restart(compacted=compacted)
    assert (group_of(script).generator, group_of(script).giver) == ("rollout-0", LIAR)


@pytest.mark.parametrize("compacted", [False, True])
def test_restarted_controller_knows_which_group_began_anew(compacted: bool) -> None:
    script = resuming()
    script.fails("rollout-0", resumed_lease(script))
    script.restart(compacted=compacted)
    assert (group_of(script).tries, group_of(script).is_anew) == (0, True)


def test_resumed_group_that_the_policy_refuses_begins_anew() -> None:
    script = resuming(wire.Status.OK, None)
    script.generates("rollout-0", resumed_lease(script))
    script.scores(script.held_by("reward-0", "score")[0])
    [train] = script.held_by("policy-0", "train")
    failed = wire.LeaseFailed(
        lease=train, status=wire.Status.INFRA_LOST, reason="a token is too large", rejected=("train0",)
    )
    script.receive("policy-0", failed)
    assert script.state.replicas.membership.conduct[LIAR].num_spoiled == 0, "the rollout has generated a part of it"
    assert_begun_anew(script)


def test_ended_completions_that_pass_through_another_rollout_are_nobody_s() -> None:
    """It resumed them, and gives them back before it has answered."""
    script = resuming()
    gives_back(script, "rollout-0", resumed_lease(script), *ENDED)
    script.joins("rollout-1", slots=4)
    adopts_again(script, "rollout-1")
    [lease] = script.held_by("rollout-1", "generate")
    script.generates("rollout-1", lease)
    assert group_of(script).giver == ""
    script.scores(script.held_by("reward-0", "score")[0], None, None)
    assert not any(one.num_spoiled for one in script.state.replicas.membership.conduct.values())
    assert group_of(script).is_anew


def test_rollout_that_resumes_its_own_completions_answers_for_them() -> None:
    script = run_of(LIAR, prompts_per_step=1, max_tries=0)
    gives_back(script, LIAR, script.held_by(LIAR, "generate")[0], *ENDED)
    script.wait(script.plan.lease_s + 0.25)
    script.generates(LIAR, script.held_by(LIAR, "generate")[0])
    script.scores(script.held_by("reward-0", "score")[0], None, None)
    assert script.state.buffer.num_discarded == 1

"""Replicas that keep to the protocol and hold up the run: by groups that they do not answer, or that they spoil."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.explain import explain
from starling.controller.core.groups.group import GroupState
from starling.controller.core.plan import LeaseTimeouts
from starling.controller.core.records import GroupDiscarded, ReplicaCounted
from starling.controller.core.replicas.eviction import SET_ASIDE_S
from starling.controller.core.replicas.heartbeat import MAX_HELD
from starling.controller.core.replicas.membership import MAX_INVALID
from starling.controller.core.replicas.switching import on_switched
from starling.controller.core.weights.publications import MAX_FAILED_ADOPTIONS
from starling.weightsync.offers.tickets import SPENT

LATE_S = 6.0
"""Seconds after which the bad replica gives its groups up: before their deadline."""
TIMEOUTS = LeaseTimeouts(generate_s=7.0, score_s=7.0, adopt_s=1000.0)
COUNTED_OUT = f"has sent an invalid result, or none in time, {MAX_INVALID} times"


class Incarnations(Script):
    """A script in which each message comes from the present incarnation of its sender."""

    def receive(self, sender: str, message: wire.Up, *buffers: bytes, incarnation: int = 0) -> list[str]:
        member = self.state.replicas.membership.members.get(sender)
        present = member.incarnation if member is not None else 1
        return super().receive(sender, message, *buffers, incarnation=incarnation or present)

    def held_by(self, name: str, kind: str) -> list[str]:
        """Return the short names of the leases of this kind that a replica has."""
        return [self.aliases.short(lease) for lease in self.state.replicas.leases.of(name, kind)]

    def wait(self, seconds: float, silent: str = "") -> None:
        """Let time pass, in which all replicas but `silent` send heartbeats."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 2.0, until)
            for name, member in sorted(self.state.replicas.membership.members.items()):
                if name != silent:
                    held = [self.aliases.short(lease.id) for lease in self.state.replicas.leases.all_of(name)]
                    self.heartbeats(name, *held, version=member.version, incarnation=0)
            self.advance_time(0.0)


def run_of(*rollouts: str, reward: str = "reward-0", **changes: Any) -> Incarnations:
    """Return a run of 8 groups a step whose rollouts have adopted version 0; `rollout-9` has 8 slots, others fewer."""
    changes = {"prompts_per_step": 8, "timeouts": TIMEOUTS, "lease_s": 5.0, "max_tries": 1000} | changes
    script = Incarnations(**changes)
    script.joins("policy-0")
    for name in rollouts:
        script.joins(name, slots=8 if name == "rollout-9" or len(rollouts) == 1 else 4)
    script.publishes(0)
    for attempt, name in enumerate(rollouts):
        script.adopts(name, 0, attempt)
    script.joins(reward, slots=8)
    return script


def generates_all(script: Incarnations, name: str) -> None:
    """Let a rollout generate all groups that it has, and each of them be due again."""
    for lease in script.held_by(name, "generate"):
        script.generates(name, lease)
    for lease in script.held_by("reward-0", "score"):
        script.fails("reward-0", lease)


def adopts_again(script: Incarnations, name: str, version: int = 0) -> None:
    """Let a rollout adopt a version as it was told."""
    [adoption] = script.held_by(name, "adopt")
    script.adopts(name, version, int(adoption.rpartition(":")[2]))


# --- groups that are not answered ----------------------------------------------------------------------------------


def leaves(script: Incarnations, name: str) -> None:
    script.leaves(name)


def is_lost(script: Incarnations, name: str) -> None:
    script.disconnect(name)


def falls_silent(script: Incarnations, name: str) -> None:
    script.wait(script.plan.lease_s + 0.1, silent=name)


def restarts(script: Incarnations, name: str) -> None:
    pass


@pytest.mark.parametrize("gives_up", [leaves, is_lost, falls_silent, restarts])
def test_replica_that_gives_its_groups_up_before_their_deadline_is_not_admitted_forever(
    gives_up: Callable[[Incarnations, str], None],
) -> None:
    script = run_of("rollout-0", reward="reward-9", timeouts=LeaseTimeouts(score_s=12.0))
    for number in range(8):
        script.generates("rollout-0", f"generate:t{number}:0")
    for incarnation in range(2, 2 * MAX_INVALID + 2):
        assert script.held_by("reward-9", "score"), "it was given groups"
        script.wait(LATE_S)
        gives_up(script, "reward-9")
        script.joins("reward-9", slots=8, incarnation=incarnation)
    script.joins("reward-0", slots=4)
    script.leaves("reward-9")
    [_, refusal] = script.joins("reward-9", slots=8, incarnation=100)
    assert COUNTED_OUT in refusal
    assert script.state.replicas.leases.num("reward-0", "score") == 4
    script.leaves("reward-0")
    assert "reward-9 <- welcome" in script.joins("reward-9", incarnation=101), "there is no other reward"


def returns_groups(script: Incarnations) -> None:
    for lease in script.held_by("rollout-9", "generate"):
        script.receive("rollout-9", wire.GroupInterrupted(lease=lease, reason="", partial=(), tensors=()))


def tears_its_weights(script: Incarnations) -> None:
    script.heartbeats("rollout-9", version=-1, incarnation=0)
    adopts_again(script, "rollout-9")


@pytest.mark.parametrize("gives_up", [returns_groups, tears_its_weights])
def test_rollout_that_stays_and_gives_its_groups_up_is_evicted(gives_up: Callable[[Incarnations], None]) -> None:
    script = run_of("rollout-0", "rollout-9", prompts_per_step=12, timeouts=LeaseTimeouts(generate_s=15.0))
    for _ in range(2):
        assert script.held_by("rollout-9", "generate"), "it was given groups"
        script.wait(8.0)
        generates_all(script, "rollout-0")
        gives_up(script)
        script.wait(script.plan.lease_s)
        generates_all(script, "rollout-0")
        script.wait(0.25)
        generates_all(script, "rollout-0")
    assert sorted(script.state.replicas.membership.members) == ["policy-0", "reward-0", "rollout-0"]


def reconnects(script: Incarnations, name: str) -> list[str]:
    """Close the connection of a replica, which returns at once and reports its leases. Returns those that it had."""
    incarnation = script.state.replicas.membership.members[name].incarnation
    held = script.held_by(name, "generate") + script.held_by(name, "score")
    script.disconnect(name)
    script.joins(name, slots=8, incarnation=incarnation)
    script.heartbeats(name, *held, version=0, incarnation=0)
    return held


def test_replica_that_reclaims_groups_and_leaves_them_out_of_its_heartbeats_is_not_admitted_forever() -> None:
    script = run_of("rollout-0", reward="reward-9", timeouts=LeaseTimeouts(score_s=12.0))
    for number in range(8):
        script.generates("rollout-0", f"generate:t{number}:0")
    for _ in range(2 * MAX_INVALID):
        held = reconnects(script, "reward-9")
        assert held == script.held_by("reward-9", "score"), "it has reclaimed its groups"
        script.wait(LATE_S)
        script.heartbeats("reward-9", incarnation=0)
        assert script.held_by("reward-9", "score") != held, "it is given them again"
    script.joins("reward-0", slots=4)
    script.leaves("reward-9")
    [_, refusal] = script.joins("reward-9", slots=8, incarnation=2)
    assert COUNTED_OUT in refusal


def test_reclaimed_lease_ends_when_the_replica_has_had_it_for_its_deadline() -> None:
    script = run_of("rollout-0")
    held = script.held_by("rollout-0", "generate")
    script.wait(LATE_S)
    script.disconnect("rollout-0")
    script.now += 100.0
    script.joins("rollout-0", slots=8)
    script.heartbeats("rollout-0", *held, version=0)
    assert script.held_by("rollout-0", "generate") == held
    script.wait(TIMEOUTS.generate_s - LATE_S - 0.5)  # the time without its connection does not count
    assert "rollout-0" in script.state.replicas.membership.members
    script.wait(0.5)
    assert "rollout-0" not in script.state.replicas.membership.members


def test_replica_that_loses_its_connection_again_and_again_and_answers_is_not_counted() -> None:
    script = run_of("rollout-0", num_steps=100, timeouts=LeaseTimeouts(generate_s=40.0))
    for _ in range(4):
        held = script.held_by("rollout-0", "generate")
        for _ in range(10):
            script.wait(3.0)
            assert reconnects(script, "rollout-0") == held
            assert script.held_by("rollout-0", "generate") == held
        for lease in held:
            script.generates("rollout-0", lease)
        for lease in script.held_by("reward-0", "score"):
            script.fails("reward-0", lease)  # the groups are due again
    conduct = script.state.replicas.membership.conduct["rollout-0"]
    assert conduct.balance_s >= 0
    assert not script.state.replicas.membership.num_invalid["rollout-0"]


def test_rollout_that_answers_as_much_as_it_leaves_behind_may_be_lost_again_and_again() -> None:
    script = run_of("rollout-0", num_steps=100)
    for incarnation in range(2, 20):
        script.wait(LATE_S)
        held = script.held_by("rollout-0", "generate")
        for lease in held[: len(held) // 2]:
            script.generates("rollout-0", lease)
        script.disconnect("rollout-0")
        script.joins("rollout-0", slots=8, incarnation=incarnation)
        adopts_again(script, "rollout-0")
        for lease in script.held_by("reward-0", "score"):
            script.fails("reward-0", lease)  # the groups are due again
    assert not script.state.replicas.membership.num_invalid["rollout-0"]


# --- groups that are spoiled ---------------------------------------------------------------------------------------


def test_steps_are_trained_although_a_rollout_sends_what_only_the_policy_can_refuse() -> None:
    """Tokens beyond the vocabulary, for example: the groups are scored, and each step is reopened."""
    script = run_of("rollout-0", "rollout-9", num_steps=100)
    members, generated = script.state.replicas.membership, dict[str, str]()
    for _ in range(200):
        for name in [name for name in ("rollout-0", "rollout-9") if name in members.members]:
            for lease in script.held_by(name, "generate"):
                script.generates(name, lease, members.members[name].version)
                generated["train" + lease.split(":")[1][1:]] = name
                for score in script.held_by("reward-0", "score"):
                    script.scores(score)
        for train in script.held_by("policy-0", "train"):
            prompts = [group.prompt.id for group in script.state.buffer.frozen_groups(script.state.version + 1)]
            rejected = tuple(prompt for prompt in prompts if generated[prompt] == "rollout-9")
            if rejected:
                status, reason = wire.Status.INFRA_LOST, "a token is too large"
                script.receive(
                    "policy-0", wire.LeaseFailed(lease=train, status=status, reason=reason, rejected=rejected)
                )
        trains_and_adopts(script)
        script.wait(0.25)
    assert script.state.version > 20
    assert members.num_invalid == {"rollout-9": 1}
    assert not script.state.lifecycle.failure


def test_rollout_that_fails_all_its_groups_at_once_is_counted_out() -> None:
    script = run_of("rollout-0", "rollout-9", max_tries=0)
    for incarnation in range(2, 2 + MAX_INVALID):
        while script.state.buffer.num_discarded_in_a_row < script.plan.max_discarded:
            script.fails("rollout-9", script.held_by("rollout-9", "generate")[0])
        script.advance_time(0.25)
        assert "rollout-9" not in script.state.replicas.membership.members
        lines = script.joins("rollout-9", slots=8, incarnation=incarnation)
        if incarnation <= MAX_INVALID:
            adopts_again(script, "rollout-9")
    assert COUNTED_OUT in lines[-1]


@pytest.mark.parametrize("share", [0, 2])
def test_rollouts_stay_where_all_spoil_alike(share: int) -> None:
    """The prompts or the scorers may be at fault; `share`: one of this number of groups of each can be used."""
    script = run_of("rollout-0", "rollout-1", max_tries=0, num_steps=100)
    for number in range(4 * script.plan.max_discarded):
        name = f"rollout-{number % 2}"
        for lease in script.held_by(name, "generate")[:1]:
            if share and number // 2 % share == 0:
                script.generates(name, lease)
                script.scores(lease.replace("generate", "score"))
            else:
                script.fails(name, lease)
        for train in script.held_by("policy-0", "train"):
            step = int(train.split(":")[1])
            script.trains(step)
            script.publishes(step)
            for rollout in ("rollout-0", "rollout-1"):
                adopts_again(script, rollout, step)
        script.advance_time(0.0)
    members = script.state.replicas.membership
    assert {"rollout-0", "rollout-1"} <= members.members.keys()
    assert not members.num_invalid


def scores_where_honest(script: Incarnations, generators: dict[str, str], culprit: str) -> None:
    """Let both reward replicas answer; `culprit` fails all groups, or all that it generated cannot be scored."""
    for name in ("reward-0", "reward-1"):
        for lease in script.held_by(name, "score"):
            is_bad = culprit in (name, generators[lease.split(":")[1]])
            script.scores(lease, *((None, None) if is_bad else (1.0, 0.0)), name=name)


def trains_all(script: Incarnations, *rollouts: str) -> None:
    """Let the policy make the step that it was sent, if any, and `rollouts` adopt it."""
    for train in script.held_by("policy-0", "train"):
        step = int(train.split(":")[1])
        script.trains(step)
        script.publishes(step)
        for rollout in rollouts:
            adopts_again(script, rollout, step)


@pytest.mark.parametrize("culprit", ["rollout-9", "reward-1"])
@pytest.mark.parametrize("max_tries", [0, 1000], ids=["discarded", "tried again"])
@pytest.mark.parametrize("num_good", [0, 1])
def test_scorers_are_not_evicted_for_completions_nor_rollouts_for_scorers(
    culprit: str, max_tries: int, num_good: int
) -> None:
    """Completions that no scorer can read, as without the reward of an environment; or a scorer that reads none."""
    script = run_of("rollout-0", "rollout-9", max_tries=max_tries, num_steps=1000)
    script.joins("reward-1", slots=8)
    generators: dict[str, str] = {}
    for number in range(200):
        for name in ("rollout-0", "rollout-9"):
            # The honest rollout is slow: it generates a group now and then, or has generated one before.
            limit = 8 if name == "rollout-9" or culprit != "rollout-9" else int(number % 8 == 0 and num_good)
            for lease in script.held_by(name, "generate")[:limit]:
                script.generates(name, lease, script.state.replicas.membership.members[name].version)
                generators[lease.split(":")[1]] = name
        scores_where_honest(script, generators, culprit)
        trains_all(script, "rollout-0", "rollout-9")
        script.advance_time(0.01)
        if culprit not in script.state.replicas.membership.members:
            break
    members = script.state.replicas.membership
    if max_tries == 0 or culprit == "reward-1":
        assert members.num_invalid == {culprit: 1}
    elif num_good:  # the other rollout gets the groups that are tried again, until they are all of use
        assert members.num_invalid == {culprit: 1} or script.state.version
    assert {"rollout-0", "rollout-9", "reward-0", "reward-1"} - members.members.keys() <= {culprit}
    assert not script.state.lifecycle.failure


def test_rollout_is_not_evicted_for_a_scorer_that_fails_only_what_it_generates() -> None:
    """Another scorer gets the groups that it failed, and the run goes on."""
    script = run_of("rollout-0", num_steps=1000)
    script.joins("reward-1", slots=8)
    script.joins("rollout-9")
    for _ in range(200):
        for lease in script.held_by("rollout-0", "generate"):
            script.generates("rollout-0", lease, script.state.replicas.membership.members["rollout-0"].version)
        for lease in script.held_by("reward-1", "score"):
            script.scores(lease, None, None, name="reward-1")
        for lease in script.held_by("reward-0", "score"):
            script.scores(lease)
        trains_all(script, "rollout-0")
        script.advance_time(0.01)
    assert set(script.state.replicas.membership.num_invalid) <= {"reward-1"}
    assert script.state.version > 20
    assert not script.state.buffer.num_discarded


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("honest", "liar", "max_tries"),
    [
        ("", "reward-9", 0),
        ("", "teacher-9", 1000),
        ("leaves", "reward-9", 1000),
        ("leaves", "teacher-9", 0),
        ("is lost", "reward-9", 0),
        ("is lost", "teacher-9", 1000),
        pytest.param("", "reward-9", 1000, marks=pytest.mark.campaign),
        pytest.param("", "teacher-9", 0, marks=pytest.mark.campaign),
        pytest.param("leaves", "reward-9", 0, marks=pytest.mark.campaign),
        pytest.param("leaves", "teacher-9", 1000, marks=pytest.mark.campaign),
        pytest.param("is lost", "reward-9", 1000, marks=pytest.mark.campaign),
        pytest.param("is lost", "teacher-9", 0, marks=pytest.mark.campaign),
    ],
)
def test_scorer_that_is_alone_cannot_have_a_rollout_evicted(honest: str, liar: str, max_tries: int) -> None:
    """It fails what one rollout generates: as the only one of its role, or while another one is away now and then.

    Every pair of parameters has a case; the other combinations are in the campaign. With no retries, the groups that it
    fails are discarded.
    """
    role = liar.rpartition("-")[0]
    is_teacher = role == "teacher"
    script = run_of(
        *("rollout-0", "rollout-1", "rollout-2"),
        reward="reward-0" if is_teacher else liar,
        num_teachers=int(is_teacher),
        num_steps=10**6,
        max_tries=max_tries,
        max_staleness=1000,
        lease_s=30.0,
    )
    if is_teacher:
        script.joins(liar, slots=8)
    other, incarnation = f"{role}-1", 0
    generators: dict[str, str] = {}
    members = script.state.replicas.membership
    for number in range(300):
        if honest and number % 25 == 0:
            incarnation += 1
            script.joins(other, slots=8, incarnation=incarnation)
        elif honest and number % 25 == 22:
            (script.leaves if honest == "leaves" else script.disconnect)(other)
        for name in ("rollout-0", "rollout-1", "rollout-2"):
            for lease in script.held_by(name, "generate"):
                script.generates(name, lease, members.members[name].version)
                generators[lease.split(":")[1]] = name
        for name in [name for name in members.members if name.startswith(("reward", "teacher"))]:
            for lease in script.held_by(name, "score") + script.held_by(name, "teach"):
                if name == liar and generators[lease.split(":")[1]] == "rollout-0":
                    script.fails(name, lease)
                elif lease.startswith("score"):
                    script.scores(lease, name=name)
                else:
                    script.scores_tokens(lease, name=name)
        trains_and_adopts(script)
        script.wait(1.0)
    assert {"rollout-0", "rollout-1", "rollout-2"} <= members.members.keys()
    assert set(members.num_invalid) <= {liar}
    assert set(members.set_aside) <= {"rollout-0"}
    assert script.state.version > 20
    assert not script.state.lifecycle.failure


@pytest.mark.parametrize("culprit", ["rollout-9", "teacher-1"])
@pytest.mark.parametrize("max_tries", [0, 1000], ids=["discarded", "tried again"])
def test_teachers_are_not_evicted_for_tokens_nor_rollouts_for_teachers(culprit: str, max_tries: int) -> None:
    """Tokens that no teacher reads, as ids beyond its vocabulary, whatever their rewards; or such a teacher."""
    script = run_of("rollout-0", "rollout-9", num_teachers=1, num_steps=1000, max_tries=max_tries)
    for name in ("teacher-0", "teacher-1"):
        script.joins(name, slots=8)
    generators: dict[str, str] = {}
    for _ in range(40):
        for name in ("rollout-0", "rollout-9"):
            for lease in script.held_by(name, "generate"):
                script.generates(name, lease, script.state.replicas.membership.members[name].version)
                generators[lease.split(":")[1]] = name
        for lease in script.held_by("reward-0", "score"):
            script.scores(lease)
        for name in ("teacher-0", "teacher-1"):
            for lease in script.held_by(name, "teach"):
                if culprit in (name, generators[lease.split(":")[1]]):
                    script.fails(name, lease, "it has no such token")
                else:
                    script.scores_tokens(lease, name=name)
        trains_all(script, "rollout-0", "rollout-9")
        script.advance_time(0.01)
        if culprit not in script.state.replicas.membership.members:
            break
    assert script.state.replicas.membership.num_invalid == {culprit: 1}
    assert not script.state.lifecycle.failure


def answers_all(script: Incarnations, generators: dict[str, str], is_filtered: Callable[[str, str], bool]) -> None:
    """Let all replicas answer: with equal rewards if `is_filtered` says so of the rollout and the reward replica."""
    members = script.state.replicas.membership.members
    for rollout in [name for name in members if name.startswith("rollout")]:
        for lease in script.held_by(rollout, "generate"):
            num = 1 if lease.split(":")[1].startswith("e") else 2
            script.generates(rollout, lease, members[rollout].version, num=num)
            generators[lease.split(":")[1]] = rollout
    for scorer in [name for name in members if name.startswith("reward")]:
        for lease in script.held_by(scorer, "score"):
            key = lease.split(":")[1]
            if key.startswith("e"):
                script.scores(lease, 1.0, name=scorer)
            else:
                rewards = (1.0, 1.0) if is_filtered(generators[key], scorer) else (1.0, 0.0)
                script.scores(lease, *rewards, name=scorer)
    trains_and_adopts(script)


def trains_and_adopts(script: Incarnations) -> None:
    """Let the policy make the step that it was sent, if any, and each rollout adopt what it was told to."""
    trains_all(script)
    for name in [name for name in script.state.replicas.membership.members if name.startswith("rollout")]:
        for lease in script.held_by(name, "adopt"):
            _, version, attempt = lease.split(":")
            script.adopts(name, int(version), int(attempt))


def run_of_three(culprit: str, natural: float = 0.0) -> Incarnations:
    """Return a run in which one of three rollouts, or of three reward replicas, was just set aside."""
    script = run_of("rollout-0", "rollout-1", "rollout-9", dynamic_sampling=True, num_steps=10_000)
    for scorer in ("reward-1", "reward-2"):
        script.joins(scorer, slots=8)
    members, draws, generators = script.state.replicas.membership, random.Random(0), dict[str, str]()
    for _ in range(600):
        answers_all(script, generators, lambda *replicas: culprit in replicas or draws.random() < natural)
        script.wait(0.1)
        if culprit in members.set_aside:
            break
    # Of a fast rollout that leaves no groups to others, a scorer is suspected first.
    assert {name for name in members.set_aside if not name.startswith("reward")} <= {culprit}
    assert culprit in members.set_aside
    return script


@pytest.mark.sample(1)
@pytest.mark.parametrize("culprit", ["rollout-9", "reward-1"])
@pytest.mark.parametrize("natural", [0.0, 0.3])
def test_replica_that_filters_out_what_others_keep_gets_no_work_for_a_while(culprit: str, natural: float) -> None:
    """Completions that are all the same, or equal rewards, while a part of the groups is filtered out anyway."""
    script = run_of_three(culprit, natural)
    begin, slots = script.now, script.state.replicas.slots
    for lease in script.held_by(culprit, "generate") + script.held_by(culprit, "score"):
        script.fails(culprit, lease)
    generators: dict[str, str] = {}
    while script.now < begin + SET_ASIDE_S - 1.0:
        answers_all(script, generators, lambda *_: False)
        script.wait(1.0)
        assert not script.held_by(culprit, "generate") + script.held_by(culprit, "score")
        assert culprit in slots.cooldowns
    script.wait(2.0)
    assert culprit not in slots.cooldowns
    assert not script.state.replicas.membership.num_invalid
    assert not script.state.lifecycle.failure


def gives_a_group_back(script: Incarnations, name: str) -> None:
    script.interrupts(name, script.held_by(name, "generate")[0], 1, 1, version=script.state.version)


def leaves_and_joins(script: Incarnations, name: str) -> None:
    script.leaves(name)
    script.joins(name, slots=8, incarnation=2)


def wakes(script: Incarnations, name: str) -> None:
    on_switched(script.state, script.state.replicas.membership.members[name], asleep=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("act", [gives_a_group_back, leaves_and_joins, wakes])
def test_rollout_that_is_set_aside_cannot_end_that_itself(act: Callable[[Incarnations, str], None]) -> None:
    script = run_of_three("rollout-9")
    begin, generators, cooldowns = script.now, dict[str, str](), script.state.replicas.slots.cooldowns
    act(script, "rollout-9")
    for lease in script.held_by("rollout-9", "generate"):
        script.fails("rollout-9", lease)
    for lease in script.held_by("rollout-9", "adopt"):
        script.adopts("rollout-9", script.state.version, int(lease.rpartition(":")[2]))
    while script.now < begin + SET_ASIDE_S - 2.0:
        answers_all(script, generators, lambda *_: False)
        script.wait(1.0)
        assert not script.held_by("rollout-9", "generate")
        assert "rollout-9" in cooldowns
    script.wait(3.0)
    assert "rollout-9" not in cooldowns


def test_rollout_that_gives_groups_back_all_the_time_is_set_aside() -> None:
    """It is in a cooldown whenever the controller looks."""
    changes = {"prompts_per_step": 24, "max_staleness": 1}
    script = run_of("rollout-0", "rollout-1", "rollout-9", dynamic_sampling=True, num_steps=10_000, **changes)
    for scorer in ("reward-1", "reward-2"):
        script.joins(scorer, slots=8)
    generators: dict[str, str] = {}
    for _ in range(600):
        answers_all(script, generators, lambda rollout, _: rollout == "rollout-9")
        if held := script.held_by("rollout-9", "generate"):
            script.interrupts("rollout-9", held[0], 1, 1, version=script.state.version)
        script.wait(0.1)
    assert set(script.state.replicas.membership.set_aside) == {"rollout-9"}


def test_replica_that_is_set_aside_works_when_the_others_have_left() -> None:
    script = run_of_three("reward-1")
    script.leaves("reward-1")
    script.joins("reward-1", slots=64, incarnation=2)
    for lease in script.held_by("rollout-0", "generate"):
        script.generates("rollout-0", lease, script.state.replicas.membership.members["rollout-0"].version)
    assert not script.held_by("reward-1", "score"), "it is still set aside"
    script.leaves("reward-0")
    script.leaves("reward-2")
    assert script.held_by("reward-1", "score")


@pytest.mark.parametrize("liar", ["rollout-9", "reward-1"])
def test_replica_whose_groups_are_never_filtered_out_has_no_other_set_aside(liar: str) -> None:
    script = run_of("rollout-0", "rollout-1", "rollout-9", dynamic_sampling=True, num_steps=10_000)
    for scorer in ("reward-1", "reward-2"):
        script.joins(scorer, slots=8)
    draws, generators = random.Random(3), dict[str, str]()
    for _ in range(400):
        answers_all(script, generators, lambda *replicas: liar not in replicas and draws.random() < 0.5)
        script.wait(0.1)
    assert not script.state.replicas.membership.set_aside
    assert not script.state.replicas.membership.num_invalid


def test_replicas_that_filter_out_equally_often_are_not_set_aside() -> None:
    """Neither for chance, nor for one that does little."""
    script = run_of("rollout-0", "rollout-9", dynamic_sampling=True, num_steps=10_000)
    script.joins("reward-1", slots=1)
    draws, generators = random.Random(1), dict[str, str]()
    for _ in range(600):
        answers_all(script, generators, lambda *_: draws.random() < 0.7)
        script.wait(0.5)
    assert script.state.buffer.num_filtered > 1000
    assert not script.state.replicas.membership.set_aside
    assert not script.state.lifecycle.failure


def test_reward_replica_that_filters_out_three_of_four_cannot_end_the_run() -> None:
    """A liar that keeps its share of each row below the limits, where most groups are filtered out anyway."""
    script = run_of("rollout-0", "rollout-1", reward="reward-1", dynamic_sampling=True, num_steps=10**6)
    script.joins("reward-0", slots=8)
    members, draws = script.state.replicas.membership, random.Random(2)
    num_honest = 0
    while num_honest < 1000 and "reward-0" in members.members:
        for rollout in ("rollout-0", "rollout-1"):
            for lease in script.held_by(rollout, "generate"):
                script.generates(rollout, lease, members.members[rollout].version)
        for lease in script.held_by("reward-1", "score"):
            num_honest += 1
            script.scores(lease, 1.0, float(draws.random() < 0.9), name="reward-1")
        for lease in script.held_by("reward-0", "score"):
            if script.state.buffer.filtering.num_in_a_row % 4:
                script.scores(lease, 0.0, 0.0, name="reward-0")
        trains_and_adopts(script)
        script.advance_time(0.01)
        assert not script.state.lifecycle.failure
    assert set(members.num_invalid) <= {"reward-0"}


def test_rollout_is_not_evicted_for_equal_rewards_while_an_evaluation_has_the_other_one() -> None:
    """All groups to train are of one rollout then, and one of two reward replicas lies about them."""
    changes = {"prompts_per_step": 4, "evaluate_every": 5, "num_held_out": 60, "max_staleness": 1}
    script = run_of("rollout-0", "rollout-1", dynamic_sampling=True, num_steps=3000, **changes)
    script.joins("reward-1", slots=8)
    members, generators = script.state.replicas.membership, dict[str, str]()
    for _ in range(400):
        is_evaluating = script.state.evaluations.current is not None
        answers_all(script, generators, lambda _, scorer: scorer == "reward-1" and is_evaluating)  # noqa: B023
        script.wait(0.25)
    assert set(members.set_aside) <= {"reward-1"}
    assert not members.num_invalid
    assert script.state.version > 100


def test_rollout_is_not_evicted_for_a_burst_of_failures_of_a_reward_replica() -> None:
    """It works well until it has many groups of the rollout that an evaluation has, and fails them all at once."""
    changes = {"evaluate_every": 2, "num_held_out": 80, "max_staleness": 1, "max_tries": 3}
    script = run_of("rollout-0", "rollout-1", "rollout-2", num_steps=3000, **changes)
    script.joins("reward-1", slots=64)
    members, num_good = script.state.replicas.membership, 0
    for _ in range(600):
        for rollout in ("rollout-0", "rollout-1", "rollout-2"):
            for lease in script.held_by(rollout, "generate")[:2]:
                num = 1 if lease.split(":")[1].startswith("e") else 2
                script.generates(rollout, lease, members.members[rollout].version, num=num)
        for scorer in ("reward-0", "reward-1"):
            held = script.held_by(scorer, "score")
            evaluated = [lease for lease in held if lease.split(":")[1].startswith("e")]
            if scorer == "reward-1" and num_good >= 100 and evaluated:
                if len(evaluated) >= script.plan.max_discarded:
                    num_good = 0
                    for lease in evaluated:
                        script.fails(scorer, lease, fatal=True)
                held = [lease for lease in held if lease not in evaluated]
            for lease in held:
                num_good += scorer == "reward-1"
                script.scores(lease, *((1.0,) if lease in evaluated else (1.0, 0.0)), name=scorer)
        trains_and_adopts(script)
        script.wait(0.25)
    assert set(members.num_invalid) <= {"reward-1"}
    assert script.state.version > 100
    assert not script.state.buffer.num_discarded


def test_scorer_cannot_choose_prompts_that_are_discarded() -> None:
    """Neither by failures that it calls final, nor by failing each try of the same groups."""
    script = run_of("rollout-0", "rollout-1", num_steps=3000, max_tries=2)
    script.joins("reward-1", slots=8)
    members = script.state.replicas.membership
    for number in range(300):
        for rollout in ("rollout-0", "rollout-1"):
            for lease in script.held_by(rollout, "generate"):
                script.generates(rollout, lease, members.members[rollout].version)
        for lease in script.held_by("reward-1", "score") if "reward-1" in members.members else ():
            if number % 4 == 0 or int(lease.split(":")[1][1:]) % 4 == 0:
                script.fails("reward-1", lease, fatal=bool(number % 2))
            else:
                script.scores(lease, name="reward-1")
        for lease in script.held_by("reward-0", "score"):
            script.scores(lease)
        trains_and_adopts(script)
        script.advance_time(0.01)
    assert not script.state.buffer.num_discarded
    assert set(members.num_invalid) <= {"reward-1"}


def test_rollout_that_fails_nearly_all_discarded_groups_is_evicted() -> None:
    script = run_of("rollout-0", "rollout-9", max_tries=0)
    script.fails("rollout-0", script.held_by("rollout-0", "generate")[0], fatal=True)
    while script.state.buffer.num_discarded_in_a_row < script.plan.max_discarded:
        script.fails("rollout-9", script.held_by("rollout-9", "generate")[0])
    script.advance_time(0.25)
    assert not script.state.lifecycle.failure
    assert script.state.replicas.membership.num_invalid == {"rollout-9": 1}


def test_run_ends_whose_groups_are_all_filtered_out() -> None:
    """The prompts are at fault: no replica is evicted."""
    script = run_of("rollout-0", "rollout-1", dynamic_sampling=True, num_steps=100)
    for number in range(4 * script.plan.max_filtered):
        if script.state.lifecycle.failure:
            break
        lease = script.held_by(f"rollout-{number % 2}", "generate")[0]
        script.generates(f"rollout-{number % 2}", lease)
        script.scores(lease.replace("generate", "score"), 0.0, 0.0)
        script.advance_time(0.25 if number % 8 == 0 else 0.0)
    assert "were all filtered out" in script.state.lifecycle.failure
    assert script.state.buffer.num_filtered <= 2 * script.plan.max_filtered + 8
    assert not script.state.replicas.membership.num_invalid


# --- restarts of the controller --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_replica_that_was_counted_out_is_not_admitted_after_a_restart(compacted: bool) -> None:
    script = run_of("rollout-0", "rollout-9")
    for incarnation in range(2, 2 + MAX_INVALID):
        script.receive(
            "rollout-9",
            wire.GroupGenerated(lease=script.held_by("rollout-9", "generate")[0], trajectories=(), tensors=()),
        )
        lines = script.joins("rollout-9", slots=8, incarnation=incarnation)
        if incarnation <= MAX_INVALID:
            adopts_again(script, "rollout-9")
    assert COUNTED_OUT in lines[-1]
    script.restart(compacted=compacted)
    script.joins("rollout-0", slots=4)
    assert COUNTED_OUT in script.joins("rollout-9", slots=8, incarnation=100)[-1]
    counted = [write.record for write in script.journal if isinstance(write.record, ReplicaCounted)]
    assert [record.num for record in counted] == list(range(1, MAX_INVALID + 1)), "nothing is written beyond"


@pytest.mark.parametrize("compacted", [False, True])
def test_count_of_a_replica_is_the_same_from_the_whole_and_from_the_compacted_journal(compacted: bool) -> None:
    script = run_of("rollout-9")  # the only rollout stays
    for _ in range(MAX_INVALID + 2):
        lease = script.held_by("rollout-9", "generate")[0]
        script.receive("rollout-9", wire.GroupGenerated(lease=lease, trajectories=(), tensors=()))
    script.restart(compacted=compacted)
    assert script.state.replicas.membership.num_invalid == {"rollout-9": MAX_INVALID}


def test_replica_that_was_counted_out_is_admitted_to_a_run_that_is_resumed() -> None:
    script = run_of("rollout-0", "rollout-9")
    script.state.replicas.membership.num_invalid["rollout-9"] = MAX_INVALID - 1
    script.receive(
        "rollout-9", wire.GroupGenerated(lease=script.held_by("rollout-9", "generate")[0], trajectories=(), tensors=())
    )
    script.restart(stopped=True)
    script.joins("rollout-0", slots=4)
    assert "rollout-9 <- welcome" in script.joins("rollout-9", slots=8, incarnation=100)


@pytest.mark.parametrize("compacted", [False, True])
def test_counts_of_filtered_groups_are_the_same_after_a_restart(compacted: bool) -> None:
    """Also those of a replica that was set aside, which are counted anew, and of one that has left."""
    script = run_of("rollout-0", "rollout-9", dynamic_sampling=True, num_steps=10_000)
    generators: dict[str, str] = {}
    members = script.state.replicas.membership
    for _ in range(200):
        answers_all(script, generators, lambda rollout, _: rollout == "rollout-9")
        script.wait(0.1)
        if members.set_aside:
            break
    assert set(members.set_aside) == {"rollout-9"}
    answers_all(script, generators, lambda *_: True)
    script.leaves("rollout-9")
    before = script.state.buffer.filtering.summary()
    assert not [one for one in before if one.rollout == "rollout-9" and (one.num_filtered or one.num_kept)]
    script.restart(compacted=compacted)
    assert script.state.buffer.filtering.summary() == before
    script.wait(10.0)
    assert not script.state.lifecycle.failure
    assert not script.state.replicas.membership.num_invalid


def test_no_replica_is_evicted_for_filtered_groups_of_an_older_journal() -> None:
    """It does not say which replicas led to them."""
    script = run_of("rollout-0", "rollout-9", dynamic_sampling=True, num_steps=100)
    filters_out(script, script.plan.max_filtered)
    for number, write in enumerate(script.journal):
        if isinstance(write.record, GroupDiscarded):
            script.journal[number] = replace(write, record=replace(write.record, generator="", scorer=""))
    script.restart()
    rejoins(script)
    assert "were all filtered out" in script.state.lifecycle.failure
    assert not script.state.replicas.membership.num_invalid


def rejoins(script: Incarnations) -> None:
    """Let all replicas join a restarted controller, which then waits no more."""
    for name, slots in (("policy-0", 1), ("reward-0", 8), ("rollout-0", 4), ("rollout-9", 8)):
        script.joins(name, slots=slots)
    script.wait(4.0)


def filters_out(script: Incarnations, num: int) -> None:
    """Let `num` groups of `rollout-9` be filtered out."""
    for _ in range(num):
        lease = script.held_by("rollout-9", "generate")[0]
        script.generates("rollout-9", lease)
        script.scores(script.held_by("reward-0", "score")[0], 0.0, 0.0)


# --- weights that are not adopted ------------------------------------------------------------------------------------


def seconds_until_next_adoption(script: Incarnations, name: str) -> float:
    """Let time pass until a rollout is told to adopt again; return the seconds."""
    before = script.now
    while not script.held_by(name, "adopt"):
        script.wait(0.5)
        assert script.now < before + 100.0, f"{name} is not told to adopt again"
    return script.now - before


def fails_to_adopt(script: Incarnations, name: str) -> None:
    [lease] = script.held_by(name, "adopt")
    script.fails(name, lease, "the disk is full")


def run_with_adoption(*others: str) -> Incarnations:
    """Return a run in which `rollout-9` has been told to adopt version 0, which all others have."""
    script = run_of(*others, timeouts=LeaseTimeouts(generate_s=1e6, score_s=1e6, adopt_s=1e6))
    script.joins("rollout-9")
    return script


def test_failed_adoption_is_tried_again_ever_more_seldom() -> None:
    script = run_with_adoption()
    waits = []
    for _ in range(MAX_FAILED_ADOPTIONS + 2):
        fails_to_adopt(script, "rollout-9")
        reason = explain(script.state)
        waits.append(round(seconds_until_next_adoption(script, "rollout-9")))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert "rollout-9" in script.state.replicas.membership.members, "no other adopts"
    assert "rollout-9 to adopt version 0 again in 60 s, after 10 failures in a row: the disk is full" in str(reason)
    adopts_again(script, "rollout-9")
    script.heartbeats("rollout-9", version=-1, incarnation=0)
    fails_to_adopt(script, "rollout-9")
    assert seconds_until_next_adoption(script, "rollout-9") < 2.0, "the count begins anew"


def test_rollout_that_has_read_what_its_tickets_allow_is_started_again_and_not_counted() -> None:
    script = run_of("rollout-0", "rollout-1")
    for incarnation in range(2, 2 + 2 * MAX_INVALID):
        assert "rollout-1 <- welcome" in script.joins("rollout-1", slots=4, incarnation=incarnation)
        [lease] = script.held_by("rollout-1", "adopt")
        lines = script.fails("rollout-1", lease, f"Pull of version 0: rollout-1 {SPENT}.")
        assert any("must be started again to pull version 0 once more" in line for line in lines), lines
    assert not script.state.replicas.membership.num_invalid


def test_rollout_that_alone_fails_to_adopt_is_evicted_and_counted() -> None:
    script = run_with_adoption("rollout-0")
    for _ in range(MAX_FAILED_ADOPTIONS - 1):
        fails_to_adopt(script, "rollout-9")
        seconds_until_next_adoption(script, "rollout-9")
    assert "rollout-9" in script.state.replicas.membership.members
    fails_to_adopt(script, "rollout-9")
    assert "rollout-9" not in script.state.replicas.membership.members
    assert script.state.replicas.membership.num_invalid == {"rollout-9": 1}


def test_new_version_is_no_reason_to_try_again_at_once_after_many_failures() -> None:
    script = run_with_adoption()
    for _ in range(MAX_FAILED_ADOPTIONS // 2):
        fails_to_adopt(script, "rollout-9")
        seconds_until_next_adoption(script, "rollout-9")
    fails_to_adopt(script, "rollout-9")
    script.state.weights.add_roots(1, "root", {})
    assert script.state.weights.retry_in_s("rollout-9", script.now) > 10.0


def test_rollouts_do_not_wait_for_one_that_was_fast_and_does_not_answer() -> None:
    script = run_of("rollout-0", "rollout-9", timeouts=LeaseTimeouts(generate_s=1e5, score_s=1e5), num_steps=1000)
    script.state.replicas.membership.members["rollout-9"].num_slots = 1
    for _ in range(40):
        script.wait(0.01)
        for lease in script.held_by("rollout-9", "generate"):
            script.generates("rollout-9", lease)
        for lease in script.held_by("reward-0", "score"):
            script.fails("reward-0", lease)
    script.wait(60.0)
    for lease in script.held_by("rollout-0", "generate"):
        script.generates("rollout-0", lease)
    assert script.held_by("rollout-9", "generate"), "it keeps its last group"
    script.wait(600.0)
    assert script.held_by("rollout-0", "generate")
    assert script.state.buffer.count(GroupState.WAITING) == 0


# --- answers of another kind than the work --------------------------------------------------------------------------

OTHER_ANSWERS: dict[str, Callable[[str], wire.Up]] = {
    "slept": lambda lease: wire.Slept(lease=lease),
    "woken": lambda lease: wire.Woken(lease=lease),
    "adopted": lambda lease: wire.WeightsAdopted(
        lease=lease, version=0, root="", pull_s=0.0, pause_s=0.0, size_bytes=0, transport="tcp"
    ),
    "published": lambda lease: wire.WeightsPublished(lease=lease, version=0, publish_s=0.0),
}


@pytest.mark.parametrize("kind", list(OTHER_ANSWERS))
@pytest.mark.parametrize("others", [(), ("rollout-0",)], ids=["alone", "beside another"])
def test_group_is_not_lost_by_an_answer_of_another_kind(kind: str, others: tuple[str, ...]) -> None:
    script = run_of(*others, "rollout-9")
    held = script.state.replicas.leases.of("rollout-9", "generate")
    buffers = (b"junk",) if kind == "published" else ()
    for lease in held:
        script.receive("rollout-9", OTHER_ANSWERS[kind](lease), *buffers)
    assert script.state.replicas.membership.num_invalid["rollout-9"] >= 1
    script.wait(TIMEOUTS.generate_s + 1.0)
    script.joins("rollout-1", slots=8)
    adopts_again(script, "rollout-1")
    leases = script.state.replicas.leases
    for group in script.state.buffer.within(GroupState.LEASED):
        assert any(f":{group.key}:" in lease for lease in leases._leases), f"{group.key} is generated by none"
    assert script.state.buffer.count(GroupState.LEASED) == 8


def test_adoption_is_not_ended_by_an_answer_of_another_kind() -> None:
    script = run_of("rollout-0", timeouts=LeaseTimeouts(adopt_s=20.0))
    script.joins("rollout-9")
    [adoption] = script.state.replicas.leases.of("rollout-9", "adopt")
    script.receive("rollout-9", wire.GroupGenerated(lease=adoption, trajectories=(), tensors=()))
    assert "rollout-9" not in script.state.replicas.membership.members, "it would be outdated, and told nothing"


# --- long and many leases -------------------------------------------------------------------------------------------


def test_leases_that_no_controller_grants_get_no_answer() -> None:
    script = run_of("rollout-0", "rollout-9")
    long = "x" * (15 << 20)
    script.receive("reward-0", wire.GroupScored(lease=long, rewards=(), statuses=()))
    assert not script.sent, "two such texts are more than one message holds"
    script.heartbeats("reward-0", long, incarnation=0)
    assert [type(send.message) for send in script.sent] == [wire.Welcome]


def test_heartbeat_with_many_leases_is_looked_at_in_part() -> None:
    script = run_of("rollout-9")
    made_up = [f"score:t{number}:0.1" for number in range(MAX_HELD + 10)]
    script.heartbeats("reward-0", *made_up, incarnation=0)
    [released] = [send.message.leases for send in script.sent if isinstance(send.message, wire.ReleaseLeases)]
    assert len(released) == MAX_HELD

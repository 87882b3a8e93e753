"""Replicas that send heartbeats and never a result: they are evicted at the deadline of their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from transcript import Script

from starling.common.ranges import MAX_SLOTS
from starling.controller.core.plan import LeaseTimeouts


@dataclass(frozen=True)
class Hang:
    """A replica that hangs in one kind of work."""

    limit: str
    """The timeout of the work."""
    name: str
    work: str
    stages: int
    """Number of stages of `run_until` before the hang."""


HANGS = [
    Hang("publish_s", "policy-0", "publish:0", 0),
    Hang("adopt_s", "rollout-0", "adopt:0", 1),
    Hang("generate_s", "rollout-0", "generate:t0", 2),
    Hang("score_s", "reward-0", "score:t0", 3),
    Hang("train_s", "policy-0", "train:1", 4),
    Hang("save_s", "policy-0", "save:1", 5),
    Hang("save_s", "policy-0", "checkpoint:2", 6),
]


def run_until(stages: int, **changes: Any) -> Script:
    """Return a run of two steps after its first stages."""
    script = Script(save_every=1, **changes)
    for name in ("policy-0", "reward-0", "rollout-0"):
        script.joins(name)
    stages_of_run = [
        lambda: script.publishes(0),
        lambda: script.adopts("rollout-0", 0),
        lambda: [script.generates("rollout-0", f"generate:t{n}:0") for n in (0, 1)],
        lambda: [script.scores(f"score:t{n}:0") for n in (0, 1)],
        lambda: [script.trains(1), script.publishes(1), script.adopts("rollout-0", 1)],
        lambda: [
            script.saves_state(1),
            script.generate_and_score(2, 3, version=1),
            script.trains(2),
            script.publishes(2),
            script.adopts("rollout-0", 2),
        ],
    ]
    for stage in stages_of_run[:stages]:
        stage()
    return script


def heartbeat_all(script: Script) -> None:
    """Let every replica send a heartbeat with all its leases."""
    for name, member in sorted(script.state.replicas.membership.members.items()):
        held = [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of(name)]
        script.heartbeats(name, *held, version=member.version)


@pytest.mark.parametrize("hang", HANGS, ids=[hang.work for hang in HANGS])
def test_hanging_replica_is_evicted_with_a_reason(hang: Hang) -> None:
    script = run_until(hang.stages, timeouts=LeaseTimeouts(**{hang.limit: 7.0}))
    [lease] = [
        found for found in script.state.replicas.leases.all_of(hang.name) if found.id.startswith(hang.work + ":")
    ]
    while script.now + 2.0 < 7.0:
        script.now += 2.0
        heartbeat_all(script)
    assert script.advance_time(6.9 - script.now) == [], "the deadline has not passed"
    heartbeat_all(script)
    lines = script.advance_time(0.1)
    sentence = f"{hang.name} did not answer {lease.id} within 7 s"
    counted = [f"(invalid {hang.name})"] if hang.limit in ("generate_s", "score_s", "teach_s") else []
    assert lines[: len(counted)] == counted
    assert lines[len(counted) :][:3] == [
        f"(left {hang.name})",
        f"(refused {hang.name})",
        f"{hang.name} <- refused: {sentence}",
    ]
    assert script.joins(hang.name) == [f"(refused {hang.name})", f"{hang.name} <- refused: {sentence}"]
    assert f"{hang.name} <- welcome" in script.joins(hang.name, incarnation=2), "a restarted process may rejoin"


def test_work_of_a_hanging_replica_is_requeued() -> None:
    script = run_until(2, timeouts=LeaseTimeouts(generate_s=7.0))
    script.joins("rollout-1")
    script.adopts("rollout-1", 0, 1)
    for _ in range(3):
        script.now += 2.0
        heartbeat_all(script)
    assert script.advance_time(1.0)[-2:] == [
        "rollout-1 <- generate:t0:1 train0 >= v0",
        "rollout-1 <- generate:t1:1 train1 >= v0",
    ]
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- introduce"], "the late result is ignored"


def test_result_in_time_ends_the_deadline() -> None:
    script = run_until(2, timeouts=LeaseTimeouts(generate_s=7.0))
    script.now = 6.9
    heartbeat_all(script)
    script.generates("rollout-0", "generate:t0:0")
    script.generates("rollout-0", "generate:t1:0")
    assert script.advance_time(0.1) == []
    assert "rollout-0" in script.state.replicas.membership.members


def hang_in_all_groups(script: Script, name: str, incarnation: int) -> None:
    """Let `name` join, hold a group until its deadline and answer nothing, while all others send heartbeats."""
    script.joins(name, slots=8, incarnation=incarnation)
    assert script.state.replicas.leases.num(name, "score"), "it was given a group"
    until = script.now + script.plan.timeouts.score_s
    while script.now + 2.0 < until:
        script.now += 2.0
        for one, member in sorted(script.state.replicas.membership.members.items()):
            held = [script.aliases.short(lease.id) for lease in script.state.replicas.leases.all_of(one)]
            script.heartbeats(one, *held, version=member.version, incarnation=member.incarnation)
    script.advance_time(until - script.now)
    assert name not in script.state.replicas.membership.members


def test_replica_that_answers_for_no_group_is_not_admitted_forever() -> None:
    script = Script(prompts_per_step=8, timeouts=LeaseTimeouts(score_s=7.0, adopt_s=100.0))
    for name in ("policy-0", "rollout-0", "reward-9"):
        script.joins(name, slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    for number in range(8):
        script.generates("rollout-0", f"generate:t{number}:0")
    for incarnation in (1, 2, 3):
        hang_in_all_groups(script, "reward-9", incarnation)
    script.joins("reward-0", slots=4)
    [_, refusal] = script.joins("reward-9", incarnation=4)
    assert "reward-9 has sent an invalid result, or none in time, 3 times" in refusal
    assert script.state.replicas.leases.num("reward-0", "score") == 4
    script.leaves("reward-0")
    assert "reward-9 <- welcome" in script.joins("reward-9", incarnation=5), "the run has no other reward"


def test_replica_with_too_many_slots_is_refused() -> None:
    script = run_until(3)
    for slots in (MAX_SLOTS + 1, 2**62):
        [_, refusal] = script.joins("reward-1", slots=slots)
        assert refusal == (
            f"reward-1 <- refused: reward-1 offers {slots} slots; set its num_slots to at most {MAX_SLOTS}"
        )
    assert "reward-1 <- welcome" in script.joins("reward-1", slots=MAX_SLOTS)

"""Publications every few steps, when they are needed, and some time apart: `rl.sync_every` and `rl.sync_every_s`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.groups.group import GroupState
from starling.controller.settings import RlSettings
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.scenario.scenario import scenario_of


def running(slots: int = 8, **settings: Any) -> Script:
    """Return a run of six steps of one group, with a rollout of so many slots that holds version 0."""
    script = Script(
        **{
            "num_steps": 6,
            "prompts_per_step": 1,
            "max_staleness": 2,
            "evaluate_at_end": False,
            "lease_s": 1e3,
            **settings,
        }
    )
    script.joins("rollout-0", slots=slots)
    script.joins("policy-0")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    return script


def publications(script: Script) -> list[int]:
    """Return the versions that the policy was asked to publish."""
    sent = [send.message for send in script.commands_sent.values() if isinstance(send.message, wire.PublishWeights)]
    return [message.version for message in sent]


def take_steps(script: Script, *steps: int) -> None:
    """Make steps, and publish and adopt what is due after each."""
    for step in steps:
        script.generate_and_score(step - 1, version=script.state.weights.version)
        script.trains(step)
        if publications(script)[-1] == step:
            script.publishes(step)
            script.adopts("rollout-0", step)


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (3, [0, 3, 6])])
def test_every_so_many_steps_a_version_is_published(every: int, expected: list[int]) -> None:
    script = running(sync_every=every)
    take_steps(script, 1, 2, 3, 4, 5, 6)
    assert publications(script) == expected


def test_last_version_is_published_whenever_it_comes() -> None:
    script = running(sync_every=3, num_steps=4)
    take_steps(script, 1, 2, 3, 4)
    assert publications(script) == [0, 3, 4]


def test_steps_between_publications_wait_for_none() -> None:
    """The groups of all of them exist from the beginning."""
    script = running(sync_every=3)
    for group in range(3):
        script.generate_and_score(group)
    for step in (1, 2):
        script.trains(step)
        assert script.state.replicas.leases.has("train"), f"step {step + 1} begins at once"
    assert publications(script) == [0]


def test_rollout_that_joins_when_nobody_offers_the_last_version_gets_the_newest() -> None:
    script = running(sync_every=3)
    take_steps(script, 1)
    script.disconnect("rollout-0")
    script.disconnect("policy-0")
    script.joins("policy-0", version=1, incarnation=2)
    assert publications(script) == [0]
    script.joins("rollout-1", slots=8)
    assert publications(script) == [0, 1]


def test_more_steps_than_groups_may_be_old_are_refused() -> None:
    with pytest.raises(ValueError, match="lower sync_every to 2, or raise max_staleness"):
        RlSettings(sync_every=3, max_staleness=1)


# --- when it is needed ------------------------------------------------------------------------------------------------


def test_version_is_published_when_rollouts_have_started_all_groups_that_may_exist() -> None:
    script = running(sync_every=0, num_steps=9)
    script.generate_and_score(0)
    script.trains(1)
    assert publications(script) == [0, 1], "all three groups were started, and no fourth may exist before version 1"


def test_version_is_skipped_while_groups_wait_for_rollouts() -> None:
    script = running(sync_every=0, num_steps=9, slots=1)
    script.generate_and_score(0)
    script.trains(1)
    assert script.state.buffer.count(GroupState.WAITING) == 1
    assert publications(script) == [0]
    script.generates("rollout-0", "generate:t1:0")
    assert script.state.buffer.count(GroupState.WAITING) == 0
    assert publications(script) == [0, 1], "the last group was started"


def test_no_version_is_needed_when_all_groups_of_the_run_exist() -> None:
    script = running(sync_every=0, num_steps=3)
    take_steps(script, 1, 2, 3)
    assert publications(script) == [0, 3]


# --- by time ----------------------------------------------------------------------------------------------------------


def test_version_is_held_back_for_some_time() -> None:
    script = running(sync_every_s=10.0, max_staleness=3, num_steps=9)
    take_steps(script, 1)
    assert publications(script) == [0]
    script.advance_time(9.0)
    assert publications(script) == [0]
    script.advance_time(1.5)
    assert publications(script) == [0, 1]


def test_version_that_training_would_wait_for_is_not_held_back() -> None:
    script = running(sync_every_s=1000.0, max_staleness=3, num_steps=9)
    take_steps(script, 1, 2, 3, 4, 5)
    assert publications(script) == [0, 3]


def test_last_version_is_not_held_back() -> None:
    script = running(sync_every_s=1000.0, max_staleness=3, num_steps=2)
    take_steps(script, 1, 2)
    assert publications(script) == [0, 2]


def test_steps_and_time_must_both_have_passed() -> None:
    script = running(sync_every=2, sync_every_s=10.0, max_staleness=4, num_steps=9)
    script.advance_time(20.0)
    take_steps(script, 1)
    assert publications(script) == [0], "one step"
    take_steps(script, 2)
    assert publications(script) == [0, 2]
    take_steps(script, 3, 4)
    assert publications(script) == [0, 2], "no time has passed"


def test_restarted_controller_holds_nothing_back() -> None:
    script = running(sync_every_s=1000.0, max_staleness=3, num_steps=9)
    take_steps(script, 1)
    script.restart()
    script.joins("policy-0", version=1, incarnation=2)
    script.joins("rollout-0", slots=8, incarnation=2)
    script.joins("reward-0", slots=8, incarnation=2)
    script.advance_time(5.0)
    assert publications(script) == [0, 1]


@pytest.mark.parametrize(("every", "staleness"), [(0, 1), (1, 1), (2, 2), (1, 0)])
def test_time_that_holds_nothing_back_is_refused(every: int, staleness: int) -> None:
    with pytest.raises(ValueError, match=r"sync_every_s = 5 with sync_every = .* holds nothing back"):
        RlSettings(sync_every=every, sync_every_s=5.0, max_staleness=staleness)


@examples(40)
@given(
    st.integers(0, 500),
    st.integers(0, 4),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.3, 2.0, 1e4]),
    st.sampled_from(["calm", "reorder", "crashes", "controller", "everything"]),
)
def test_whenever_versions_are_published_no_run_waits_for_ever(
    seed: int, staleness: int, every: int, every_s: float, mix: str
) -> None:
    """The simulation checks the bound on staleness for every trained token, and the time between publications."""
    scenario = scenario_of(seed, mix)
    plan = replace(
        scenario.plan,
        num_steps=8,
        max_staleness=staleness,
        sync_every=min(every, staleness + 1),
        sync_every_s=every_s,
        colocate=False,
    )
    SimulatedCluster(replace(scenario, plan=plan)).run()

"""Shrinking of failing scenarios, and the tests printed for them."""

from __future__ import annotations

import pytest

from starling.controller.core.groups.buffer import GroupBuffer
from starling.sim.campaign.shrink import as_test, kind_of, shrink, simplifications, violation_of
from starling.sim.errors import Violation
from starling.sim.scenario.faults import CALM, MIXES
from starling.sim.scenario.scenario import Scenario, code_of, scenario_of


def size_of(scenario: Scenario) -> int:
    """Return the size of a scenario."""
    plan, fleet = scenario.plan, scenario.fleet
    return plan.num_steps * plan.prompts_per_step + fleet.num_policies + fleet.num_rollouts + fleet.num_rewards


@pytest.fixture
def one_slot_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    free_slots = GroupBuffer.num_free_slots
    monkeypatch.setattr(GroupBuffer, "num_free_slots", lambda self: free_slots(self) + 1)


@pytest.mark.usefixtures("one_slot_too_many")
def test_shrink_keeps_the_failure() -> None:
    scenario = scenario_of(1, "crashes")
    violation = violation_of(scenario)
    assert violation is not None
    smaller, problem = shrink(scenario, violation)
    assert kind_of(problem) == kind_of(violation)
    assert smaller.faults == CALM, "no fault is needed for this bug"
    assert size_of(smaller) < size_of(scenario)
    assert (smaller.fleet.num_rollouts, smaller.plan.num_steps, smaller.plan.prompts_per_step) == (1, 1, 1)
    assert violation_of(smaller) == problem


@pytest.mark.usefixtures("one_slot_too_many")
def test_as_test_fails_as_the_run_did() -> None:
    scenario = scenario_of(1, "crashes")
    violation = violation_of(scenario)
    assert violation is not None
    names: dict[str, object] = {}
    exec(as_test(scenario, violation, "found"), names)
    with pytest.raises(Violation) as raised:
        names["test_found"]()  # type: ignore[operator]
    assert str(raised.value) == violation


def test_shrink_reaches_the_simplest_scenario() -> None:
    tried = []

    def always(scenario: Scenario) -> str:
        tried.append(scenario)
        return "always"

    simplest, _ = shrink(scenario_of(2, "everything"), "always", always)
    assert simplest.faults == CALM
    assert list(simplifications(simplest)) == []
    assert tried[-1] == simplest


def test_shrink_rejects_other_failures() -> None:
    scenario = scenario_of(2, "loss")
    assert shrink(scenario, "this", lambda simpler: "that") == (scenario, "this")


def test_kind_of_ignores_numbers() -> None:
    assert kind_of("rollout-3 has 2 leases (after 7 events, 1.2 s)") == kind_of("rollout-0 has 31 leases")
    assert kind_of("the run hangs") != kind_of("the run failed")


@pytest.mark.parametrize("mix", MIXES)
def test_code_of_round_trips_a_scenario(mix: str) -> None:
    from starling.common.wire.messages import Sampling
    from starling.controller.core.plan import RunPlan
    from starling.sim.scenario.faults import Faults
    from starling.sim.scenario.scenario import Fleet, Workload

    names = {"Sampling": Sampling, "RunPlan": RunPlan, "Faults": Faults, "Fleet": Fleet, "Workload": Workload}
    for seed in range(5):
        scenario = scenario_of(seed, mix)
        assert eval(code_of(scenario), {**names, "Scenario": Scenario}) == scenario

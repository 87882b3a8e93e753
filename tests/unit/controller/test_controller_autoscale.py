"""The rule by which the number of rollouts follows the work, as tables, and its window; tests/sim has whole runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transcript import Script

from starling.controller.core.events import Note, Write
from starling.controller.core.records import ReplicasScaled
from starling.controller.core.replicas.scaling.autoscale import AutoscaleRule, AutoscaleWindow, RolloutLoad, next_count
from starling.controller.core.replicas.scaling.scaling import autoscale

RULE = AutoscaleRule(min=2, max=10, starving=0.2, idle=0.5, window_s=60.0, cooldown_s=300.0)


@pytest.mark.parametrize(
    ("present", "starving", "idle", "wanted"),
    [
        (4, 0.0, 0.0, 4),
        (4, 0.19, 0.0, 4),  # below the threshold
        (4, 0.2, 0.0, 5),  # 4 / 0.8
        (4, 0.25, 0.0, 6),  # 4 / 0.75 = 5.3
        (4, 0.5, 0.0, 8),
        (4, 1.0, 0.0, 8),  # it at most doubles
        (1, 0.2, 0.0, 2),
        (8, 0.5, 0.0, 10),  # at most `max`
        (10, 1.0, 0.0, 10),
        (12, 1.0, 0.0, 12),  # beyond, as an operator has set it
        (4, 0.3, 0.5, 4),  # neither: rollouts have free slots
        (4, 0.0, 0.49, 4),
        (4, 0.0, 0.5, 3),
        (4, 0.0, 1.0, 3),  # one at a time
        (4, 0.09, 0.9, 3),
        (4, 0.1, 0.9, 4),  # from half of `starving` on nothing changes
        (2, 0.0, 1.0, 2),  # at least `min`
        (1, 0.0, 1.0, 1),  # below, as an operator has set it
        (12, 0.0, 1.0, 11),
    ],
)
def test_next_count(present: int, starving: float, idle: float, wanted: int) -> None:
    assert next_count(RULE, RolloutLoad(present, present, starving, starving, idle)) == wanted


@pytest.mark.parametrize(
    ("present", "desired", "starving", "idle", "wanted"),
    [
        (3, 5, 1.0, 0.0, 5),  # more would be missing, too
        (9, 10, 1.0, 0.0, 10),
        (3, 5, 0.0, 0.4, 5),
        (3, 5, 0.0, 0.5, 3),  # the missing ones are not needed
        (4, 5, 0.0, 0.5, 4),  # one at a time
        (1, 5, 0.0, 1.0, 2),  # at least `min`
    ],
)
def test_next_count_while_rollouts_are_missing(
    present: int, desired: int, starving: float, idle: float, wanted: int
) -> None:
    assert next_count(RULE, RolloutLoad(present, desired, starving, starving, idle, 1 - present / desired)) == wanted


def test_a_steady_load_settles() -> None:
    """Where 6 rollouts suffice, the number ends between 6 and where a half of them would be idle, and stays."""
    present, seen = 2, []
    for _ in range(12):
        starving, idle = max(0.0, 1 - present / 6), max(0.0, 1 - 6 / present)
        present = next_count(RULE, RolloutLoad(present, present, starving, starving, idle))
        seen.append(present)
    assert seen[:3] == [4, 6, 6]
    assert set(seen[3:]) == {6}


def test_policy_that_waits_keeps_its_rollouts() -> None:
    """Where one rollout has slots for all groups, a second one makes them faster, and half of the slots are free."""
    one = RolloutLoad(present=1, desired=1, waiting=0.8, starving=0.8, idle=0.0)
    two = RolloutLoad(present=2, desired=2, waiting=0.6, starving=0.0, idle=0.5)
    rule = AutoscaleRule(min=1, max=10)
    assert next_count(rule, one) == 2
    assert next_count(rule, two) == 2
    assert next_count(rule, replace(two, waiting=0.09)) == 1


def measure(
    window: AutoscaleWindow, begin: int, end: int, *, starving: float, idle: float = 0.0, step_s: int = 10
) -> list[int]:
    """Measure once a second, before `end`, with a step every `step_s`; return when the number changed."""
    load = RolloutLoad(4, 4, starving, starving, idle)
    return [now for now in range(begin, end) if window.measure(now, now // step_s, load) not in (4, None)]


def test_window_and_cooldown() -> None:
    window = AutoscaleWindow(RULE)
    assert measure(window, 5, 1000, starving=1.0) == [70, 440, 810], "60 s with whole steps, then 300 s until the next"


def test_interrupted_window_begins_anew() -> None:
    window = AutoscaleWindow(RULE)
    assert measure(window, 5, 69, starving=1.0) == []
    window.interrupt()
    assert measure(window, 69, 200, starving=1.0) == [130]


def test_rollouts_that_restart_do_not_end_a_window() -> None:
    """In a large run one is always missing. What few rollouts measure while others are restarted lowers no number."""
    window, seen = AutoscaleWindow(AutoscaleRule(min=1, max=80)), set()
    for now in range(5, 140):
        seen.add(window.measure(now, now // 10, RolloutLoad(40 - now % 3, 40, 1.0, 1.0, 0.0)))
    assert seen == {None, 80}
    window, seen = AutoscaleWindow(AutoscaleRule(min=1, max=80)), set()
    for now in range(5, 140):
        seen.add(window.measure(now, now // 10, RolloutLoad(40 if now < 30 else 2, 40, 1.0, 1.0, 0.0)))
    assert seen == {None, 40}
    window, seen = AutoscaleWindow(AutoscaleRule(min=1, max=80)), set()
    for now in range(5, 140):
        seen.add(window.measure(now, now // 10, RolloutLoad(40 if now < 30 else 2, 40, 0.0, 0.0, 0.9)))
    assert seen == {None, 39}


def test_shares_are_of_the_whole_window() -> None:
    window = AutoscaleWindow(RULE)
    assert measure(window, 5, 60, starving=0.0) == []
    assert measure(window, 60, 100, starving=1.0) == [], "11 of 60 s"
    assert measure(window, 100, 140, starving=1.0) == [130]


def test_window_has_whole_steps() -> None:
    """A policy waits before each step, and rollouts are idle while it trains: each for half of a long step."""
    window, changed = AutoscaleWindow(RULE), []
    for now in range(3000):
        trains = now % 200 < 100
        load = RolloutLoad(4, 4, waiting=not trains, starving=not trains, idle=float(trains))
        changed.append(window.measure(now, now // 200, load) or 4)
    assert set(changed) == {4}, "it waits for half of the time, and half of the slots are free"


def test_restart_of_the_controller_begins_a_cooldown() -> None:
    """The last change may have been a moment before the controller died."""
    script = Script(autoscale=RULE)
    script.start_run()
    script.now = 50.0
    script.restart()
    script.joins("policy-0")
    window = script.state.replicas.autoscale
    assert window is not None
    assert window.not_before == 350.0


@pytest.mark.parametrize(
    ("trains", "wanted"),
    [
        (False, []),  # the policy waits: no change, no record
        (True, [3]),  # it trains, and all slots are free: the missing rollout is not needed
    ],
)
def test_missing_rollout_of_a_run_that_nobody_scaled(trains: bool, wanted: list[int]) -> None:
    """4 are planned, 3 are present."""
    script = Script(num_rollouts=4, autoscale=RULE)
    script.start_run("rollout-0", "rollout-1", "rollout-2", "rollout-3")
    script.leaves("rollout-3")
    if trains:
        script.complete_groups("generate:t0:0", "generate:t1:0")
        script.fetched(1)
        assert script.state.training.step is not None
    state = script.state
    assert (len(state.replicas.membership.of("rollout")), state.replicas.desired.counts) == (3, {})
    assert state.replicas.autoscale is not None
    state.outbox.clear(state.now)
    for state.version in range(5):  # steps of 30 s
        state.now += 30.0
        autoscale(state)
    written = [one.record for one in state.outbox.commands() if isinstance(one, Write)]
    assert written == [ReplicasScaled(role="rollout", num=num) for num in wanted]
    noted = [one.fields["num"] for one in state.outbox.commands() if isinstance(one, Note) and one.kind == "scaled"]
    assert noted == wanted


def test_rule_that_is_off_costs_nothing() -> None:
    script = Script()
    script.start_run()
    assert script.state.replicas.autoscale is None
    assert script.state.replicas.desired.is_unset

"""Restarts: bounded within the window, with a growing backoff that ends with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starling.cli.run.restarts import FIRST_DELAY_S, MAX_DELAY_S, Restarts


def test_backoff_doubles_within_the_window_until_the_bound() -> None:
    restarts = Restarts(3, window_s=60.0)
    assert [restarts.delay_s("rollout-0", now) for now in (0.0, 1.0, 5.0, 20.0)] == [0.5, 1.0, 2.0, None]
    assert restarts.count("rollout-0") == 3


def test_death_outside_the_window_is_forgotten() -> None:
    restarts = Restarts(1, window_s=60.0)
    assert restarts.delay_s("policy-0", 0.0) == FIRST_DELAY_S
    assert restarts.delay_s("policy-0", 59.9) is None
    assert restarts.delay_s("policy-0", 60.0) == FIRST_DELAY_S


def test_processes_are_counted_separately() -> None:
    restarts = Restarts(1, window_s=60.0)
    assert restarts.delay_s("rollout-0", 0.0) == restarts.delay_s("rollout-1", 0.0) == FIRST_DELAY_S
    assert Restarts(0, window_s=60.0).delay_s("rollout-0", 0.0) is None


@given(
    most=st.integers(0, 2000),
    window_s=st.floats(0.1, 1e6),
    pauses=st.lists(st.floats(0.0, 1e4), max_size=60),
)
def test_no_window_has_more_restarts_than_allowed(most: int, window_s: float, pauses: list[float]) -> None:
    restarts, now, granted = Restarts(most, window_s), 0.0, []
    for pause in pauses:
        now += pause
        delay_s = restarts.delay_s("reward-0", now)
        if delay_s is None:
            assert len([death for death in granted if now - death < window_s]) == most
            continue
        assert FIRST_DELAY_S <= delay_s <= MAX_DELAY_S
        granted.append(now)
        assert len([death for death in granted if now - death < window_s]) <= most

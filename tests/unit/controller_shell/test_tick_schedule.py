"""Ticks follow the messages that have arrived, but are postponed for a bounded time only."""

from __future__ import annotations

from starling.controller.shell.ticks import MAX_BACKLOG_S, TICK_S, TickSchedule


def test_tick_schedule_ticks_at_its_interval() -> None:
    ticks = TickSchedule(10.0)
    assert ticks.left_s(10.0) == 0.0
    assert ticks.is_due(10.0, has_more=False)
    assert not ticks.is_due(10.0, has_more=False)
    assert ticks.left_s(10.0) == TICK_S
    assert ticks.is_due(10.0 + TICK_S, has_more=False)


def test_tick_schedule_waits_for_the_backlog() -> None:
    ticks = TickSchedule(0.0)
    assert ticks.is_due(0.0, has_more=False)
    assert not ticks.is_due(60.0, has_more=True)
    assert not ticks.is_due(60.1, has_more=True)
    assert ticks.is_due(60.2, has_more=False)


def test_tick_schedule_bounds_the_wait_for_the_backlog() -> None:
    ticks = TickSchedule(0.0)
    ticked = [now for now in range(100) if ticks.is_due(float(now), has_more=True)]
    assert ticked == list(range(int(MAX_BACKLOG_S), 100))

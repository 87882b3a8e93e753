"""Time passes for the controller when it has heard what came, and also when it never has."""

from __future__ import annotations

from starling.controller.shell.ticks import MAX_BACKLOG_S, TICK_S, TickSchedule


def test_time_passes_in_steps() -> None:
    ticks = TickSchedule(10.0)
    assert ticks.left_s(10.0) == 0.0
    assert ticks.is_due(10.0, has_more=False)
    assert not ticks.is_due(10.0, has_more=False)
    assert ticks.left_s(10.0) == TICK_S
    assert ticks.is_due(10.0 + TICK_S, has_more=False)


def test_what_came_while_the_process_stood_still_is_heard_first() -> None:
    ticks = TickSchedule(0.0)
    assert ticks.is_due(0.0, has_more=False)
    assert not ticks.is_due(60.0, has_more=True)
    assert not ticks.is_due(60.1, has_more=True)
    assert ticks.is_due(60.2, has_more=False)


def test_a_flood_does_not_stop_the_time() -> None:
    ticks = TickSchedule(0.0)
    ticked = [now for now in range(100) if ticks.is_due(float(now), has_more=True)]
    assert ticked == list(range(int(MAX_BACKLOG_S), 100))

"""Time limits that pause while the engine cannot generate."""

from __future__ import annotations

import asyncio

import pytest

from starling.rollout.env.timeouts import PausableClock, PausableTimeouts


def test_pausable_clock() -> None:
    clock = PausableClock()
    assert clock.at(10.0) == 10.0
    assert clock.set_paused(True, 12.0)
    assert not clock.set_paused(True, 13.0), "the clock is already paused"
    assert clock.at(20.0) == 12.0
    assert clock.set_paused(False, 20.0)
    assert not clock.set_paused(False, 21.0)
    assert clock.at(25.0) == 17.0
    clock.set_paused(True, 25.0)
    clock.set_paused(False, 26.0)
    assert clock.at(30.0) == 21.0


def test_paused_timeout_does_not_expire() -> None:
    async def play() -> None:
        limits = PausableTimeouts(paused=True)
        async with limits.within(0.05) as limit:
            await asyncio.sleep(0.2)
            assert limit.when() is None
        async with limits.within(60.0) as limit:
            limits.set_paused(False)
            begun = limit.when()
            assert begun is not None
            limits.set_paused(True)
            limits.set_paused(True)
            assert limit.when() is None
            limits.set_paused(False)
            when = limit.when()
            assert when is not None
            assert when >= begun, "the remaining time is unchanged by the pause"
        async with limits.within(0.05):
            limits.set_paused(True)
            limits.set_paused(False)
            await asyncio.sleep(60.0)

    with pytest.raises(TimeoutError):
        asyncio.run(play())


def test_expired_timeout_stays_expired() -> None:
    async def play() -> None:
        limits = PausableTimeouts()
        async with limits.within(0.01) as limit:
            try:
                await asyncio.sleep(60.0)
            finally:
                assert limit.expired()
                limits.set_paused(True)
                limits.set_paused(False)

    with pytest.raises(TimeoutError):
        asyncio.run(play())

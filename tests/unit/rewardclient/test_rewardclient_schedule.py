"""When requests are sent again, and how long a try may take: exact tables."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.rewardclient.schedule import Polling, Retries, RetryState, Timeouts, Verdict, judge, retry_after_s

ENQUEUE, PULL = frozenset({200, 202}), frozenset({200, 400})
NOW_S = 1_800_000_000.0
RETRIES = Retries(max_retries=3, first_s=1.0, max_s=4.0)


@pytest.mark.parametrize(
    ("status", "delay_s", "accepted", "verdict"),
    [
        (200, None, ENQUEUE, Verdict.ACCEPTED),
        (202, None, ENQUEUE, Verdict.ACCEPTED),
        (400, None, PULL, Verdict.ACCEPTED),
        (400, None, ENQUEUE, Verdict.FINAL),
        (401, None, PULL, Verdict.FINAL),
        (404, 3.0, PULL, Verdict.FINAL),
        (408, None, ENQUEUE, Verdict.FINAL),
        (422, None, PULL, Verdict.FINAL),
        (429, None, ENQUEUE, Verdict.FINAL),
        (429, 0.0, ENQUEUE, Verdict.BUSY),
        (500, None, ENQUEUE, Verdict.RETRY),
        (503, 7.0, PULL, Verdict.RETRY),
        (302, None, ENQUEUE, Verdict.FINAL),
    ],
)
def test_judge_separates_retries_from_refusals(
    status: int, delay_s: float | None, accepted: frozenset[int], verdict: Verdict
) -> None:
    assert judge(status, retry_after_s=delay_s, accepted=accepted) is verdict


@pytest.mark.parametrize(
    ("value", "delay_s"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("1.5", None),
        ("²", None),
        ("0", 0.0),
        (" 12 ", 12.0),
        ("9" * 400, 86_400.0),
        (formatdate(NOW_S + 30.0, usegmt=True), 30.0),
        (formatdate(NOW_S - 30.0, usegmt=True), 0.0),
        (formatdate(NOW_S + 1e7, usegmt=True), 86_400.0),
        ("Wed, 99 Xyz 9999 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(value: str | None, delay_s: float | None) -> None:
    assert retry_after_s(value, NOW_S) == delay_s


@pytest.mark.parametrize(
    ("events", "delays"),
    [
        ([(Verdict.RETRY, None, 1.0)] * 4, [1.0, 2.0, 4.0, None]),
        ([(Verdict.RETRY, None, 0.0)] * 4, [0.5, 1.0, 2.0, None]),
        ([(Verdict.RETRY, 10.0, 1.0), (Verdict.RETRY, None, 0.5)], [11.0, 1.5]),
        ([(Verdict.BUSY, 5.0, 1.0)] * 6, [6.0, 7.0, 9.0, 9.0, 9.0, 9.0]),
        ([(Verdict.BUSY, 0.0, 0.0), (Verdict.RETRY, None, 0.0)] * 4, [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, None]),
    ],
    ids=["grows", "jitter", "retry-after", "busy-without-limit", "busy-does-not-count"],
)
def test_delays_grow_are_jittered_and_end(
    events: list[tuple[Verdict, float | None, float]], delays: list[float | None]
) -> None:
    state = RetryState(RETRIES)
    assert [state.delay_s(*event) for event in events] == delays


@given(num=st.integers(0, 10_000), uniform=st.floats(0.0, 1.0))
def test_delay_has_bounds(num: int, uniform: float) -> None:
    delay_s = RETRIES.backoff_s(num, uniform)
    assert RETRIES.first_s / 2 <= delay_s <= RETRIES.max_s
    pause_s = Polling().pause_s(num, uniform)
    assert Polling().first_s * 0.75 <= pause_s <= Polling().max_s


@pytest.mark.parametrize(
    ("timeouts", "mb", "limit_s"),
    [
        (Timeouts(), 0.0, 60.0),
        (Timeouts(), 10.0, 60.0),
        (Timeouts(), 20.0, 90.0),
        (Timeouts(), 500.0, 600.0),
        (Timeouts(base_s=1.0, per_mb_s=2.0, min_s=2.0, max_s=9.0), 0.0, 2.0),
        (Timeouts(base_s=1.0, per_mb_s=2.0, min_s=2.0, max_s=9.0), 2.5, 6.0),
        (Timeouts(base_s=1.0, per_mb_s=2.0, min_s=2.0, max_s=9.0), 4.1, 9.0),
        (Timeouts(fixed_s=7.0), 500.0, 7.0),
    ],
)
def test_time_limit_of_samples_follows_their_size(timeouts: Timeouts, mb: float, limit_s: float) -> None:
    assert timeouts.enqueue_s(int(mb * (1 << 20))) == pytest.approx(limit_s, rel=1e-6)


@pytest.mark.parametrize(
    ("num_waiting", "left_s", "wait_s"),
    [(1, 100.0, 30.0), (8, 100.0, 30.0), (16, 100.0, 15.0), (800, 100.0, 0.3), (1, 10.0, 9.75), (1, 0.1, 0.0)],
)
def test_service_waits_less_where_many_results_are_asked_for(num_waiting: int, left_s: float, wait_s: float) -> None:
    assert Polling().long_poll_s(num_waiting, 8, left_s) == pytest.approx(wait_s)


def test_pauses_grow_up_to_a_limit() -> None:
    polling = Polling(first_s=1.0, growth=2.0, max_s=3.0)
    assert [polling.pause_s(num, 1.0) for num in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert polling.pause_s(0, 0.0) == 0.75


@pytest.mark.parametrize(
    ("cls", "fields", "problem"),
    [
        (Retries, {"max_retries": -1}, "max_retries is -1; give a number from 0 to 1000"),
        (Retries, {"first_s": 0.0}, r"first_s is 0.0; give seconds from 0.001 to 1e\+06"),
        (Retries, {"max_s": math.nan}, "max_s is nan"),
        (Timeouts, {"connect_s": "10"}, "connect_s is '10'"),
        (Timeouts, {"fixed_s": math.inf}, "fixed_s is inf"),
        (Timeouts, {"min_s": 9.0, "max_s": 8.0}, "min_s 9 is above max_s 8; swap them"),
        (Polling, {"wait_s": 61.0}, "wait_s is 61.0; give seconds from 0 to 60"),
        (Polling, {"growth": 0.5}, "growth is 0.5; give a factor from 1 to 100"),
    ],
)
def test_values_that_cannot_be_used_are_refused(cls: type, fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        cls(**fields)

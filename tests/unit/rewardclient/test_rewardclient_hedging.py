"""When a second request is sent, and to which replica."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.rewardclient.hedging import MAX_TOKENS, HedgeState, Hedging, Rotation


def test_delay_is_a_quantile_of_recent_times() -> None:
    state = HedgeState(Hedging(quantile=0.9, min_observed=10, window=10, min_delay_s=0.5))
    for time_s in range(1, 10):
        assert state.start() is None, "too few times are known"
        state.observe(float(time_s))
    state.observe(10.0)
    assert state.start() == 9.0
    for _ in range(10):  # the former ones are forgotten
        state.observe(0.1)
    assert state.start() == 0.5


def test_second_requests_are_bounded_by_their_share() -> None:
    state = HedgeState(Hedging(max_share=0.25, min_observed=1))
    state.observe(1.0)
    sent = 0
    for _ in range(400):
        state.start()
        sent += state.take()
    assert sent == 101, "one at first, then a quarter"


def test_unused_second_requests_are_saved_up_to_a_limit() -> None:
    state = HedgeState(Hedging(max_share=1.0))
    for _ in range(1000):
        state.start()
    assert sum(state.take() for _ in range(100)) == MAX_TOKENS


def test_without_hedging_there_is_no_second_request() -> None:
    state = HedgeState(None)
    for _ in range(100):
        state.observe(1.0)
        assert state.start() is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"quantile": 1.0}, "quantile is 1; give a number between 0 and 1"),
        ({"min_observed": 0}, "min_observed is 0"),
        ({"window": 10}, "min_observed is 20 and window 10"),
        ({"max_share": 0.0}, "max_share is 0"),
        ({"min_delay_s": -1.0}, "min_delay_s is -1.0"),
    ],
)
def test_values_that_cannot_be_used_are_refused(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Hedging(**fields)  # type: ignore[arg-type]


def test_replicas_get_requests_in_turn_except_those_that_failed() -> None:
    rotation = Rotation(3, cooldown_s=10.0)
    assert [rotation.choose(0.0) for _ in range(4)] == [0, 1, 2, 0]
    rotation.report(1, 0.0, has_failed=True)
    assert [rotation.choose(1.0) for _ in range(3)] == [2, 0, 2]
    assert rotation.choose(1.0, avoid=0) == 2
    assert [rotation.choose(10.0) for _ in range(2)] == [0, 1], "it is tried again after its cooldown"
    rotation.report(1, 10.0, has_failed=False)
    rotation.report(2, 10.0, has_failed=True)
    rotation.report(0, 11.0, has_failed=True)
    assert rotation.choose(12.0, avoid=1) == 2, "of those that failed, the one that failed first"


@given(num=st.integers(1, 5), avoid=st.integers(0, 4), failed=st.sets(st.integers(0, 4)))
def test_a_replica_is_always_chosen_and_avoided_if_there_is_another(num: int, avoid: int, failed: set[int]) -> None:
    rotation = Rotation(num)
    for index in failed:
        if index < num:
            rotation.report(index, 0.0, has_failed=True)
    chosen = rotation.choose(1.0, avoid=avoid)
    assert 0 <= chosen < num
    assert chosen != avoid or num == 1

"""The simulated device of `bench/async.py`, and the simulated duration of a run without software overhead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from asynchronous_device import Device, Profile, Row
from asynchronous_ideal import Work, seconds_per_step, step_ends
from hypothesis import given
from hypothesis import strategies as st

PROFILE = Profile(step_s=0.25, fixed_share=0.5, max_rows=4, median_length=20.0, sigma=0.7)
WORK = Work(
    PROFILE,
    train_s=3.0,
    num_steps=6,
    num_rollouts=2,
    num_slots=3,
    prompts_per_step=2,
    group_size=2,
    max_tokens=60,
    seed=3,
)
lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def rows(values: list[int]) -> list[Row]:
    return [Row(str(number), 0, value) for number, value in enumerate(values)]


def run_to_the_end(device: Device) -> list[tuple[str, float]]:
    """Advance until all rows have ended; return the rows with their end times."""
    found = []
    while (now := device.next_end()) < math.inf:
        found += [(row.lease, now) for row in device.advance(now)]
    return found


@given(lengths)
def test_every_token_is_sampled_once(values: list[int]) -> None:
    device = Device(PROFILE)
    device.add(rows(values), 7.0)
    assert len(device.running) == min(len(values), PROFILE.max_rows)
    ends = run_to_the_end(device)
    assert sorted(lease for lease, _ in ends) == sorted(str(number) for number in range(len(values)))
    assert device.num_tokens == sum(values)
    steps = max(values) if len(values) <= PROFILE.max_rows else math.ceil(sum(values) / PROFILE.max_rows)
    fastest = steps * PROFILE.decode_s(1) if len(values) <= PROFILE.max_rows else steps * PROFILE.decode_s(0)
    assert ends[-1][1] - 7.0 >= fastest


@given(lengths, st.lists(st.floats(0.0, 60.0), max_size=20))
def test_results_are_independent_of_the_times_of_advance(values: list[int], looks: list[float]) -> None:
    once, often = Device(PROFILE), Device(PROFILE)
    for device in (once, often):
        device.add(rows(values), 0.0)
    seen = [row.lease for now in sorted(looks) for row in often.advance(now)]
    seen += [row.lease for row in often.advance(1000.0)]
    assert seen == [row.lease for row in once.advance(1000.0)]
    assert often.num_tokens == once.num_tokens


def test_decode_step_of_few_rows_costs_nearly_as_much() -> None:
    device = Device(PROFILE)
    device.add(rows([10, 10, 10, 40]), 0.0)
    *_, (_, early), (_, last) = run_to_the_end(device)
    assert early == pytest.approx(10 * 0.25)
    assert last == pytest.approx(10 * 0.25 + 30 * 0.25 * (0.5 + 0.5 / 4))


def test_tokens_have_the_version_in_use_when_sampled() -> None:
    device = Device(PROFILE)
    device.adopt(3)
    device.add(rows([10, 12, 5, 5, 6]), 0.0)
    device.advance(4 * 0.25)
    device.adopt(4)
    by_lease = {row.lease: row for row in device.advance(100.0)}
    assert by_lease["0"].versions == [(3, 0), (4, 4)]
    assert by_lease["4"].versions == [(4, 0)], "the row started later"


def test_synchronous_step_is_generation_followed_by_training() -> None:
    ends = step_ends(WORK, 0)
    assert len(ends) == WORK.num_steps
    assert ends[-1] == pytest.approx(WORK.num_steps * (WORK.batch_s + WORK.train_s))


@pytest.mark.parametrize("train_s", [0.5, 3.0, 30.0])
def test_step_takes_at_least_the_longer_of_generation_and_training(train_s: float) -> None:
    work = replace(WORK, train_s=train_s, num_steps=30)
    bound = max(work.full_s, train_s)
    found = [seconds_per_step(step_ends(work, staleness), 8, 22) for staleness in (0, 1, 8)]
    assert found[0] == pytest.approx(work.batch_s + train_s, rel=0.25)
    assert all(value >= 0.8 * bound for value in found), "up to the variance of the lengths in the measured steps"
    if train_s == 30.0:
        assert found[1] == pytest.approx(train_s), "staleness 1 hides most of the generation"

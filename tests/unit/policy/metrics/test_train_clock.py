"""Clock of the training thread: phases and nested phases."""

import math

import pytest

from starling.policy.core.phases import PHASES
from starling.policy.train.metrics.clock import MOST_MARKS, StepClock


def test_clock_phases_cover_the_step() -> None:
    """The shares sum to 1; only entered phases have time."""
    clock = StepClock("cpu")
    clock.enter("forward")
    with clock.within("publish_exposed"):
        sum(range(10_000))
    metrics = clock.take()
    assert math.isclose(math.fsum(metrics[f"time/{phase}_share"] for phase in PHASES), 1.0, rel_tol=1e-12)
    assert metrics["time/publish_exposed_s"] > 0.0
    assert metrics["time/forward_s"] > 0.0
    assert metrics["time/checkpoint_s"] == 0.0


def test_clock_exception_ends_its_phase() -> None:
    """After a failed publication the rest of the step must not count as publication."""
    clock = StepClock()
    clock.enter("optimizer")
    with pytest.raises(KeyError), clock.within("publish_exposed"):
        {}["no such version"]
    clock.take()
    assert clock.take()["time/optimizer_share"] == 1.0


def test_clock_phase_continues_into_next_step() -> None:
    """`take` ends the step and not the phase; entering the phase again changes nothing."""
    clock = StepClock()
    clock.enter("wait_data")
    clock.take()
    clock.enter("wait_data")
    metrics = clock.take()
    assert metrics["time/wait_data_share"] == 1.0


def test_clock_long_wait_is_summed_in_mid_step() -> None:
    """A step that enters phases for hours keeps few boundaries, and loses no time."""
    clock = StepClock()
    for _ in range(3 * MOST_MARKS):
        clock.enter("wait_data")
        clock.enter("checkpoint")
    metrics = clock.take()
    assert metrics["time/wait_data_s"] > 0.0
    assert math.isclose(math.fsum(metrics[f"time/{phase}_share"] for phase in PHASES), 1.0, rel_tol=1e-12)

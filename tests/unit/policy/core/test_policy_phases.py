"""Wall-clock time by phase: the shares sum to 1 for any order of events."""

import math

from hypothesis import given
from hypothesis import strategies as st

from starling.policy.core.phases import PHASES, PhaseTimes

MOMENTS = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)
EVENTS = st.lists(st.tuples(st.sampled_from(PHASES), MOMENTS), max_size=30)


def shares(metrics: dict[str, float]) -> list[float]:
    """Return the share of each phase."""
    return [metrics[f"time/{phase}_share"] for phase in PHASES]


@given(begin=MOMENTS, events=EVENTS, end=MOMENTS)
def test_phase_times_shares_sum_to_1(begin: float, events: list[tuple[str, float]], end: float) -> None:
    """Also if the clock goes backwards, and if no time passes."""
    split = PhaseTimes(begin)
    for phase, now in events:
        split.enter(phase, now)  # type: ignore[arg-type]
    metrics = split.take(end)
    latest = max([begin, end, *(now for _, now in events)])
    assert math.isclose(math.fsum(shares(metrics)), 1.0, rel_tol=1e-12)
    assert min(shares(metrics)) >= 0.0
    assert math.isclose(metrics["time/step_s"], latest - begin, rel_tol=1e-9, abs_tol=1e-6)


def test_phase_times_count_the_phase_entered_last() -> None:
    """`enter` returns the phase that it ended, so a nested phase can return to it."""
    split = PhaseTimes(10.0)
    assert split.enter("wait_data", 10.5) == "other"
    assert split.enter("forward", 12.5) == "wait_data"
    assert split.enter("backward", 13.5) == "forward"
    split.enter("forward", 17.5)
    metrics = split.take(18.5)
    seconds = {phase: metrics[f"time/{phase}_s"] for phase in PHASES if metrics[f"time/{phase}_s"]}
    assert seconds == {"other": 0.5, "wait_data": 2.0, "forward": 2.0, "backward": 4.0}
    assert metrics["time/step_s"] == 8.5
    assert metrics["time/wait_data_share"] == 2.0 / 8.5


def test_phase_times_step_starts_at_end_of_previous() -> None:
    """No time between two steps is lost or counted twice."""
    split = PhaseTimes(0.0)
    split.enter("optimizer", 1.0)
    split.take(3.0)
    metrics = split.take(4.0)
    assert (metrics["time/step_s"], metrics["time/optimizer_s"], metrics["time/other_s"]) == (1.0, 1.0, 0.0)


def test_phase_times_hidden_time_is_separate() -> None:
    """A hidden publication is not part of the step's time, and belongs to one step only."""
    split = PhaseTimes(0.0)
    split.hide(5.0)
    split.hide(0.5)
    first, second = split.take(2.0), split.take(3.0)
    assert (first["time/publish_hidden_s"], first["time/step_s"]) == (5.5, 2.0)
    assert second["time/publish_hidden_s"] == 0.0
    assert math.fsum(shares(first)) == 1.0

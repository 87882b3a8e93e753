"""What a rollout tells of a pull."""

from __future__ import annotations

from starling.common.wire.messages import LeaseProgress
from starling.rollout.shell.answer import progress_of
from starling.weightsync.execute.transfer import Progress


def test_a_time_left_that_nobody_knows_is_not_told() -> None:
    told = progress_of(Progress(bytes_done=0, bytes_total=7, seconds_left=float("inf")))
    assert told == LeaseProgress(bytes_done=0, bytes_total=7)


def test_progress_is_told_as_it_is() -> None:
    told = progress_of(Progress(bytes_done=3, bytes_total=7, seconds_left=1.5))
    assert told == LeaseProgress(bytes_done=3, bytes_total=7, seconds_left=1.5)

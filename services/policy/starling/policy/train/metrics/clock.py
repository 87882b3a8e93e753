"""The clock of the training thread: phases are entered on the host and timed where they happen.

On a CPU a phase begins when it is entered. On a GPU the host runs ahead of the device, and a synchronisation at each
border would slow the step down that it measures. There each border is a CUDA event instead, which stands for the
moment at which the device gets there; the events are read at the end of the step, when the device has been waited for
in any case, to read the metrics. Both ways every moment belongs to one phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from starling.policy.core.phases import Phase, PhaseTimes

MOST_MARKS: Final = 1024
"""Who waits for hours enters phases all the while: by so many borders they are added up in mid-step."""


class StepClock:
    """Tells where the time of each step went. Phases belong to one thread; `hide` may be called by any."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Begin now, in the phase `other`. `device`: where the steps are computed."""
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._marks: list[tuple[Phase, torch.cuda.Event | float]] = []
        self._phase: Phase = "other"
        self._begin()
        self._split = PhaseTimes(self._begun)

    def enter(self, phase: Phase) -> None:
        """From now on time belongs to `phase`."""
        if phase != self._phase:
            self._phase = phase
            self._marks.append((phase, self._mark()))
            if len(self._marks) == MOST_MARKS:
                self._settle(self._mark())

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Count what happens inside as `phase`, and then go on as before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def hide(self, seconds: float) -> None:
        """Note `seconds` of a publication that training did not wait for."""
        with self._lock:
            self._split.hide(seconds)

    def take(self) -> dict[str, float]:
        """End the step and begin the next one. Returns what `PhaseTimes.take` says; waits for the device."""
        end = self._mark()
        ended = self._settle(end)
        with self._lock:
            return self._split.take(ended)

    def _settle(self, end: torch.cuda.Event | float) -> float:
        """Add up what was marked, and time the next marks afresh. Returns when the device passed `end`, the last."""
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        with self._lock:
            for phase, mark in self._marks:
                self._split.enter(phase, self._time(mark))
        ended = self._time(end)
        self._marks.clear()
        self._begin()
        return ended

    def _begin(self) -> None:
        """Lay down what marks are timed against from now on: an event, and the host's time of it."""
        self._origin = self._mark()
        if isinstance(self._origin, torch.cuda.Event):
            self._origin.synchronize()
        self._begun = time.perf_counter()

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _time(self, mark: torch.cuda.Event | float) -> float:
        """Return when the device passed `mark`, on the host's clock."""
        if isinstance(mark, float):
            return mark
        assert isinstance(self._origin, torch.cuda.Event)
        since_ms: float = self._origin.elapsed_time(mark)
        return self._begun + since_ms / 1e3

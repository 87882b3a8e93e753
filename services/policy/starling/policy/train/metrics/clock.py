"""Clock of the training thread: phases are entered on the host and timed on the device.

On a CPU a phase begins when it is entered. On a GPU the host runs ahead of the device, and a synchronisation at each
boundary would slow down the step that it measures. There each boundary is a CUDA event; the events are read at the end
of the step, which waits for the device anyway to read the metrics. In both cases every moment belongs to one phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from starling.policy.core.phases import Phase, PhaseTimes

MOST_MARKS: Final = 1024
"""Number of phase boundaries at which they are summed in mid-step: a wait of hours enters phases all the time."""


class StepClock:
    """Measures the time of each step by phase. Phases belong to one thread; `hide` may be called by any thread."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start now, in the phase `other`. `device`: of the steps."""
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._marks: list[tuple[Phase, torch.cuda.Event | float]] = []
        self._phase: Phase = "other"
        self.on_phase: Callable[[], None] = lambda: None
        """Called in the training thread whenever a phase is entered, the present one included."""
        self.watch: Callable[[Phase], None] | None = None
        """Called with each new phase, while the process is profiled."""
        self._begin()
        self._times = PhaseTimes(self._begun)

    def enter(self, phase: Phase) -> None:
        """Start `phase`."""
        self.on_phase()
        if phase != self._phase:
            self._phase = phase
            self._marks.append((phase, self._mark()))
            if self.watch is not None:
                self.watch(phase)
            if len(self._marks) == MOST_MARKS:
                self._settle(self._mark())

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the duration of the context, then return to the phase before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def hide(self, seconds: float) -> None:
        """Add `seconds` of a publication that overlapped with training."""
        with self._lock:
            self._times.hide(seconds)

    def take(self) -> dict[str, float]:
        """End the step and start the next one. Returns the metrics of `PhaseTimes.take`; waits for the device."""
        end = self._mark()
        ended = self._settle(end)
        with self._lock:
            return self._times.take(ended)

    def _settle(self, end: torch.cuda.Event | float) -> float:
        """Sum the marked phases and start a new origin. Returns the time at which the device passed `end`, the last."""
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        with self._lock:
            for phase, mark in self._marks:
                self._times.enter(phase, self._time(mark))
        ended = self._time(end)
        self._marks.clear()
        self._begin()
        return ended

    def _begin(self) -> None:
        """Set the origin of the next marks: an event, and its time on the host's clock."""
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
        """Return the time at which the device passed `mark`, on the host's clock."""
        if isinstance(mark, float):
            return mark
        assert isinstance(self._origin, torch.cuda.Event)
        since_ms: float = self._origin.elapsed_time(mark)
        return self._begun + since_ms / 1e3

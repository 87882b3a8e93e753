"""State of a service as its HTTP endpoint shows it: immutable views that the working loop replaces.

The working thread writes, the thread of the endpoint reads. Each attribute is replaced as a whole, so that no lock is
needed, and the endpoint never touches the state of the loop.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starling.common.observe.metrics import Samples

LAST_SCRAPE_S: Final = 20.0
"""How long a service that ends waits for the last reading of its metrics; Prometheus comes every 15 s."""
REGULAR_S: Final = 120.0
"""Metrics that were read within so many seconds are read regularly."""
SAMPLE_INTERVAL_S: Final = 1.0
"""Shortest time between two looks at the metrics of the working loop."""


@dataclass(frozen=True, slots=True)
class LoopView:
    """The working loop at its last turn."""

    turned_at: float
    """Monotonic seconds."""
    limit_s: float
    """The next turn is due within so many seconds; infinite while the service loads, for which there is no limit."""
    is_ready: bool
    is_stopping: bool = False

    def is_alive(self, now: float) -> bool:
        """Whether the next turn is not overdue."""
        return now - self.turned_at <= self.limit_s


class StatusPage:
    """What an endpoint shows of a service. All methods but `note_scrape` belong to the working thread.

    Args:
        stalled_s: a loop that has not turned for so long has stalled.
    """

    def __init__(self, stalled_s: float) -> None:
        self._stalled_s = stalled_s
        self._sampled_at = -math.inf
        self.view = LoopView(time.monotonic(), math.inf, is_ready=False)
        self.samples: Samples = {}
        self._scraped_at, self._scraped = -math.inf, threading.Event()

    def turn(self, serves: bool | None, samples: Callable[[], Samples] | None) -> None:
        """Note a turn of the loop; `serves` is None where it is as before."""
        now, before = time.monotonic(), self.view
        if not before.is_stopping:
            is_ready = before.is_ready if serves is None else serves
            self.view = LoopView(now, self._stalled_s, is_ready)
        if samples is not None and now - self._sampled_at >= SAMPLE_INTERVAL_S:
            self.samples, self._sampled_at = samples(), now

    def wait(self, limit_s: float) -> None:
        """Note that the loop stands still for something that takes up to `limit_s`."""
        before = self.view
        self.view = LoopView(time.monotonic(), limit_s + self._stalled_s, before.is_ready, before.is_stopping)

    def stop(self, limit_s: float) -> None:
        """Note that the service ends, which takes up to `limit_s`."""
        self.view = LoopView(time.monotonic(), limit_s + self._stalled_s, is_ready=False, is_stopping=True)

    def finish(self, samples: Samples) -> None:
        """Show the last metrics, and wait until they have been read, if they are read regularly."""
        self._scraped.clear()
        self.samples = samples
        if time.monotonic() - self._scraped_at < REGULAR_S:
            self._scraped.wait(LAST_SCRAPE_S)

    def note_scrape(self) -> None:
        """Note, in the thread of the endpoint, that the metrics were read."""
        self._scraped_at = time.monotonic()
        self._scraped.set()

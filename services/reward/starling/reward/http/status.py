"""State of the scoring thread, as it reports it to the HTTP front end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starling.common.observe.metrics import Samples
from starling.reward.core.media import Input

ALIVE_S: Final = 10.0
"""A thread that has not reported for so long is stuck; it reports at least twice a second."""


@dataclass(frozen=True)
class ServiceStatus:
    """State of the scoring thread at one time."""

    said_at: float = 0.0
    """Monotonic seconds."""
    scorers: tuple[dict[str, Any], ...] = ()
    inputs: tuple[Input | None, ...] = ()
    """What each scorer reads; None before a worker has loaded it."""
    is_ready: bool = False
    """Whether each scorer that is not quarantined is loaded in a worker."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Why no worker of them can be started, by the labels of the scorers whose scores fail for it."""
    gauges: Mapping[str, float] = field(default_factory=dict)
    """As in the heartbeats of a replica."""
    answered: Mapping[str, int] = field(default_factory=dict)
    """Samples that were answered, by their status."""
    samples: Samples = field(default_factory=dict)
    """Of the metrics that are measured."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread has reported within `ALIVE_S`."""
        return time.monotonic() - self.said_at < ALIVE_S

    @property
    def why_not_ready(self) -> str:
        """Why requests would not be scored; empty if they would."""
        if not self.is_alive:
            return "stuck"
        return "" if self.is_ready else "not every scorer is loaded yet"

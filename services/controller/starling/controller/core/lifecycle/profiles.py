"""The profile of the run that an operator asked for last: which processes take it, and what they report of it.

It is no part of what the journal holds: a process ends its profile by itself, and says in each heartbeat how far its
newest one is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from starling.common.wire.messages import ProfileReport, RequestProfile

WRITE_S: Final = 120.0
"""How long processes may take to write their files after the time limit of the profile."""


@dataclass
class RunProfile:
    """One profile of some processes of the run."""

    request: RequestProfile
    deadline: float
    """When processes that have not reported are given up."""
    reports: dict[str, ProfileReport] = field(default_factory=dict)
    """The newest report of each process."""
    sent_at: dict[str, float] = field(default_factory=dict)
    """When the order was last sent to each replica."""

    def waiting(self) -> list[str]:
        """Return the processes that have not ended their profile."""
        return [
            name for name in self.request.targets if name not in self.reports or self.reports[name].state == "active"
        ]

    def close(self, name: str, reason: str) -> None:
        """Note that a process will report no more."""
        self.reports[name] = ProfileReport(profile=self.request.request, state="failed", text=reason)


@dataclass
class Profiles:
    """The newest profile of the run."""

    newest: RunProfile | None = None

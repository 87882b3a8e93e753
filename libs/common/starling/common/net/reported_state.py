"""What a replica tells of itself in every heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from starling.common.wire.messages import Heartbeat, HeldLease, Wait


@dataclass
class ReportedState:
    """The state that the next heartbeats repeat, until it is set anew."""

    version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    offered: int = -1
    waits: tuple[Wait, ...] = ()
    waits_at: float = 0.0
    """When `waits` were true, in monotonic seconds."""

    def set(
        self,
        version: int | None,
        gauges: dict[str, float] | None,
        offered: int | None,
        waits: tuple[Wait, ...] | None,
        now: float,
    ) -> None:
        """Change what is not None."""
        if version is not None:
            self.version = version
        if gauges is not None:
            self.gauges = gauges
        if offered is not None:
            self.offered = offered
        if waits is not None:
            self.waits, self.waits_at = waits, now

    def heartbeat(self, leases: tuple[HeldLease, ...], now: float) -> Heartbeat:
        """Return the heartbeat of this moment; its waits are older by the time since they were set."""
        return Heartbeat(
            leases=leases,
            version=self.version,
            gauges=dict(self.gauges),
            offered=self.offered,
            waits=aged(self.waits, now - self.waits_at),
        )


def aged(waits: tuple[Wait, ...], elapsed_s: float) -> tuple[Wait, ...]:
    """Return `waits` as they are `elapsed_s` later."""
    return tuple(
        msgspec.structs.replace(
            wait, since_s=wait.since_s + elapsed_s, seconds_left=max(0.0, wait.seconds_left - elapsed_s)
        )
        for wait in waits
    )

"""Feed of a run's controller: its newest snapshot, wherever it publishes now.

The folder of a run names the address of its controller. One that dies and returns may publish at another port, and one
that is over publishes nothing; what cannot be read or is refused is one sentence, and is tried again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from starling.cli.run.attempt import OBSERVER, Attempt
from starling.common.errors import StarlingError
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.settings import read_toml
from starling.common.wire.telemetry import RunSnapshot

LOOK_EVERY_S: Final = 1.0
"""How often the address of the controller is looked up."""


@dataclass(frozen=True)
class Telemetry:
    """Where a controller publishes its snapshots."""

    address: str
    key: Path | None
    """Key file of an observer; None without CURVE."""


@dataclass(frozen=True)
class Heard:
    """A snapshot, and when it came."""

    snapshot: RunSnapshot
    at: float
    """In monotonic seconds."""


class ControllerFeed:
    """One thread calls `follow`, `receive` and `close`; the properties are for any thread."""

    def __init__(self, given: Telemetry | None = None) -> None:
        """`given`: where the controller publishes; None for what the folder of the run says."""
        self._given, self._telemetry = given, given
        self._subscriber: TelemetrySubscriber | None = None
        self._look_at = float("-inf")
        self.heard: Heard | None = None
        """The newest snapshot; None before the first."""
        self.problem = ""
        """Why there is no snapshot, in one sentence; empty where there is one, or nothing is known."""

    def follow(self, attempt: Attempt | None) -> None:
        """Subscribe where the controller of `attempt` publishes now, looked up every `LOOK_EVERY_S`."""
        now = time.monotonic()
        if now < self._look_at or (attempt is None and self._subscriber is not None):
            return
        self._look_at = now + LOOK_EVERY_S
        telemetry = self._given or (published_address(attempt) if attempt is not None else None)
        if telemetry is None:
            self.problem = self.problem if self._subscriber is not None else ""
            return
        if telemetry == self._telemetry and self._subscriber is not None:
            return
        self.close()
        self._telemetry = telemetry
        try:
            self._subscriber = TelemetrySubscriber(telemetry.address, telemetry.key)
        except StarlingError as error:
            self.problem = str(error)

    def receive(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a snapshot; return whether anything is new."""
        if self._subscriber is None:
            time.sleep(timeout_s)
            return False
        try:
            snapshot = self._subscriber.latest(timeout_s)
        except msgspec.MsgspecError as error:  # of a controller of another version
            self.problem = (
                f"the controller's snapshot cannot be read ({error}); use here the version of Starling that it has"
            )
            return True
        if snapshot is None:
            if self._subscriber.is_refused:
                self.problem = (
                    "the controller refuses this key; use that of an observer of this run, keys/observer-0.json"
                    if self._subscriber.is_key_refused
                    else "the controller's address closes each connection; check that the controller runs, and use the "
                    "key of an observer of this run, keys/observer-0.json"
                )
            return False
        self.heard, self.problem = Heard(snapshot, time.monotonic()), ""
        return True

    def forget(self) -> None:
        """Forget the snapshot, which is that of another attempt."""
        self.close()
        self.heard, self._telemetry, self._look_at = None, self._given, float("-inf")

    def close(self) -> None:
        """End the subscription."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber, self.problem = None, ""


def published_address(attempt: Attempt) -> Telemetry | None:
    """Return where the controller of an attempt publishes; None where none listens, or it only begins to.

    A run that was started service by service need not use CURVE: then its folder has no key of an observer.
    """
    try:
        address = attempt.read_address()["telemetry"]
        network = read_toml(attempt.config).get("network") if attempt.config.exists() else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, StarlingError):
        return None
    if not isinstance(address, str):
        return None
    key, curve = attempt.key(OBSERVER), network.get("curve") if isinstance(network, dict) else None
    uses_curve = curve is not False and (curve is True or key.exists())
    return Telemetry(address, key if uses_curve else None)

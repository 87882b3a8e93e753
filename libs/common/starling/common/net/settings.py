"""The number of an incarnation."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starling.common.net import curve


def make_incarnation() -> int:
    """Return milliseconds since 1970: greater than the epoch of any earlier start, if nobody set the clock back.

    If somebody did, the new incarnation is heard as soon as the earlier one is known to be gone.
    """
    return time.time_ns() // 1_000_000


# JOINED from starling.common.net.settings: What a line to the controller is made with.


@dataclass(frozen=True)
class LinkSettings:
    """Whom to call, as whom, and how long to wait."""

    name: str
    run: str
    controller: str
    """Address of the controller, ``tcp://host:port``."""
    key: curve.KeyFile | None
    connect_s: float = 60.0
    """How long to wait for the controller's first word."""
    silence_s: float = 300.0
    """How long the controller may stay silent afterwards: it may be starting again."""

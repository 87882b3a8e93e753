"""Settings of a connection to the controller, and the incarnation number of its process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from starling.common.net import curve


@dataclass(frozen=True)
class LinkSettings:
    """Address, identity and deadlines of a connection to the controller."""

    name: str
    run: str
    controller: str
    """Address of the controller, ``tcp://host:port``."""
    key: curve.KeyFile | None
    connect_s: float = 60.0
    """Deadline for the first message of the controller."""
    silence_s: float = 300.0
    """Longest silence of the controller after that: it may be restarting."""


def make_incarnation() -> int:
    """Return milliseconds since 1970: greater than any earlier incarnation, unless the clock was set back.

    If it was, messages of the new incarnation are accepted once the connection of the earlier one has closed.
    """
    return time.time_ns() // 1_000_000

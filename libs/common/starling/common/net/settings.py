"""What a line to the controller is made with."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.net import curve


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

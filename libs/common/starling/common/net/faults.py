"""Report of a replica's fault to its controller, for the live views: also of one that could not join."""

from __future__ import annotations

import time
from typing import Final

import zmq

from starling.common.errors import RefusedError, UnreachableError
from starling.common.net.dealer import Dealer
from starling.common.net.settings import LinkSettings, make_incarnation
from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, ReportFault

REPORT_S: Final = 5.0
"""How long to wait for a connection: the process is about to exit, and its own last line has the fault too."""
PATIENCE_MS: Final = 50
"""How long to wait before the connection is looked at again."""


def report_fault(settings: LinkSettings, reason: str) -> None:
    """Tell the controller why this replica cannot start, or ends; best effort."""
    envelope = Envelope(
        protocol=PROTOCOL_VERSION, run=settings.run, sender=settings.name, incarnation=make_incarnation(), seq=1
    )
    try:
        dealer = Dealer(settings.controller, settings.name, settings.key)
    except UnreachableError:
        return
    try:
        dealer.send(codec.pack(envelope, ReportFault(reason=reason)))  # it waits in the socket for the connection
        deadline = time.monotonic() + REPORT_S
        while not dealer.connected and time.monotonic() < deadline:
            dealer.socket.poll(PATIENCE_MS)
            dealer.reconnected()
    except (RefusedError, zmq.Again):
        return
    finally:
        dealer.close()

"""A controller process for tests: `python lone_hub.py KEYS_FOLDER RUN ADDRESS INCARNATION [LEASE ...]`.

It listens at ADDRESS, prints its own address, welcomes every replica, grants the LEASES to the first one, and
prints a JSON line for each message that it receives and each lease that it settles. It serves until it is killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import structlog

from starling.common.net import curve
from starling.common.net.hub.hub import Hub, HubKeys, PeerDisconnected, ReceivedMessage
from starling.common.wire import messages as wire


def print_line(**fields: object) -> None:
    """Print a JSON line for the test."""
    print(json.dumps(fields), flush=True)


def serve(hub: Hub, leases: list[str]) -> None:
    """Answer as a controller without a journal: an unknown replica gets `RequestHello`."""
    members: set[str] = set()
    settled: set[str] = set()
    while True:
        for happened in hub.poll(1.0):
            if isinstance(happened, PeerDisconnected):
                members.discard(happened.name)
                print_line(lost=happened.name)
            else:
                handle(hub, happened, members, settled, leases)


def handle(hub: Hub, arrival: ReceivedMessage, members: set[str], settled: set[str], leases: list[str]) -> None:
    """Act on one message."""
    name, message = arrival.envelope.sender, arrival.message
    print_line(heard=type(message).__name__, peer=name, version=getattr(message, "version", None))
    if isinstance(message, wire.Hello):
        members.add(name)
        hub.send(name, wire.Welcome(heartbeat_s=0.1, lease_s=10.0))
        while leases:
            hub.send(name, wire.ScoreGroup(lease=leases.pop(0), prompt=wire.Prompt(id="p"), completions=()))
    elif isinstance(message, wire.QueryRun):
        hub.send(name, wire.OperatorReply(request=message.request, ok=True, text=f"incarnation {hub.incarnation}"))
    elif name not in members:
        hub.send(name, wire.RequestHello())
    elif isinstance(message, wire.Heartbeat):
        hub.send(name, wire.Welcome(heartbeat_s=0.1, lease_s=10.0))
    elif isinstance(message, wire.GroupGenerated):
        if message.lease not in settled:
            settled.add(message.lease)
            print_line(settled=message.lease)
        hub.release(name, (message.lease,))


def main(keys: str, run: str, address: str, incarnation: str, *leases: str) -> None:
    """Serve."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = Path(keys)
    hub_keys = HubKeys(curve.load_key(folder / "controller.json"), curve.load_allowed(folder), folder)
    hub = Hub(address, run, int(incarnation), hub_keys)
    print_line(address=hub.address)
    serve(hub, list(leases))


if __name__ == "__main__":
    main(*sys.argv[1:])

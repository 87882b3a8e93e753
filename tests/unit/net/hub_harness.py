"""Hub and links over real sockets on this machine, polled until an expected event has happened."""

from __future__ import annotations

import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from starling.common.ids import Role
from starling.common.net import curve
from starling.common.net.hub.hub import Hub, HubKeys, PeerDisconnected, ReceivedMessage
from starling.common.net.limits import DEFAULT_RATE_LIMITS, RateLimits, role_of
from starling.common.net.link import ControllerLink
from starling.common.net.settings import LinkSettings
from starling.common.wire import messages as wire

RUN = "run-1"
DEADLINE_S = 20.0
"""Longer than any step of these tests takes."""
NAMES = ("policy-0", "rollout-0", "rollout-1", "reward-0", "operator-0")

M = TypeVar("M")


class HubHarness:
    """A hub, and the events that it returned."""

    def __init__(
        self,
        keys: Path | None,
        bind: str = "tcp://127.0.0.1:0",
        incarnation: int = 1,
        limits: RateLimits = DEFAULT_RATE_LIMITS,
    ) -> None:
        hub_keys = None
        if keys is not None:
            hub_keys = HubKeys(curve.load_key(keys / "controller.json"), curve.load_allowed(keys), keys)
        self.hub = Hub(bind, RUN, incarnation, hub_keys, limits=limits)
        self.events: list[ReceivedMessage | PeerDisconnected] = []

    def poll_until(self, enough: Callable[[], bool]) -> None:
        """Poll the hub until `enough()`."""
        deadline = time.monotonic() + DEADLINE_S
        while not enough():
            assert time.monotonic() < deadline, f"timed out; events {self.events[-5:]}, dropped {self.hub.dropped}"
            self.events += self.hub.poll(0.05)

    def next(self, kind: type[M], sender: str = "") -> tuple[ReceivedMessage, M]:
        """Return the first unread message of `kind`, and drop the events before it."""
        found: list[tuple[int, ReceivedMessage]] = []

        def has_arrived() -> bool:
            for i, event in enumerate(self.events):
                matches = isinstance(event, ReceivedMessage) and isinstance(event.message, kind)
                if matches and sender in ("", event.envelope.sender):
                    found.append((i, event))
                    return True
            return False

        self.poll_until(has_arrived)
        position, arrival = found[0]
        del self.events[: position + 1]
        message = arrival.message
        assert isinstance(message, kind)
        return arrival, message

    def wait_disconnected(self, name: str) -> None:
        """Wait until the hub reports the connection of `name` as closed."""
        self.poll_until(lambda: PeerDisconnected(name) in self.events)

    def welcome(self, name: str, heartbeat_s: float = 0.05) -> ReceivedMessage:
        """Wait for the `Hello` of `name`, welcome it, and wait for its first heartbeat."""
        hello, _ = self.next(wire.Hello, name)
        assert self.hub.send(name, wire.Welcome(heartbeat_s=heartbeat_s, lease_s=10.0))
        self.next(wire.Heartbeat, name)
        return hello


@contextmanager
def running_link(
    address: str,
    keys: Path | None,
    name: str = "rollout-0",
    *,
    key_of: str = "",
    buffers: tuple[bytes, ...] = (b"layout",),
    **settings: Any,
) -> Iterator[ControllerLink]:
    """A replica's link, with the key of `key_of` (by default of its own name)."""
    if keys is not None and "key" not in settings:
        settings["key"] = curve.load_key(keys / f"{key_of or name}.json")
    link_settings = LinkSettings(**{"name": name, "run": RUN, "controller": address, "key": None, **settings})
    role = typing.cast(Role, role_of(name))
    hello = wire.Hello(role=role, host="h", pid=1, num_slots=2, version=3, has_layout=bool(buffers))
    link = ControllerLink(link_settings, hello, buffers)
    link.start()
    try:
        yield link
    finally:
        link.close("the test is over")


@contextmanager
def socket_of(
    address: str, keys: Path | None, name: str = "rollout-1", *, reconnects: bool = True
) -> Iterator[zmq.Socket[Any]]:
    """A bare DEALER with the right key, for messages that no link would send."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    if not reconnects:
        socket.reconnect_ivl = -1
    if keys is not None:
        curve.connect_with(socket, curve.load_key(keys / f"{name}.json"))
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def received(link: ControllerLink, kind: type[M]) -> M:
    """Return the next event of the link, which must be a `kind`."""
    delivered = link.receive(DEADLINE_S)
    assert isinstance(delivered, kind), delivered
    return delivered


def envelope(sender: str = "rollout-1", **changes: Any) -> wire.Envelope:
    """Return an envelope of this run with `changes`."""
    fields = {"protocol": wire.PROTOCOL_VERSION, "run": RUN, "sender": sender, "incarnation": 1, "seq": 1}
    return wire.Envelope(**{**fields, **changes})


def score(lease: str) -> wire.ScoreGroup:
    """Return a command."""
    return wire.ScoreGroup(lease=lease, prompt=wire.Prompt(id="p"), completions=())


def generated(lease: str) -> wire.GroupGenerated:
    """Return a result that answers any command."""
    return wire.GroupGenerated(lease=lease, trajectories=(), tensors=())

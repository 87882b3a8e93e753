"""A controller's desk and its callers: real sockets on this machine, read until what a test waits for has come."""

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
from starling.common.net.hub import Hub, HubKeys, PeerDisconnected, ReceivedMessage
from starling.common.net.limits import DEFAULT_RATE_LIMITS, RateLimits, role_of
from starling.common.net.link import ControllerLink
from starling.common.net.settings import LinkSettings
from starling.common.wire import messages as wire

RUN = "run-1"
DEADLINE_S = 20.0
"""Longer than anything here takes; who waits so long has failed."""
NAMES = ("policy-0", "rollout-0", "rollout-1", "reward-0", "operator-0")

M = TypeVar("M")


class Desk:
    """A hub, and everything that it heard."""

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
        self.heard: list[ReceivedMessage | PeerDisconnected] = []

    def poll_until(self, enough: Callable[[], bool]) -> None:
        """Take in messages until `enough()`."""
        deadline = time.monotonic() + DEADLINE_S
        while not enough():
            assert time.monotonic() < deadline, f"this never came; heard {self.heard[-5:]}, dropped {self.hub.dropped}"
            self.heard += self.hub.poll(0.05)

    def next(self, kind: type[M], sender: str = "") -> tuple[ReceivedMessage, M]:
        """Return the first message of `kind` that is still unread, and forget what came before it."""
        found: list[tuple[int, ReceivedMessage]] = []

        def came() -> bool:
            for i, happened in enumerate(self.heard):
                told = isinstance(happened, ReceivedMessage) and isinstance(happened.message, kind)
                if told and sender in ("", happened.envelope.sender):
                    found.append((i, happened))
                    return True
            return False

        self.poll_until(came)
        position, arrival = found[0]
        del self.heard[: position + 1]
        message = arrival.message
        assert isinstance(message, kind)
        return arrival, message

    def lost(self, name: str) -> None:
        """Wait until the connection of `name` is known to be closed."""
        self.poll_until(lambda: PeerDisconnected(name) in self.heard)

    def admit(self, name: str, heartbeat_s: float = 0.05) -> ReceivedMessage:
        """Wait for the `Hello` of `name`, welcome it, and wait for its first heartbeat."""
        hello, _ = self.next(wire.Hello, name)
        assert self.hub.send(name, wire.Welcome(heartbeat_s=heartbeat_s, lease_s=10.0))
        self.next(wire.Heartbeat, name)
        return hello


@contextmanager
def calling(
    address: str,
    keys: Path | None,
    name: str = "rollout-0",
    *,
    key_of: str = "",
    buffers: tuple[bytes, ...] = (b"layout",),
    **settings: Any,
) -> Iterator[ControllerLink]:
    """A replica's link, with the key that was made for `key_of` (its own name unless told)."""
    if keys is not None and "key" not in settings:
        settings["key"] = curve.load_key(keys / f"{key_of or name}.json")
    given = LinkSettings(**{"name": name, "run": RUN, "controller": address, "key": None, **settings})
    role = typing.cast(Role, role_of(name))
    hello = wire.Hello(role=role, host="h", pid=1, num_slots=2, version=3, has_layout=bool(buffers))
    link = ControllerLink(given, hello, buffers)
    link.start()
    try:
        yield link
    finally:
        link.close("the test is over")


@contextmanager
def socket_of(address: str, keys: Path | None, name: str = "rollout-1") -> Iterator[zmq.Socket[Any]]:
    """A bare DEALER with the right key, to say what no link would say."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    if keys is not None:
        curve.connect_with(socket, curve.load_key(keys / f"{name}.json"))
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def received(link: ControllerLink, kind: type[M]) -> M:
    """Return what the link delivers next; it must be a `kind`."""
    delivered = link.receive(DEADLINE_S)
    assert isinstance(delivered, kind), delivered
    return delivered


def envelope(sender: str = "rollout-1", **changes: Any) -> wire.Envelope:
    """Return an envelope of this run, but for `changes`."""
    fields = {"protocol": wire.PROTOCOL_VERSION, "run": RUN, "sender": sender, "incarnation": 1, "seq": 1}
    return wire.Envelope(**{**fields, **changes})


def score(lease: str) -> wire.ScoreGroup:
    """Return a command."""
    return wire.ScoreGroup(lease=lease, prompt=wire.Prompt(id="p"), completions=())


def generated(lease: str) -> wire.GroupGenerated:
    """Return a result, as a rollout may give it to any command."""
    return wire.GroupGenerated(lease=lease, trajectories=(), tensors=())

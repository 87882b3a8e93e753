"""Binding a socket to an address of this machine, with an error that names the remedy."""

from __future__ import annotations

import errno
import time
from typing import Any

import zmq

from starling.common.errors import ConfigError

BIND_WITHIN_S = 1.0
"""How long to retry an address that is in use: its last owner may be closing."""


def bind(socket: zmq.Socket[Any], address: str, setting: str = "network.host") -> None:
    """Bind `socket` to ``tcp://host:port``, from a `setting` that errors name.

    Raises ConfigError if it is in use, or no address of this machine.
    """
    deadline = time.monotonic() + BIND_WITHIN_S
    while True:
        try:
            socket.bind(address)
            return
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            remedy = "choose another port" + (", or 0" if setting == "network.host" else "")
            if error.errno not in (zmq.EADDRINUSE, errno.EACCES):
                remedy = f"set {setting} to an address of this machine: 127.0.0.1, or one of its network"
            raise ConfigError(f"cannot listen on {address}: {error.strerror}; {remedy}") from None


def check_address(host: str, port: int) -> None:
    """Check that this machine can listen at `host`, and on `port` unless it is 0. Raises ConfigError, as `bind`."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        bind(socket, f"tcp://{host}:{port}")

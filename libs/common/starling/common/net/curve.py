"""CURVE keys of a run: one pair per service, and the allow-list by which the controller knows them.

A run's `keys/` folder (0700) holds ``<name>.json`` (0600) for each service with its own secret and the controller's
public key, and `allowed.json` (0600), which maps public keys to the names that may use them. A replica can only be
who its key says it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from starling.common.errors import ConfigError

log = structlog.get_logger(__name__)

CONTROLLER = "controller"
ALLOWED = "allowed.json"
ZAP_DOMAIN = "starling"


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """One service's key pair and the public key of the controller that it may talk to."""

    name: str
    public: str
    secret: str
    controller_public: str


class AllowList:
    """Public key -> name. ZeroMQ's authenticator asks it about every connection."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self._refused: set[str] = set()

    def callback(self, domain: str, key: bytes) -> bool:
        """Say whether a client with the public key `key` (Z85) may connect; each refusal is logged once."""
        text = key.decode("ascii")
        if text in self.names:
            return True
        if text not in self._refused:
            self._refused.add(text)
            log.warning("refused an unknown key", public_key=text, domain=domain)
        return False


def make_keys(folder: Path, names: Iterable[str]) -> None:
    """Write a key pair for the controller and for each of `names`, and the allow-list, into `folder`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    controller_public, controller_secret = _pair()
    allowed = {}
    for name in (CONTROLLER, *names):
        public, secret = (controller_public, controller_secret) if name == CONTROLLER else _pair()
        if name != CONTROLLER:
            allowed[public] = name
        key = KeyFile(name=name, public=public, secret=secret, controller_public=controller_public)
        _write_private(folder / f"{name}.json", key)
    _write_private(folder / ALLOWED, allowed)


def load_key(path: Path) -> KeyFile:
    """Read one service's key file. Raises ConfigError when it is missing, open to others, or no key file."""
    key: KeyFile = _read_private(path, KeyFile)
    return key


def load_allowed(folder: Path) -> dict[str, str]:
    """Read the allow-list of a run: public key -> name."""
    allowed: dict[str, str] = _read_private(folder / ALLOWED, dict[str, str])
    return allowed


def start_authenticator(context: zmq.Context[Any], allowed: AllowList) -> ThreadAuthenticator:
    """Start the thread that admits only listed keys to the CURVE servers of `context`."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=allowed)
    return authenticator


def serve_with(socket: zmq.Socket[Any], key: KeyFile) -> None:
    """Make `socket` a CURVE server."""
    socket.curve_server = True
    socket.curve_secretkey = key.secret.encode()
    socket.curve_publickey = key.public.encode()
    socket.zap_domain = ZAP_DOMAIN.encode()


def connect_with(socket: zmq.Socket[Any], key: KeyFile) -> None:
    """Make `socket` a CURVE client of the controller that `key` names."""
    socket.curve_secretkey = key.secret.encode()
    socket.curve_publickey = key.public.encode()
    socket.curve_serverkey = key.controller_public.encode()


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode("ascii"), secret.decode("ascii")


def _write_private(path: Path, value: object) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(msgspec.json.encode(value))


def _read_private(path: Path, kind: Any) -> Any:
    try:
        mode = path.stat().st_mode
        if mode & 0o077:
            raise ConfigError(f"{path} can be read by others (mode {mode & 0o777:o}); run `chmod 600 {path}`")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read ({error.strerror}); make keys with `starling keys`"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no key file ({error}); make keys with `starling keys`") from None

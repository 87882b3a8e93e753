"""CURVE keys of a run: one pair per service, and the allow-list of the controller.

A run's `keys/` folder (0700) holds ``<name>.json`` (0600) for each service with its own secret and the controller's
public key, and `allowed.json` (0600), which maps public keys to the names that may use them. A replica can use no other
name than that of its key.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import zmq
from zmq.auth.base import Authenticator as BaseAuthenticator
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.net.limits import may_send

log = structlog.get_logger(__name__)

CONTROLLER = "controller"
ALLOWED = "allowed.json"
ZAP_DOMAIN = "starling"
"""Domain of the socket for replicas and operators."""
TELEMETRY_DOMAIN = "starling-telemetry"
"""Domain of the socket for subscribers."""
KEY_BYTES = 32
ROUTE: Final = b"Identity"
"""Property of a connection in ZMTP: its routing id."""
ROUTE_BYTES: Final = 16
FIRST_OF_ROUTE: Final = b"\1"
"""First byte of a routing id: 0 is that of libzmq's own."""
ROUND_TRIP_MS: Final = 10_000
"""Longest wait for libzmq's I/O thread; connections that wait for it are then closed."""
ADMITTED: Final = b"200"
TRY_AGAIN: Final = b"000"
"""No status: libzmq closes the connection, and its peer connects again. With 300 it would do so after 30 s only."""
MAX_AT_ONCE: Final = 1000
"""Maximum number of connections that are answered together."""
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a peer may connect."""
MAX_REFUSALS = 1000
"""Maximum number of unknown keys that are logged, so that attempts fill neither memory nor disk."""


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """One service's key pair and the public key of its controller."""

    name: str
    public: str
    secret: str
    controller_public: str


class AllowList:
    """Public key -> name. ZeroMQ's authenticator calls it, in its own thread, for every connection."""

    def __init__(self, names: dict[str, str], folder: Path | None = None) -> None:
        """Allow `names`, from the `allowed.json` of `folder`: if given, it is read again when it changes."""
        self.names = names
        self._folder = folder
        self._stamp = self._look()
        self._refused: set[str] = set()
        self._barred: set[str] = set()
        """Public keys whose holders sent what no replica sends; they connect no more while this controller runs."""
        self.on_refusal: Callable[[str], object] = lambda text: None
        """Told in words of each refusal, in the authenticator's thread."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with the public key `key` (Z85) may connect; each refusal is logged once."""
        text = key.decode("ascii")
        name = self.names.get(text)
        # A peer that may send nothing is refused before it can: ZeroMQ keeps what it receives until a message is
        # complete.
        if text in self._barred:
            return False
        if name is not None and (domain == TELEMETRY_DOMAIN or may_send(name)):
            return True
        self.on_refusal(
            f"{name} may only subscribe to the telemetry, and is refused as a replica"
            if name is not None
            else f"a service with an unknown key is refused (public key {text}); give it its key file of this run"
        )
        if text not in self._refused and len(self._refused) < MAX_REFUSALS:
            self._refused.add(text)
            if name is None:
                log.warning("refused an unknown key", public_key=text, domain=domain)
            else:
                log.warning("refused a peer that may only subscribe", peer=name)
        return False

    def bar(self, key: str) -> None:
        """Let the holder of a public key connect no more."""
        self._barred.add(key)

    def reload(self) -> bool:
        """Read `allowed.json` again if it has changed. Returns whether a key was added or revoked.

        An invalid file changes nothing: a mistake while editing it must not cut connections.
        """
        stamp = self._look()
        if stamp is None or stamp == self._stamp or self._folder is None:
            return False
        self._stamp = stamp
        try:
            names = load_allowed(self._folder)
        except ConfigError as error:
            log.warning("the allow-list stays as it was", reason=str(error))
            return False
        before, self.names = self.names, names
        if names == before:
            return False
        added = sorted(name for key, name in names.items() if before.get(key) != name)
        revoked = sorted(name for key, name in before.items() if names.get(key) != name)
        log.info("read the allow-list again", added=added, revoked=revoked)
        return True

    def _look(self) -> tuple[int, ...] | None:
        if self._folder is None:
            return None
        try:
            found = (self._folder / ALLOWED).stat()
        except OSError:
            return None  # it is being replaced, or was moved away: its last content stays in force
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size  # ctime: it may be given to this user


def load_key(path: Path) -> KeyFile:
    """Read one service's key file. Raises ConfigError if it is missing, readable by others, or malformed."""
    key: KeyFile = read_private(path, KeyFile)
    for text in (key.public, key.secret, key.controller_public):
        if not _is_key(text):
            raise ConfigError(f"{path} has something other than keys in it; make keys with `starling keys`")
    return key


def _is_key(text: str) -> bool:
    """Return whether `text` is 32 bytes in Z85."""
    try:
        return len(z85.decode(text.encode())) == KEY_BYTES
    except (ValueError, KeyError, IndexError, struct.error):
        return False


def load_allowed(folder: Path) -> dict[str, str]:
    """Read the allow-list of a run: public key -> name."""
    allowed: dict[str, str] = read_private(folder / ALLOWED, dict[str, str])
    return allowed


class _ManyRequests(BaseAuthenticator):
    """Takes many requests of libzmq before it answers them: REP, which pyzmq takes, has to answer each at once."""

    def start(self) -> None:
        """Listen for requests."""
        self.zap_socket = self.context.socket(zmq.ROUTER, socket_class=zmq.Socket)
        self.zap_socket.linger = 1
        self.zap_socket.bind(ZAP_ADDRESS)


class Authenticator(ThreadAuthenticator, _ManyRequests):
    """Admits peers in a thread of its own, and gives each connection a random routing id.

    Without that, a ROUTER of libzmq (4.3) takes the id that a peer gives itself, of any size, and numbers the
    connections of the other peers; where it gets to a number that a peer has given itself, it ends the process.

    Args:
        context: the context of the servers, which has one thread for all input and output.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        super().__init__(context)
        self._round_trip_sockets = tuple(context.socket(zmq.PAIR) for _ in range(2))
        self._requester = b""
        """Routing id of the ZAP client, a session of libzmq, that sent the present request."""
        self._may_admit: bool | None = None
        """Whether libzmq has read all that arrived with the present batch of requests; None before the wait for it."""

    def start(self) -> None:
        """Start the thread. Raises ConfigError if no temporary file can be made, or the machine is too busy."""
        for end in self._round_trip_sockets:
            end.linger, end.rcvtimeo = 0, ROUND_TRIP_MS
        try:
            with tempfile.TemporaryDirectory() as folder:  # private, and removed once both ends are connected
                self._round_trip_sockets[0].bind(f"ipc://{folder}/0")
                self._round_trip_sockets[1].connect(f"ipc://{folder}/0")
                io_thread_answers = self._io_thread_answers()
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"no socket can be made in a temporary folder ({error.strerror}); set TMPDIR") from None
        if not io_thread_answers:
            raise ConfigError(
                f"ZeroMQ did not answer for {ROUND_TRIP_MS / 1000:g} s: the machine is too busy; start again"
            )
        super().start()

    def stop(self) -> None:
        """End the thread."""
        super().stop()
        for end in self._round_trip_sockets:
            end.close(0)

    def _io_thread_answers(self) -> bool:
        """Make a round trip through libzmq's I/O thread, which ends earlier work first; return whether it came back."""
        token = os.urandom(KEY_BYTES)
        self._round_trip_sockets[1].send(token)
        try:
            while self._round_trip_sockets[0].recv() != token:  # one of an earlier call, which was given up
                pass
        except zmq.Again:
            return False
        return True

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer the request `msg` and those that are there by now, with one wait for all of them.

        In a flood of handshakes, which take the time of the thread for input and output, each wait is long.
        """
        requests = [msg]
        while len(requests) < MAX_AT_ONCE and self.zap_socket.poll(0):
            requests.append(self.zap_socket.recv_multipart())
        self._may_admit = None
        for self._requester, _, *request in requests:
            await super().handle_zap_message(request)

    def _send_zap_reply(
        self, request_id: bytes, status_code: bytes, status_text: bytes, user_id: str | bytes = b""
    ) -> None:
        """Answer whether a peer may connect, in place of the answer without a routing id.

        What the peer says of itself, also an id, comes with its key, and is read after the answer if that is there by
        then: the last id counts. So the answer comes only after it has been read.
        """
        route = FIRST_OF_ROUTE + os.urandom(ROUTE_BYTES - 1)
        metadata = bytes([len(ROUTE)]) + ROUTE + len(route).to_bytes(4) + route
        if status_code != ADMITTED:
            user_id = metadata = b""
        else:
            if self._may_admit is None:
                self._may_admit = self._io_thread_answers()
            if not self._may_admit:
                status_code, user_id, metadata = TRY_AGAIN, b"", b""
        owner = user_id.encode() if isinstance(user_id, str) else user_id
        envelope = [self._requester, b"", b"1.0"]
        self.zap_socket.send_multipart([*envelope, request_id, status_code, status_text, owner, metadata])


def start_authenticator(context: zmq.Context[Any], allowed: AllowList) -> ThreadAuthenticator:
    """Start the thread that admits only listed keys to the CURVE servers of `context`."""
    authenticator = Authenticator(context)
    authenticator.start()
    for domain in (ZAP_DOMAIN, TELEMETRY_DOMAIN):
        authenticator.configure_curve_callback(domain=domain, credentials_provider=allowed)
    return authenticator


def serve_with(socket: zmq.Socket[Any], key: KeyFile, domain: str = ZAP_DOMAIN) -> None:
    """Make `socket` a CURVE server whose clients are admitted by `domain`."""
    socket.curve_server = True
    socket.curve_secretkey = key.secret.encode()
    socket.curve_publickey = key.public.encode()
    socket.zap_domain = domain.encode()


def connect_with(socket: zmq.Socket[Any], key: KeyFile) -> None:
    """Make `socket` a CURVE client of the controller that `key` names."""
    socket.curve_secretkey = key.secret.encode()
    socket.curve_publickey = key.public.encode()
    socket.curve_serverkey = key.controller_public.encode()


def read_private(path: Path, kind: Any) -> Any:
    """Read a JSON file that only its owner may read. Raises ConfigError if others may, or if it is not a `kind`.

    Its owner is this user, root or the owner of its folder. Any other user who may write to the folder could otherwise
    put a file of his own in its place.
    """
    try:
        with open_regular(path) as file:
            found = os.fstat(file.fileno())
            if found.st_mode & 0o077:
                mode = found.st_mode & 0o777
                raise ConfigError(f"{path} can be read by others (mode {mode:o}); run `chmod 600 {path}`")
            if found.st_uid not in (0, os.geteuid(), path.parent.stat().st_uid):
                raise ConfigError(
                    f"{path} belongs to another user (uid {found.st_uid}) than its folder; if you trust what it has, "
                    f"run `chown {os.geteuid()} {path}`"
                )
            return msgspec.json.decode(file.read(), type=kind)
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be read ({error.strerror}); make keys with `starling keys`"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a key file ({error}); make keys with `starling keys`") from None

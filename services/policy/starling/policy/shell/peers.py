"""Where other policy replicas find this one, and ask for its state."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from starling.common.files import open_regular
from starling.common.nodes.facts import version_of
from starling.policy.shell.facts import PACKAGES

if TYPE_CHECKING:
    from starling.policy.shell.loading import PolicyProcess

MAX_REQUESTS: Final = 16
"""Requests that wait to be answered at a time. Whoever reaches the store can ask, and an answer may take as long as
replicas wait for each other."""
MAX_REQUEST_BYTES: Final = 512

_POLL_S: Final = 0.2
_WARN_S: Final = 60.0
"""Least time between two warnings of entries that are left out."""
_REQUEST: Final = re.compile(r"([0-9A-Za-z.:%_-]+):([0-9]{1,5}) (adopt:[0-9]+:[0-9]+\.[0-9]+)")
"""Address of a store, and the lease of the adoption, after which the process groups are named."""
_REQUESTS: Final = "state_requests"
"""Queue in the store of a replica."""
_OF_THIS_PROCESS: Final = {
    "alarms",
    "delta_versions",
    "peak_tflops",
    "saving",
    "snapshots",
    "transport",
}
"""Settings of a policy that may differ among replicas that make steps together."""
_OF_THIS_COPY: Final = {"_name_or_path", "transformers_version"}
"""Entries of a config.json that may differ."""


log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class StateRequest:
    """Another replica wants to copy the state of this one."""

    peer: str
    """Address of its store."""
    group: str
    """Name of the process groups in which its ranks wait for those of this replica."""


class PeerServer:
    """The store of this replica, through which process groups with others are made."""

    def __init__(self, host: str) -> None:
        """Serve the store at a free port of `host`; requests wait for `listen`.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        from starling.policy.train.parallel.group import serve_store

        self._store, self.address = serve_store(host, "network.host")
        self._lock, self._num_waiting = threading.Lock(), 0
        self._num_left_out, self._warned_at = 0, -_WARN_S

    def listen(self, asked: Callable[[StateRequest], None]) -> None:
        """Have a thread call `asked` for each request; `note_answered` follows each.

        The store asks for no key: an entry that is no request, or is beyond `MAX_REQUESTS`, is left out.
        """
        threading.Thread(target=self._listen, args=(asked,), name="peers", daemon=True).start()

    def _listen(self, asked: Callable[[StateRequest], None]) -> None:
        while True:
            time.sleep(_POLL_S)
            try:
                for _ in range(self._store.queue_len(_REQUESTS)):
                    self._take(self._store.queue_pop(_REQUESTS, False), asked)
            except RuntimeError as error:  # another process has taken the entry
                self._leave_out(str(error).partition("\n")[0])

    def _take(self, entry: bytes, asked: Callable[[StateRequest], None]) -> None:
        request = parse_request(entry)
        if request is None:
            self._leave_out("it is not a request for the state")
            return
        with self._lock:
            has_room = self._num_waiting < MAX_REQUESTS
            self._num_waiting += has_room
        if has_room:
            asked(request)
        else:
            self._leave_out(f"{MAX_REQUESTS} requests wait already")

    def _leave_out(self, reason: str) -> None:
        self._num_left_out += 1
        if time.monotonic() >= self._warned_at + _WARN_S:
            log.warning("state_request_left_out", reason=reason, num=self._num_left_out)
            self._warned_at = time.monotonic()

    def note_answered(self) -> None:
        """Note that a request has been answered. Any thread may call this."""
        with self._lock:
            self._num_waiting -= 1


def parse_request(entry: bytes) -> StateRequest | None:
    """Return the request in an entry of the queue, or None if it is none."""
    found = _REQUEST.fullmatch(entry.decode("ascii", "replace")) if len(entry) <= MAX_REQUEST_BYTES else None
    if found is None or not 0 < int(found[2]) < 1 << 16:
        return None
    try:
        found[1].encode("idna")  # as a connection does
    except UnicodeError:
        return None
    return StateRequest(f"{found[1]}:{found[2]}", found[3])


def request_state(address: str, own: str, group: str) -> None:
    """Ask the replica whose store is at `address` to send its state in the process groups of this name.

    `own`: address of the store of this replica.

    Raises OSError or RuntimeError if it cannot be reached.
    """
    from starling.policy.train.parallel.replicas.peers import REACH_S, ask_store, connect_store

    def ask() -> None:
        # One message: a replica that ends while it asks must leave nothing that others would wait behind.
        connect_store(address, REACH_S).queue_push(_REQUESTS, f"{own} {group}")

    ask_store(address, ask, REACH_S)


def settings_digest(settings: PolicyProcess, folder: Path) -> str:
    """Return a digest of what decides what a step computes: settings, configuration of the model, versions of packages.

    `folder`: of the model, which has been loaded.
    """
    policy = settings.policy.model_dump(mode="json", exclude=_OF_THIS_PROCESS)
    del policy["parallel"]["timeout_s"]
    model = settings.model.model_dump(mode="json", exclude={"path", "device"})
    versions = [version_of(package) for package in PACKAGES]
    parts = (versions, settings.run.kind, settings.run.seed, model, policy, _configuration(folder))
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def _configuration(folder: Path) -> str:
    """Return the configuration of the model in one form, without the entries that change no computation."""
    with open_regular(folder / "config.json") as file:
        entries = json.load(file)
    return json.dumps({key: value for key, value in entries.items() if key not in _OF_THIS_COPY}, sort_keys=True)

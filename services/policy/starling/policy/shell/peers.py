"""Where other policy replicas find this one, and ask for its state."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from starling.common.files import open_regular
from starling.common.nodes.facts import version_of
from starling.policy.shell.facts import PACKAGES

if TYPE_CHECKING:
    from starling.policy.shell.loading import PolicyProcess

_POLL_S: Final = 0.2
_REQUESTS: Final = "state_requests"
"""Queue in the store of a replica."""
_OF_THIS_PROCESS: Final = {
    "alarms",
    "delta_versions",
    "peak_tflops",
    "publish_timeout_s",
    "saving",
    "snapshots",
    "transport",
}
"""Settings of a policy that may differ among replicas that make steps together."""
_OF_THIS_COPY: Final = {"_name_or_path", "transformers_version"}
"""Entries of a config.json that may differ."""


@dataclass(frozen=True)
class StateRequest:
    """Another replica wants to copy the state of this one."""

    peer: str
    """Address of its store."""
    group: str
    """Name of the process groups in which its ranks wait for those of this replica."""


class PeerServer:
    """The store of this replica, through which process groups with others are made."""

    def __init__(self, host: str, asked: Callable[[StateRequest], None]) -> None:
        """Listen at a free port of `host`; `asked`: called by a thread for each request.

        Raises:
            ConfigError: `host` is no address of this machine.
        """
        from starling.policy.train.parallel.group import serve_store

        self._store, self.address = serve_store(host, "network.host")
        self._asked = asked
        threading.Thread(target=self._listen, name="peers", daemon=True).start()

    def _listen(self) -> None:
        while True:
            time.sleep(_POLL_S)
            while self._store.queue_len(_REQUESTS):
                peer, _, group = self._store.queue_pop(_REQUESTS, False).decode().partition(" ")
                self._asked(StateRequest(peer, group))


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
    for name in ("timeout_s", "replica_timeout_s"):
        del policy["parallel"][name]
    model = settings.model.model_dump(mode="json", exclude={"path", "device"})
    versions = [version_of(package) for package in PACKAGES]
    parts = (versions, settings.run.kind, settings.run.seed, model, policy, _configuration(folder))
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=16).hexdigest()


def _configuration(folder: Path) -> str:
    """Return the configuration of the model in one form, without the entries that change no computation."""
    with open_regular(folder / "config.json") as file:
        entries = json.load(file)
    return json.dumps({key: value for key, value in entries.items() if key not in _OF_THIS_COPY}, sort_keys=True)

"""Who may ask: the key of the endpoint, and those of episodes under way. Keys are compared by their digests alone."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from starling.rollout.api.errors import ApiError

E = TypeVar("E")


class ApiKeys(Generic[E]):
    """The keys that are valid now.

    Digests are looked up, not keys, so that how long a look-up takes tells nothing of a key.

    Args:
        key: that of whoever may use the endpoint; empty where only episodes may.
    """

    def __init__(self, key: str) -> None:
        self._key = _digest(key) if key else None
        self._lock = threading.Lock()
        self._episodes: dict[bytes, E] = {}

    def open(self, episode: E) -> str:
        """Make a key that is `episode`'s; from any thread."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._episodes[_digest(key)] = episode
        return key

    def close(self, key: str) -> None:
        """Make the key of an episode invalid; from any thread."""
        with self._lock:
            self._episodes.pop(_digest(key), None)

    def check(self, authorization: str) -> E | None:
        """Return the episode of a request, or None for one that is nobody's.

        Args:
            authorization: the header: ``Bearer KEY``.

        Raises:
            ApiError: no key, or one that is not valid.
        """
        kind, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        with self._lock:
            episode = self._episodes.get(given)
        if kind.lower() == "bearer":
            if episode is not None:
                return episode
            if self._key is not None and hmac.compare_digest(given, self._key):
                return None
        raise ApiError(
            "no API key, or a wrong one; give that of rollout.api.key or of the run's folder, api/<replica>.json, "
            "as `Authorization: Bearer KEY`",
            "invalid_api_key",
        )


class ApiAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica listens, and the key that it wants: what is in ``<run folder>/api/<replica>.json``."""

    base_url: str
    api_key: str
    model: str


def write_address(path: Path, address: ApiAddress) -> None:
    """Write `address` for its owner alone; who reads it meanwhile finds the old one whole, or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(msgspec.json.encode(address))
    partial.replace(path)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

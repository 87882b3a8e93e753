"""API keys: the key of the server, and one per episode in progress. Only digests of keys are stored and compared."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from typing import Generic, TypeVar

from starling.rollout.api.errors import ApiError

E = TypeVar("E")


class ApiKeys(Generic[E]):
    """The valid keys.

    Digests are looked up, not keys, so that the time of a look-up reveals nothing about a key.

    Args:
        key: the server's key; empty where only episodes have access.
    """

    def __init__(self, key: str) -> None:
        self._key = _digest(key) if key else None
        self._lock = threading.Lock()
        self._episodes: dict[bytes, E] = {}

    def issue(self, episode: E) -> str:
        """Return a new key of `episode`; from any thread."""
        key = f"episode-{secrets.token_urlsafe(24)}"
        with self._lock:
            self._episodes[_digest(key)] = episode
        return key

    def revoke(self, key: str) -> None:
        """Invalidate the key of an episode; from any thread."""
        with self._lock:
            self._episodes.pop(_digest(key), None)

    def authenticate(self, authorization: str) -> E | None:
        """Return the episode of a request, or None for a request with the server's key.

        Args:
            authorization: the HTTP header: ``Bearer KEY``.

        Raises:
            ApiError: the key is missing or not valid.
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

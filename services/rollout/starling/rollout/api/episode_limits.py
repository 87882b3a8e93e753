"""Limits on the requests of one episode: how many at a time, of how many bytes, and how many conversations are kept.

An episode's key is in the hands of a program, and of what that runs. It must not be able to take the replica's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from starling.common.counts import counted
from starling.rollout.api.errors import ApiError

MAX_BODY_BYTES: Final = 32 << 20
"""Largest body of any request."""
EPISODE_BODY_BYTES: Final = 1 << 20
EPISODE_TOKEN_BYTES: Final = 256
"""Limit on the body of an episode's request, which is one conversation: so much, and so much for each token of the
model's context."""
BODIES: Final = 16
"""Largest bodies that the requests in progress of an episode have together, and the conversations that are kept."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode, by the settings."""

    max_requests: int
    """Requests in progress, as `rollout.api.max_requests`."""
    max_branches: int
    """Conversations that are kept, as `rollout.environment.max_branches`."""
    max_model_len: int
    """Tokens of a sequence."""

    @property
    def body_bytes(self) -> int:
        """Bytes of one request."""
        return min(MAX_BODY_BYTES, EPISODE_BODY_BYTES + EPISODE_TOKEN_BYTES * self.max_model_len)

    @property
    def total_bytes(self) -> int:
        """Bytes of the requests in progress together, and of those whose conversations are kept."""
        return BODIES * self.body_bytes


class RequestBody:
    """Bytes of one request's body, as they arrive.

    Args:
        limit_bytes: limit on them.
        requests: those of the same episode, with a limit on their bytes together.
    """

    def __init__(self, limit_bytes: int = MAX_BODY_BYTES, requests: RequestsInProgress | None = None) -> None:
        self.size_bytes, self._limit_bytes, self._requests = 0, limit_bytes, requests

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises ApiError if they are too many."""
        self.size_bytes += num_bytes
        if self.size_bytes > self._limit_bytes:
            raise ApiError(
                f"the body has more than {self._limit_bytes} bytes; send less at a time", "request_too_large"
            )
        if self._requests is not None:
            self._requests.check_size()


class RequestsInProgress:
    """The requests of one episode that have not been answered yet. Used from the server's event loop."""

    def __init__(self, limits: EpisodeLimits) -> None:
        self._limits, self._bodies = limits, list[RequestBody]()

    @contextmanager
    def request(self) -> Iterator[RequestBody]:
        """Hold one of the concurrent requests. Raises ApiError when there is none left."""
        if len(self._bodies) >= self._limits.max_requests:
            raise ApiError(
                f"{counted(len(self._bodies), 'request')} of this episode are in progress already; wait for answers, "
                "or raise rollout.api.max_requests",
                "too_many_requests",
            )
        body = RequestBody(self._limits.body_bytes, self)
        self._bodies.append(body)
        try:
            yield body
        finally:
            self._bodies.remove(body)

    def check_size(self) -> None:
        """Raise ApiError if the requests have too many bytes together."""
        total = sum(body.size_bytes for body in self._bodies)
        if total > self._limits.total_bytes:
            raise ApiError(
                f"the requests in progress of this episode have {total} bytes, and {self._limits.total_bytes} are "
                "allowed; wait for answers, or send less at a time",
                "too_many_requests",
            )

"""Limits on the requests of one key: how many at a time, of how many bytes; and how many conversations are kept.

An episode's key is in the hands of a program, and of what that runs; the server's is in those of its clients. None must
be able to take the replica's memory, or the time of its engine.
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
"""Largest bodies that the requests in progress of a key have together, and those of an episode's conversations."""
MAX_COMPLETIONS: Final = 1 << 16
"""Limit on the completions of all requests in progress of a key: each has its text, and waits in the engine."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server's own key, by the settings."""

    max_requests: int
    """Requests in progress, as `rollout.api.max_requests`."""
    body_bytes: int = MAX_BODY_BYTES
    """Bytes of one request."""
    total_bytes: int = BODIES * MAX_BODY_BYTES
    """Bytes of the requests in progress together."""
    whose: str = ""
    """For errors."""


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

    @property
    def whose(self) -> str:
        """For errors."""
        return " of this episode"


class RequestBody:
    """Bytes of one request's body, as they arrive, and the completions that it asks for.

    Args:
        limit_bytes: limit on the bytes.
        requests: those of the same key, with limits on all together.
    """

    def __init__(self, limit_bytes: int, requests: RequestsInProgress) -> None:
        self.size_bytes = self.num_completions = 0
        self._limit_bytes, self._requests = limit_bytes, requests

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises ApiError if they are too many."""
        self.size_bytes += num_bytes
        if self.size_bytes > self._limit_bytes:
            raise ApiError(
                f"the body has more than {self._limit_bytes} bytes; send less at a time", "request_too_large"
            )
        self._requests.check_size()

    def ask(self, num_completions: int) -> None:
        """Count completions. Raises ApiError if they are too many."""
        if num_completions > MAX_COMPLETIONS:
            raise ApiError(
                f"the request asks for {num_completions} completions; ask for at most {MAX_COMPLETIONS}: fewer "
                "prompts, or a smaller n"
            )
        self.num_completions = num_completions
        self._requests.check_completions()


class RequestsInProgress:
    """The requests of one key that have not been answered yet. Used from the server's event loop."""

    def __init__(self, limits: EpisodeLimits | ServerLimits) -> None:
        self._limits, self._bodies = limits, list[RequestBody]()

    @contextmanager
    def request(self) -> Iterator[RequestBody]:
        """Hold one of the concurrent requests. Raises ApiError when there is none left."""
        if len(self._bodies) >= self._limits.max_requests:
            many = "is" if len(self._bodies) == 1 else "are"
            raise ApiError(
                f"{counted(len(self._bodies), 'request')}{self._limits.whose} {many} in progress already; wait for "
                "answers, or raise rollout.api.max_requests",
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
                f"the requests in progress{self._limits.whose} have {total} bytes, and {self._limits.total_bytes} are "
                "allowed; wait for answers, or send less at a time",
                "too_many_requests",
            )

    def check_completions(self) -> None:
        """Raise ApiError if the requests ask for too many completions together."""
        total = sum(body.num_completions for body in self._bodies)
        if total > MAX_COMPLETIONS:
            raise ApiError(
                f"the requests in progress{self._limits.whose} ask for {total} completions, and {MAX_COMPLETIONS} are "
                "allowed; wait for answers, or ask for less at a time",
                "too_many_requests",
            )

"""ASGI middleware that logs why requests to `enqueue` are refused.

Clients of Cosmos-RL repeat a refused request for most of an hour and show its status at most, so the reason has to be
found at the service. One line in `INTERVAL_S` says it, with the number of those before that it stands for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final

import structlog

from starling.reward.http.body import Application, Message, Receive, Send

log = structlog.get_logger(__name__)

INTERVAL_S: Final = 10.0
MAX_REASON: Final = 500
REFUSED: Final = (401, 408, 413, 422)
"""Statuses that are logged; 429 is no mistake."""


class RefusalLog:
    """Logs refusals of one path.

    Args:
        application: answers the requests.
        path: of those that are watched.
        clock: monotonic seconds.
    """

    def __init__(self, application: Application, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._application, self._path, self._clock = application, path, clock
        self._num_silent = 0
        """Refusals since the last line."""
        self._next_at = float("-inf")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] != self._path:
            await self._application(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status in REFUSED:
                self._note(status, message.get("body", b""))
                status = 0
            await send(message)

        await self._application(scope, receive, watched)

    def _note(self, status: int, body: bytes) -> None:
        now = self._clock()
        if now < self._next_at:
            self._num_silent += 1
            return
        reason = body[:MAX_REASON].decode("utf-8", "replace")
        log.warning("enqueue_refused", status=status, reason=reason, num_others=self._num_silent)
        self._num_silent, self._next_at = 0, now + INTERVAL_S

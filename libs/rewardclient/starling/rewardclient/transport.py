"""One try of an HTTP request, with a limit on its time and on the size of the reply."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

import httpx2

from starling.rewardclient.errors import AnswerInvalidError
from starling.rewardclient.protocols.protocol import HttpRequest
from starling.rewardclient.schedule import Timeouts, retry_after_s
from starling.rewardclient.settings import ClientSettings, shown

REMOVALS: Final = 16
"""Connections for removals, besides those for samples and results."""
HEADERS: Final = {"user-agent": "starling-rewardclient", "accept-encoding": "identity"}


class TryFailed(Exception):
    """A try that failed on its way: no connection, no reply in time, or one that breaks off."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    status: int
    retry_after_s: float | None
    body: bytes


class Transport:
    """Connections to the endpoints, kept between requests. Belongs to one event loop.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._timeouts: Timeouts = settings.timeouts
        self._max_bytes = settings.max_answer_mb << 20
        num = settings.max_uploads + settings.max_polls + REMOVALS
        # A redirect would carry the token elsewhere: the service's own URL has to be given.
        self._client = httpx2.AsyncClient(
            headers=HEADERS,
            follow_redirects=False,
            limits=httpx2.Limits(max_connections=num, max_keepalive_connections=num),
        )

    async def send(self, request: HttpRequest, limit_s: float) -> Reply:
        """Send a request; return the reply.

        Args:
            request: its content decides how long the reply may take.
            limit_s: for all of it, in seconds.

        Raises:
            TryFailed: it failed on its way.
            AnswerInvalidError: the reply is too large.
        """
        reply_s = self._reply_s(request)
        connect_s = self._timeouts.connect_s
        whole_s = min(limit_s, connect_s + reply_s)
        timeout = httpx2.Timeout(connect=connect_s, read=reply_s, write=reply_s, pool=whole_s)
        try:
            async with asyncio.timeout(whole_s):
                return await self._send(request, timeout)
        except TimeoutError:
            raise TryFailed(f"{shown(request.url)} did not answer within {whole_s:.3g} s") from None
        except httpx2.TimeoutException as error:
            raise TryFailed(f"{shown(request.url)} did not answer in time ({type(error).__name__})") from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise TryFailed(f"{shown(request.url)} did not answer: {reason[:200]}") from None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def _reply_s(self, request: HttpRequest) -> float:
        if request.method == "POST" and not request.headers.get("content-type", "").endswith("urlencoded"):
            return self._timeouts.enqueue_s(len(request.content))
        return self._timeouts.poll_s + request.wait_s

    async def _send(self, request: HttpRequest, timeout: httpx2.Timeout) -> Reply:
        body, size = list[bytes](), 0
        async with self._client.stream(
            request.method, request.url, headers=dict(request.headers), content=request.content, timeout=timeout
        ) as response:
            async for chunk in response.aiter_bytes():
                size += len(chunk)
                if size > self._max_bytes:
                    raise AnswerInvalidError(
                        f"the reply of {shown(request.url)} is larger than {self._max_bytes >> 20} MiB; raise "
                        "max_answer_mb, or lower max_request_samples"
                    )
                body.append(chunk)
            delay_s = retry_after_s(response.headers.get("retry-after"), time.time())
            return Reply(response.status_code, delay_s, b"".join(body))

"""Client of an OpenAI-compatible API: one question, one answer, within a time limit."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any, Final

import httpx2

ANSWER_BYTES: Final = 1 << 20
"""A longer response is refused."""
_AGAIN: Final = frozenset((408, 409, 425, 429, 500, 502, 503, 504, 529))
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 8.0
_LEAST_S: Final = 0.05
"""With less time left nothing is asked."""


class JudgeError(Exception):
    """The judge gave no answer; the text is the end of a sentence, and contains neither the key nor the response."""


class RetryableError(JudgeError):
    """The same, where another try may help."""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s
        """How long the server wants to be left alone."""


class JudgeClient:
    """Thread-safe. An event loop in its own thread ends each question at its time limit, whatever the server sends.

    Args:
        base_url: as `https://api.openai.com/v1`.
        key: of the API; empty for none.
        num_connections: at most open at a time.
    """

    def __init__(self, base_url: str, key: str, num_connections: int) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        limits = httpx2.Limits(max_connections=num_connections, max_keepalive_connections=num_connections)
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._client = httpx2.AsyncClient(headers=headers, limits=limits, follow_redirects=False, trust_env=False)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="judge-client", daemon=True).start()

    def ask(self, body: dict[str, Any], timeout_s: float) -> str:
        """Return the text of the answer to a chat.

        Raises:
            JudgeError: there is none within `timeout_s`.
        """
        return asyncio.run_coroutine_threadsafe(self._ask(body, timeout_s), self._loop).result()

    async def _ask(self, body: dict[str, Any], timeout_s: float) -> str:
        data = bytearray()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", self._url, json=body, timeout=timeout_s) as response,
            ):
                if response.headers.get("content-encoding", "identity") != "identity":  # it may grow a thousandfold
                    raise JudgeError("its response is compressed, which was not asked for")
                async for part in response.aiter_raw():
                    data += part
                    if len(data) > ANSWER_BYTES:
                        raise JudgeError(f"its response is longer than {ANSWER_BYTES} bytes")
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise RetryableError(f"it did not answer within {timeout_s:.3g} s ({type(error).__name__})") from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise RetryableError(f"it cannot be reached ({type(error).__name__})") from None
        if response.status_code in _AGAIN:
            pause_s = _seconds(response.headers.get("retry-after"))
            raise RetryableError(f"it answered with status {response.status_code}", pause_s)
        if response.status_code != 200:
            raise JudgeError(f"it answered with status {response.status_code}")
        return _content(bytes(data))


def _content(data: bytes) -> str:
    try:
        text = json.loads(data)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise RetryableError("its response is no chat completion") from None
    if not isinstance(text, str):
        raise RetryableError("its response has no text")
    return text


def _seconds(header: str | None) -> float:
    try:
        seconds = float(header or 0.0)
    except ValueError:  # a date
        return _LONGEST_PAUSE_S
    return seconds if 0.0 <= seconds < float("inf") else 0.0


def pause_before(attempt: int, error: RetryableError) -> float:
    """Return how long to wait before a further try, in seconds: a random part of a limit that doubles.

    Many workers that have failed together do not come again together.
    """
    limit_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
    return error.pause_s + random.uniform(0.0, limit_s)


def has_time(until: float) -> bool:
    """Return whether there is time for a question before `until`."""
    return until - time.monotonic() > _LEAST_S

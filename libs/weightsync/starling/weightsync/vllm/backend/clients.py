"""Clients of engines for a trainer: one that lives in the trainer's process, and servers over HTTP."""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from starling.common.errors import WeightsError

log = logging.getLogger(__name__)

READY_CHECK_S: Final = 0.5
"""Interval at which a server that starts is asked."""
READY_ANSWER_S: Final = 5.0


class LocalEngine:
    """The `LLM` object of vLLM in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join the trainer."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """Have every worker switch."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, label the tokens sampled from now on, and drop the prefixes cached with the old weights."""
        self._llm.finish_weight_update(weight_version)
        self._llm.reset_prefix_cache()


class HttpEngines:
    """Servers of vLLM over its HTTP routes for reinforcement learning, which `VLLM_SERVER_DEV_MODE=1` enables.

    Args:
        urls: of the servers, for example ``http://localhost:8000``.
        timeout_s: of one call.
    """

    def __init__(self, urls: str | Sequence[str], timeout_s: float = 600.0) -> None:
        self.urls = [_plain(url) for url in ([urls] if isinstance(urls, str) else urls)]
        """Of the servers that are called, without a slash at the end."""
        self._timeout_s = timeout_s

    def remove(self, url: str) -> None:
        """Call a server no longer, which has gone. Raises WeightsError if it is none of `urls`."""
        if _plain(url) not in self.urls:
            raise WeightsError(f"There is no engine {url}; there is {', '.join(self.urls) or 'none'}.")
        self.urls.remove(_plain(url))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join the trainer. Raises WeightsError if a server refuses, or does not answer in time."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update. Raises WeightsError as above."""
        self._post("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Have every worker switch. Raises WeightsError as above."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, and label the tokens sampled from now on. Raises WeightsError as above."""
        self._post("finish_weight_update", None if weight_version is None else {"weight_version": weight_version})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation; running requests go on afterwards.

        After an error within, the engines stay paused, because they may hold two versions. Raises WeightsError as
        `pause` and `resume`.
        """
        self.pause()
        yield
        self.resume()

    def pause(self) -> None:
        """Pause generation; running requests are kept, and compute their cache anew.

        Raises:
            WeightsError: as above. Those that have paused generate again.
        """
        failed = self._failures_of("pause?mode=keep&clear_cache=true", self.urls)
        for error in failed.values():
            for url, why in self._failures_of("resume", [url for url in self.urls if url not in failed]).items():
                log.warning("%s stays paused: %s", url, why)
            raise error

    def resume(self) -> None:
        """Go on after `pause`. Raises WeightsError as above."""
        self._post("resume")

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all servers answer. Raises WeightsError if one does not within `timeout_s`."""
        end = time.monotonic() + timeout_s
        for url in self.urls:
            while not _is_ready(url):
                if time.monotonic() > end:
                    raise WeightsError(f"{url} is not ready after {timeout_s:g} s: start vLLM there, or see its log.")
                time.sleep(READY_CHECK_S)

    def _post(self, route: str, body: Any = None) -> None:
        """Call a route of all servers at once."""
        for error in self._failures_of(route, self.urls, body).values():
            raise error

    def _failures_of(self, route: str, urls: Sequence[str], body: Any = None) -> dict[str, WeightsError]:
        """Call a route of some servers at once; return why it failed, by server.

        Raises:
            WeightsError: all servers have been removed.
        """
        if not self.urls:
            raise WeightsError("There are no engines to call: give HttpEngines a URL.")
        with ThreadPoolExecutor(len(self.urls)) as pool:
            errors = pool.map(lambda url: self._failure_of(f"{url}/{route}", body), urls)
            return {url: error for url, error in zip(urls, errors, strict=True) if error is not None}

    def _failure_of(self, url: str, body: Any) -> WeightsError | None:
        try:
            self._post_one(url, body)
        except WeightsError as error:
            return error
        return None

    def _post_one(self, url: str, body: Any) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data or b"", {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace").strip()
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise WeightsError(f"{url} answered {error.code} {told[:500]}{hint}.") from error
        except OSError as error:
            raise WeightsError(f"{url} does not answer: {getattr(error, 'reason', error)}.") from error


def _plain(url: str) -> str:
    return url.rstrip("/")


def _is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=READY_ANSWER_S).close()
    except OSError:
        return False
    return True

"""Servers of vLLM over HTTP, of which some do not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from starling.common.errors import WeightsError
from starling.weightsync.vllm.backend.clients import HttpEngines

PAUSE, RESUME = "/pause?mode=keep&clear_cache=true", "/resume"


@contextmanager
def server(refuses: str = "") -> Iterator[tuple[str, list[str]]]:
    """Start a server that answers all calls but one; return its URL, and the calls that it gets."""
    calls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            calls.append(self.path)
            self.send_response(500 if self.path == refuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", calls
    finally:
        made.shutdown()
        made.server_close()


def test_engines_generate_after_a_pause_that_one_of_them_refuses() -> None:
    with server() as (first, first_calls), server(refuses=PAUSE) as (second, second_calls):
        engines = HttpEngines([first, second])
        with pytest.raises(WeightsError, match=rf"^{second}/pause\S* answered 500"), engines.paused():
            pytest.fail("not all are paused")
        assert first_calls == [PAUSE, RESUME]
        assert second_calls == [PAUSE]


def test_engines_generate_after_a_pause_that_one_of_them_did_not_answer() -> None:
    with server() as (gone, _):
        pass
    with server() as (url, calls):
        with pytest.raises(WeightsError, match=rf"^{gone}/pause\S* does not answer"):
            HttpEngines([gone, url]).pause()
        assert calls == [PAUSE, RESUME]


def test_engines_stay_paused_after_an_error_in_the_pause() -> None:
    with server() as (url, calls):
        with pytest.raises(WeightsError, match="not adopted"), HttpEngines(url).paused():
            raise WeightsError("Version 1 was not adopted.")
        assert calls == [PAUSE]


def test_engine_is_taken_out_by_the_url_that_it_was_given_by() -> None:
    with server() as (url, calls):
        engines = HttpEngines([f"{url}/", "http://127.0.0.1:9/"])
        engines.remove("http://127.0.0.1:9/")
        assert engines.urls == [url]
        engines.resume()
        assert calls == [RESUME]
        with pytest.raises(WeightsError, match=rf"^There is no engine http://127.0.0.1:9; there is {url}\.$"):
            engines.remove("http://127.0.0.1:9")
        engines.remove(f"{url}/")
        with pytest.raises(WeightsError, match=r"^There are no engines to call: give HttpEngines a URL\.$"):
            engines.pause()

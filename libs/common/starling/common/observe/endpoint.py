"""HTTP endpoint of a service: `/healthz`, `/readyz` and `/metrics`, in a thread of its own.

It reads what the working loop has stored in a `StatusPage`, and figures of the process from the kernel. Metrics may ask
for a token; health does not, as a kubelet has none.
"""

from __future__ import annotations

import hmac
import json
import os
import resource
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import structlog

from starling.common.addresses import is_loopback, join_address, split_address
from starling.common.errors import ConfigError
from starling.common.http.small import SmallRequest, SmallResponse, SmallServer
from starling.common.observe.metrics import CONTENT_TYPE, Family, Samples, render
from starling.common.observe.page import StatusPage
from starling.common.settings import ObserveSettings

log = structlog.get_logger(__name__)

MAX_TOKEN_BYTES: Final = 4096
RENDER_INTERVAL_S: Final = 1.0
"""The text of the same metrics is made at most so often, however often it is asked for."""

FAMILIES: Final = (
    Family("starling_service_info", "gauge", "1, with the name of the process and its version.", ("name", "version")),
    Family("starling_service_ready", "gauge", "1 if `/readyz` answers 200, else 0."),
    Family("starling_service_turn_age_seconds", "gauge", "Time since the working loop has turned."),
    Family("process_start_time_seconds", "gauge", "When the process was started, in seconds since 1970."),
    Family("process_cpu_seconds_total", "counter", "Processor time of the process."),
    Family("process_resident_memory_bytes", "gauge", "Resident memory of the process."),
    Family("process_open_fds", "gauge", "Open file descriptors of the process."),
)
"""Metrics of every service."""


class Endpoint:
    """The endpoint of one process.

    Args:
        settings: of the endpoint, whose address is not empty.
        name: of the process.
        page: what it shows.
        families: of the service, whose samples are on the page.

    Raises:
        ConfigError: the address is none, cannot be bound, or others can reach it and there is no token.
    """

    def __init__(self, settings: ObserveSettings, name: str, page: StatusPage, families: Sequence[Family]) -> None:
        host, port, self._token = checked_endpoint(settings)
        self._page, self._families = page, (*FAMILIES, *families)
        self._started_at = time.time()
        self._info = (("name", name), ("version", _version()))
        self._text, self._rendered_at = b"", -RENDER_INTERVAL_S
        self._rendered: Samples | None = None
        """Those that are in the text."""
        self._server = SmallServer(host, port, self._answer, "observe.http")
        self.url = f"http://{join_address(host, self._server.port)}"

    def start(self) -> None:
        """Answer from now on."""
        self._server.start()
        log.info("endpoint", url=self.url)

    def close(self) -> None:
        """Stop."""
        self._server.close()

    # --- in the thread of the server -------------------------------------------------------------------------------

    def _answer(self, request: SmallRequest) -> SmallResponse:
        match request.path:
            case "/healthz":
                return self._health()
            case "/readyz":
                return self._readiness()
            case "/metrics":
                return self._metrics(request.authorization)
        return SmallResponse(404, b"/healthz, /readyz and /metrics are here\n")

    def _health(self) -> SmallResponse:
        view, now = self._page.view, time.monotonic()
        fields = {"status": "ok" if view.is_alive(now) else "stalled", "turned_s": round(now - view.turned_at, 3)}
        return _json(200 if view.is_alive(now) else 503, fields)

    def _readiness(self) -> SmallResponse:
        view = self._page.view
        if not view.is_alive(time.monotonic()):
            return _json(503, {"status": "stalled"})
        if view.is_ready:
            return _json(200, {"status": "ok"})
        return _json(503, {"status": "ends" if view.is_stopping else "starts, or waits for its controller"})

    def _metrics(self, authorization: str) -> SmallResponse:
        scheme, _, token = authorization.partition(" ")
        if self._token and not (
            scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._token.encode())
        ):
            return SmallResponse(401, b"the token is missing or wrong\n")
        now, samples = time.monotonic(), self._page.samples
        if samples is not self._rendered or now - self._rendered_at >= RENDER_INTERVAL_S:
            self._text = render(self._families, {**self._own_samples(now), **samples}).encode()
            self._rendered, self._rendered_at = samples, now
        self._page.note_scrape()
        return SmallResponse(200, self._text, CONTENT_TYPE)

    def _own_samples(self, now: float) -> Samples:
        view, usage = self._page.view, resource.getrusage(resource.RUSAGE_SELF)
        return {
            ("starling_service_info", self._info): 1,
            ("starling_service_ready", ()): int(view.is_ready and view.is_alive(now)),
            ("starling_service_turn_age_seconds", ()): max(0.0, now - view.turned_at),
            ("process_start_time_seconds", ()): self._started_at,
            ("process_cpu_seconds_total", ()): usage.ru_utime + usage.ru_stime,
            ("process_resident_memory_bytes", ()): _resident_bytes(),
            ("process_open_fds", ()): len(os.listdir("/proc/self/fd")),
        }


def open_endpoint(settings: ObserveSettings, name: str, page: StatusPage, families: Sequence[Family]) -> Endpoint:
    """Return an endpoint that answers. Raises ConfigError as `Endpoint`."""
    endpoint = Endpoint(settings, name, page, families)
    endpoint.start()
    return endpoint


def checked_endpoint(settings: ObserveSettings) -> tuple[str, int, str]:
    """Return host, port and token of an endpoint; the token is empty where it has none.

    Raises:
        ConfigError: the address is none, or others can reach it and there is no token.
    """
    found = split_address(settings.http)
    if found is None:
        raise ConfigError(f"observe.http = {settings.http!r} is no address; write host:port, as in 127.0.0.1:9464")
    host, port = found
    token = _read_token(settings.token_file)
    if not (token or is_loopback(host)):
        raise ConfigError(
            f"observe.http is {settings.http!r}, which others can reach, and there is no token: set "
            "observe.token_file to a file with one, or the host to 127.0.0.1"
        )
    return host, port, token


def _read_token(path: str) -> str:
    """Return the token in a file; empty without a file. Raises ConfigError."""
    if not path:
        return ""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"observe.token_file {path} cannot be read: {error.strerror}") from None
    token = data.decode("latin-1").strip()
    if not (0 < len(token) <= MAX_TOKEN_BYTES and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(f"observe.token_file {path} has no token; write one line of printable ASCII into it")
    return token


def _json(status: int, fields: Mapping[str, object]) -> SmallResponse:
    return SmallResponse(status, json.dumps(fields).encode() + b"\n", "application/json")


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _version() -> str:
    try:
        return version("starling-common")
    except PackageNotFoundError:
        return ""

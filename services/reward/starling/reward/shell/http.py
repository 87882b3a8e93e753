"""HTTP front end: the server's thread, and its requests in the scoring thread."""

from __future__ import annotations

import asyncio
import os
import queue
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from starling.common.http.server import HttpAddress, HttpServer, check_address, replica_port
from starling.common.observe.metrics import Samples
from starling.common.observe.page import SAMPLE_INTERVAL_S
from starling.common.settings import environment_variable
from starling.common.wakeup import Wakeup
from starling.reward.core import requests as core
from starling.reward.core.groups import CancelTask, SubmitTask
from starling.reward.core.media import Input
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import Score
from starling.reward.http.app import make_application
from starling.reward.http.cosmos.pushed import PushedScores
from starling.reward.http.cosmos.routes import BODY_FORM, REPLICA_VARIABLE, CosmosService, scorers_by_type
from starling.reward.http.schema import RewardsReader
from starling.reward.http.settings import TOKEN_VARIABLES, HttpSettings
from starling.reward.http.status import ServiceStatus
from starling.reward.http.stores.make import make_store
from starling.reward.http.table import RequestTable
from starling.reward.score.decode.geometry import pixel_bytes, read_geometries
from starling.reward.score.decode.start import AnyPool
from starling.reward.score.metrics import Latencies
from starling.reward.score.workers.shared import MediaMemory
from starling.reward.settings import RewardSettings

log = structlog.get_logger(__name__)

STORE_OPEN_S: Final = 30.0
STORE_CLOSE_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A client has given up a request."""

    id: str


def check_http(settings: HttpSettings, replica: str) -> None:
    """Raise ConfigError when a service cannot listen, before its scorers are loaded, which can take minutes."""
    settings.check_token(_token(settings))
    check_address(_address(settings, replica))


def _token(settings: HttpSettings) -> str:
    return (settings.token or next(filter(None, map(os.environ.get, TOKEN_VARIABLES)), "")).strip()


def _address(settings: HttpSettings, replica: str) -> HttpAddress:
    return HttpAddress(settings.host, replica_port(settings.port, replica), "reward.http")


class HttpFrontEnd:
    """Requests of HTTP clients.

    Args:
        settings: of the service.
        replica: its name, whose number is added to the port.
        folder: of the files of the service.
        media: memory for media.

    Raises:
        ConfigError: the address cannot be bound, others can reach it and there is no token, or the store is not usable.
    """

    def __init__(self, settings: RewardSettings, replica: str, folder: Path, media: MediaMemory) -> None:
        http = settings.http
        token = _token(http)
        http.check_token(token)
        self._scorers = settings.weighted_scorers()
        self._requests = core.RewardRequests(self._scorers, settings.bounds, http.timeout_s)
        self._arrived: queue.SimpleQueue[core.RewardRequest | CancelRequest] = queue.SimpleQueue()
        self._wakeup = Wakeup()
        self._status = ServiceStatus()
        self._answered: Counter[str] = Counter()
        self._latencies, self._sampled_at = Latencies("http"), float("-inf")
        self._samples: Samples = {}
        """Measured about once a second."""
        geometries = read_geometries(settings.decoder.folders)
        reader = RewardsReader(
            self._scorers,
            lambda: self._status.inputs,
            media,
            lambda num_bytes: self._table.check_room(num_bytes),
            geometries,
        )
        self._table = RequestTable(
            http,
            make_store(http, folder / f"requests-{replica}.sqlite"),
            self._arrive,
            lambda id: self._arrive(CancelRequest(id)),
            readers={"v1": reader.read_again, BODY_FORM: lambda data, id: self._cosmos.read(data, id).request},
            media=media,
            pixel_bytes=lambda request: pixel_bytes(request, self._scorers, self._status.inputs, geometries),
        )
        titles = tuple(scorer.title for scorer in settings.scorers)
        self._cosmos = CosmosService(
            table=self._table,
            labels=titles,
            scorers=scorers_by_type([(scorer.title, scorer.name) for scorer in settings.scorers]),
            memory=media,
            pushed=PushedScores(http.pushed_types, http.timeout_s, http.result_ttl_s),
            inputs=lambda: self._status.inputs,
            replica_id=environment_variable(REPLICA_VARIABLE) or "",
        )
        self._server = HttpServer(
            make_application(http, token, self._table, reader, lambda: self._status, self._cosmos),
            _address(http, replica),
            headers_s=http.read_timeout_s,
            unread_s=http.write_timeout_s,
        )

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `receive` has something to do."""
        return (self._wakeup.fileno(),)

    @property
    def serves(self) -> bool:
        """Whether requests are accepted: from `start` on."""
        return True

    def describe(self) -> str:
        """Return the state in one line."""
        return f"serves {self._server.url}, {sum(self._answered.values())} samples scored"

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread, and in a signal handler."""
        self._wakeup.set()

    def start(self) -> None:
        """Accept requests."""
        self._server.start()
        self._server.wait_started()
        asyncio.run_coroutine_threadsafe(self._table.start(), self._server.loop).result(STORE_OPEN_S)
        log.info("listening", base_url=self._server.url)

    def receive(self, pool: AnyPool) -> bool:
        """Begin the requests that have arrived, and end those whose time is up. Returns True: clients never end it."""
        self._wakeup.clear()
        now = time.monotonic()
        while not self._arrived.empty():
            match self._arrived.get():
                case core.RewardRequest() as request:
                    self._latencies.begin(request.id, now)
                    self._carry_out(pool, self._requests.add(request, now))
                case CancelRequest(id=id):
                    self._latencies.forget(id)
                    self._carry_out(pool, self._requests.cancel(id))
        self._carry_out(pool, self._requests.expire(now))
        return True

    def measure(self) -> None:
        """Nothing is left to do: the latencies of requests are always measured."""

    def samples(self) -> Samples:
        """Return the measured metrics."""
        return self._latencies.samples()

    def next_deadline(self) -> float | None:
        """When `receive` must be called at the latest, in monotonic seconds; None without such a time."""
        return self._requests.next_deadline()

    def record(self, pool: AnyPool, score: Score) -> None:
        """Record a score, unless it is of another front end."""
        self._carry_out(pool, self._requests.record(score))

    def report(self, pool: AnyPool) -> None:
        """Say that the scoring thread is alive, and what it does."""
        now = time.monotonic()
        if now - self._sampled_at >= SAMPLE_INTERVAL_S:
            self._samples, self._sampled_at = {**pool.samples(), **self._latencies.samples()}, now
        forms = [pool.form_of(scorer) for scorer in range(len(self._scorers))]
        inputs = tuple(form and form.media for form in forms)
        self._status = ServiceStatus(
            said_at=now,
            scorers=_described(self._scorers, inputs),
            inputs=inputs,
            is_ready=pool.is_ready,
            quarantined=pool.quarantined(),
            gauges=pool.gauges(),
            answered=dict(self._answered),
            samples=self._samples,
        )

    def close(self, reason: str) -> None:
        """Stop within a few seconds; clients that wait are told."""
        closing = asyncio.run_coroutine_threadsafe(self._table.close(), self._server.loop)
        with suppress(TimeoutError):
            closing.result(STORE_CLOSE_S)
        self._server.close()
        self._wakeup.close()

    def _carry_out(self, pool: AnyPool, commands: list[core.Command]) -> None:
        for command in commands:
            match command:
                case SubmitTask(task=task):
                    pool.submit(task)
                case CancelTask(lease=task_id):
                    pool.cancel(task_id)
                case core.Answer(result=result):
                    self._latencies.end(result.id, time.monotonic())
                    self._answered.update(map(str, result.statuses))
                    self._server.loop.call_soon_threadsafe(self._table.finish, result)

    def _arrive(self, one: core.RewardRequest | CancelRequest) -> None:
        self._arrived.put(one)
        self._wakeup.set()


def _described(scorers: Sequence[WeightedScorer], inputs: Sequence[Input | None]) -> tuple[dict[str, Any], ...]:
    """Return what clients are told of the scorers."""
    return tuple(
        {
            "label": scorer.label,
            "weight": scorer.weight,
            "use": "evaluation" if scorer.evaluates else "training",
            "media": media,
        }
        for scorer, media in zip(scorers, inputs, strict=True)
    )

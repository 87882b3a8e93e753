"""The reward process: scores what a controller or HTTP clients send, every scorer in a process that can be killed."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from starling.common.errors import ConfigError
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import STOP_S, StopSignal, end_process, end_within, run_service
from starling.common.observe.tracing.traces import open_traces
from starling.common.service import ServiceArguments, link_settings, serve
from starling.common.settings import ServiceSettings
from starling.reward.core.media import INPUTS, Input
from starling.reward.core.samples import Score
from starling.reward.cosmos_settings import translate
from starling.reward.score.decode.start import AnyPool, check_pool, open_pool
from starling.reward.score.workers.shared import MediaMemory, raise_descriptor_limit
from starling.reward.score.workers.time_slice import SHORT_S, ask_for_time_slice
from starling.reward.settings import RewardSettings
from starling.reward.shell.controller import ControllerFrontEnd
from starling.reward.shell.quarantine import Quarantine
from starling.reward.shell.replay import replay

if TYPE_CHECKING:
    from starling.common.observe.metrics import Family, Samples

log = structlog.get_logger(__name__)

IDLE_S = 0.5
REPORT_INTERVAL_S = 0.1
SWITCH_S = 0.0005
"""How long a thread may have Python's lock while others wait: the start of a worker, in a thread of its own, has ten
milliseconds of work, which requests of other scorers would wait for."""
LOADS = "loads its scorers"
"""The state until every scorer has been loaded once."""


class RewardProcess(ServiceSettings):
    """All settings of a reward process."""

    reward: RewardSettings
    diffusion: dict[str, Any] | None = None
    """Samples of a diffusion model, for rollouts and policies. Here it only matters whether there is such a section:
    completions are latents then."""

    def inputs(self) -> tuple[Input, ...]:
        """Return what the samples that are scored may have."""
        if self.reward.http.enabled:
            return INPUTS
        if self.diffusion is None:
            return ("text",)
        return ("text", "latents", "pixels") if self.reward.decoder.folders else ("text", "latents")


class FrontEnd(Protocol):
    """Where tasks come from and their scores go."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Readable when `receive` may have something to do."""

    def wake(self) -> None:
        """Make `descriptors` readable; from any thread, and in a signal handler."""

    @property
    def serves(self) -> bool:
        """Whether work can arrive."""

    def describe(self) -> str:
        """Return the state in one line."""

    def start(self) -> None:
        """Begin to receive."""

    def receive(self, pool: AnyPool) -> bool:
        """Handle what has arrived. Returns False when nothing more will come."""

    def next_deadline(self) -> float | None:
        """When `receive` must be called at the latest, in monotonic seconds; None without such a time."""

    def record(self, pool: AnyPool, score: Score) -> None:
        """Record a score, unless it is of another front end."""

    def report(self, pool: AnyPool) -> None:
        """Publish the state of the workers."""

    def measure(self) -> None:
        """Measure latencies from now on."""

    def samples(self) -> Samples:
        """Return the measured metrics."""

    def close(self, reason: str) -> None:
        """Stop. Raises what ended it, if that was a failure."""


class Shell:
    """One reward service: its workers, and one or two front ends."""

    def __init__(self, settings: RewardProcess, arguments: ServiceArguments) -> None:
        """Check every scorer before joining the run. Raises ConfigError when one cannot be used."""
        if not arguments.controller and not settings.reward.http.enabled:
            raise ConfigError(
                "--controller is missing; give tcp://host:port, or set reward.http.enabled = true to serve HTTP only"
            )
        if settings.reward.http.enabled:
            # Imported here: a replica without HTTP does not load the web server's packages.
            from starling.reward.shell.http import HttpFrontEnd, check_http

            check_http(settings.reward.http, arguments.name)
        check_pool(settings.reward, inputs=settings.inputs())
        self._settings = settings.reward
        # A worker that does not start in time is started again.
        self._start_limit_s = 2 * settings.reward.start_timeout_s + settings.network.connect_s
        raise_descriptor_limit()
        self._memory = MediaMemory()
        self._quarantine = Quarantine(arguments.folder / "quarantine", arguments.name, settings.reward)
        self._fronts: list[FrontEnd] = []
        if arguments.controller:
            link = link_settings(arguments, settings)
            traces = open_traces(settings.observe.traces, settings.run.id, "reward", arguments.name)
            self._fronts.append(ControllerFrontEnd(settings.reward, link, arguments.folder, self._memory, traces))
        if settings.reward.http.enabled:
            self._fronts.append(HttpFrontEnd(settings.reward, arguments.name, arguments.folder, self._memory))
        self._reported_at = float("-inf")
        self._begun_at = time.monotonic()
        self._is_loaded = False

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the controller ends the run, or `stop` is requested."""
        reason = "its service failed"
        self._notify = notify
        notify.starting(LOADS, self._start_limit_s)
        stop.install(self._fronts[0].wake)
        sys.setswitchinterval(SWITCH_S)
        ask_for_time_slice(SHORT_S)
        if notify.page is not None:
            for front in self._fronts:
                front.measure()
        # The workers die with the thread that starts them, so the pool belongs to the main thread.
        with open_pool(self._settings, self._memory) as pool:
            if notify.page is not None or self._settings.http.enabled:
                pool.measure()
            for front in self._fronts:
                front.start()
            log.info("ready", scorers=[scorer.title for scorer in self._settings.scorers])
            self._report(pool)
            try:
                self._serve(pool, stop)
                reason = f"stopped by {stop.name}" if stop else "the run is over"
            finally:
                notify.stopping(reason, STOP_S)
                end_within(STOP_S)
                for front in reversed(self._fronts):
                    front.close(reason)

    def _serve(self, pool: AnyPool, stop: StopSignal) -> None:
        poller = select.poll()
        for front in self._fronts:
            for descriptor in front.descriptors:
                poller.register(descriptor, select.POLLIN)
        poller.register(pool.fileno(), select.POLLIN)
        while not stop:
            # Right before the wait, so that no message is left unread during it.
            if not all(front.receive(pool) for front in self._fronts):
                return
            poller.poll(self._patience_s(pool) * 1000)
            for score in pool.poll():
                for front in self._fronts:
                    front.record(pool, score)
            self._keep_lost(pool)
            if time.monotonic() - self._reported_at >= REPORT_INTERVAL_S:
                self._report(pool)

    def _keep_lost(self, pool: AnyPool) -> None:
        # A method, so that no variable of the loop holds the media of the last one until the next.
        for lost in pool.take_lost():
            self._quarantine.add(lost)

    def _report(self, pool: AnyPool) -> None:
        self._reported_at = time.monotonic()
        if not self._is_loaded and pool.is_ready:
            self._is_loaded = True
            log.info("scorers_loaded", after_s=round(self._reported_at - self._begun_at, 3))
        for front in self._fronts:
            front.report(pool)
        serves = self._is_loaded and all(front.serves for front in self._fronts)
        self._notify.turn(self._describe, serves=serves, samples=partial(self._samples, pool))

    def _samples(self, pool: AnyPool) -> Samples:
        """Return the metrics of the endpoint of health and metrics."""
        from starling.reward.score.metrics import gauge_samples

        found = {**gauge_samples(pool.gauges()), **pool.samples()}
        for front in self._fronts:
            found |= front.samples()
        return found

    def _describe(self) -> str:
        """Return the state in one line, for the service manager."""
        return ", ".join(front.describe() for front in self._fronts) if self._is_loaded else LOADS

    def _patience_s(self, pool: AnyPool) -> float:
        """Return how long nothing need be done unless a descriptor is readable."""
        deadlines = [pool.next_deadline(), *(front.next_deadline() for front in self._fronts)]
        first = min((one for one in deadlines if one is not None), default=None)
        return IDLE_S if first is None else min(IDLE_S, max(0.0, first - time.monotonic()))


def _families() -> Sequence[Family]:
    """Return their families."""
    from starling.reward.score.metrics import FAMILIES

    return FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run a reward service, or a command that needs none."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["replay"]:
        return run_service("reward", lambda: replay(arguments[1:]))
    if arguments[:1] == ["bench"]:
        # Imported here: a service does not load the client.
        from starling.reward.shell.bench import bench

        return run_service("reward", lambda: bench(arguments[1:]))
    return serve("reward", RewardProcess, Shell, arguments, translate=translate, families=_families)


if __name__ == "__main__":
    end_process(main())

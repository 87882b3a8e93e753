"""Stop 10 of the walk, done: a thread pulls a version, beside the generation, and the answer tells how it went."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starling.common.errors import WeightsError
from starling.common.wire import messages as wire
from starling.rollout.shell.results import lease_progress
from starling.weightsync.plan.offer import decode_offer
from starling.weightsync.plan.planner import decode_plan

if TYPE_CHECKING:
    from starling.common.net.link import ControllerLink
    from starling.rollout.core.machine import Action, AdoptionMode, PullWeights, RolloutMachine, SwitchWeights
    from starling.rollout.engine.base import AdoptionReport, Engine
    from starling.weightsync.puller.report import PullReport

SPLIT = ("prepare_s", "read_s", "unpack_s", "digest_s", "confirm_s")
"""What is told of a pull beside its length."""


@dataclass(frozen=True)
class PullEnded:
    """The pulling thread has done."""

    lease: str
    problem: str | None


class Adoptions:
    """The pulls of a replica, one after another.

    Args:
        link: is told how far a pull is, and gets a `PullEnded` when it has ended.
        timeout_s: how long one may take.
        mode: what running requests do when new weights are there.
    """

    def __init__(self, link: ControllerLink, *, timeout_s: float, mode: AdoptionMode) -> None:
        self._link, self._timeout_s, self._mode = link, timeout_s, mode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._void = threading.Event()
        """Set when the pull under way is for nothing; each has its own."""
        self._pulling: Future[PullReport] | None = None
        self._report: PullReport | None = None
        self._in_place = False
        self._draining_since: float | None = None
        self._drain_s = 0.0

    def pull(self, engine: Engine, order: PullWeights) -> None:
        """Begin to pull what was ordered, for `engine`."""
        message, buffers = order.message, order.buffers
        void = self._void = threading.Event()
        self._in_place = order.in_place
        if not order.in_place:
            self._drain_s = 0.0  # here it drains after the pull

        def work() -> PullReport:
            return engine.pull(
                decode_offer(buffers[0]),
                decode_plan(buffers[1]),
                deadline_s=self._timeout_s,
                cancelled=void.is_set,
                progress=lambda progress: self._link.report_progress(message.lease, lease_progress(progress)),
                in_place=order.in_place,
            )

        def done(future: Future[PullReport]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._report = future.result()
            else:
                self._drain_s = 0.0
            # Whatever went wrong, the controller is told; unless it was in place, the old version stays in use.
            self._link.put(PullEnded(message.lease, None if error is None else f"{type(error).__name__}: {error}"))

        self._pulling = self._thread.submit(work)
        self._pulling.add_done_callback(done)

    def note(self, *, draining: bool) -> None:
        """Keep the time for which new weights wait for running requests."""
        now = time.perf_counter()
        if draining and self._draining_since is None:
            self._draining_since = now
        elif not draining and self._draining_since is not None:
            self._drain_s, self._draining_since = now - self._draining_since, None

    def switch(self, engine: Engine, core: RolloutMachine, order: SwitchWeights) -> list[Action]:
        """Put what was pulled in place, and tell of it; return what the core makes of it.

        Raises:
            EngineLostError: a part of `engine` is gone.
        """
        begin = time.perf_counter()
        try:
            adopted = engine.adopt(order.mode)
        except WeightsError as error:
            return core.not_switched(str(error))
        switch_s = time.perf_counter() - begin
        actions = core.switched(order.lease, proven=adopted.proven)
        self._link.report(version=core.version)
        if adopted.proven:
            self._link.answer(order.lease, self._answer(order.lease, adopted, switch_s))
        return actions

    def _answer(self, lease: str, adopted: AdoptionReport, switch_s: float) -> wire.WeightsAdopted:
        """Return what to tell of an adoption that took `switch_s` from the pull on."""
        report, drain_s = self._report, self._drain_s
        assert report is not None, "an adoption follows a pull"
        self._drain_s = 0.0
        return wire.WeightsAdopted(
            lease=lease,
            version=adopted.version,
            root=adopted.root,
            pull_s=report.seconds,
            pause_s=switch_s + (report.seconds if self._in_place else 0.0),
            size_bytes=report.size_bytes,
            sent_bytes=sum(report.bytes_by_source.values()),
            transport=report.transport,
            lanes=report.lanes,
            split={name: getattr(report, name) for name in SPLIT},
            mode=self._mode,
            recomputed_tokens=adopted.recomputed_tokens,
            drain_s=drain_s,
        )

    def void(self) -> None:
        """End the pull under way: its engine is gone, or this process goes."""
        self._void.set()

    def stop(self) -> None:
        """End the pull under way, and wait until nothing of it touches the engine's memory any more."""
        self.void()
        if self._pulling is not None:
            wait([self._pulling], self._timeout_s)

    def close(self) -> None:
        """End the pull under way, and begin no other; does not wait for it."""
        self.void()
        self._thread.shutdown(wait=False, cancel_futures=True)

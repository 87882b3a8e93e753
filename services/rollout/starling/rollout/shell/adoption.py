"""Adoption of weights (stop 10 of the walk): pulls a version in a thread during generation, and switches to it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starling.common.errors import WeightsError
from starling.common.net.limits import role_of
from starling.common.wire import messages as wire
from starling.rollout.shell.results import lease_progress
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import encode
from starling.weightsync.plan.planner import Plan, decode_plan
from starling.weightsync.transports.endpoints import check_offered_transports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starling.common.net.link import ControllerLink
    from starling.rollout.core.machine import Action, PullWeights, RolloutMachine, SwitchWeights
    from starling.rollout.engine.base import AdoptionReport, Engine
    from starling.rollout.settings import RolloutProcess
    from starling.weightsync.offers.offer import Offer
    from starling.weightsync.puller.report import PullReport

MAX_PLANS: Final = 4
"""Decoded plans that are kept: those of a policy and of some rollouts as sources."""
SPLIT = ("prepare_s", "read_s", "unpack_s", "digest_s", "confirm_s")
"""Phases of a pull that are reported in addition to its duration."""


@dataclass(frozen=True)
class PullEnded:
    """A pull has ended, with a problem if it failed."""

    lease: str
    problem: str | None


@dataclass(frozen=True)
class _FinishedPull:
    """A pull that succeeded, and the relays that it may have read from, by the addresses of their ranks."""

    report: PullReport
    relays: Mapping[str, str]

    def reads(self, source: str) -> tuple[wire.RankRead, ...]:
        """Return the largest reads; those from no relay are from `source`."""
        largest = sorted(self.report.reads, key=lambda read: -read.num_bytes)[: wire.MAX_READS]
        return tuple(
            wire.RankRead(
                source=self.relays.get(read.address, source),
                source_rank=read.source_rank,
                rank=read.rank,
                transport=read.transport,
                num_bytes=read.num_bytes,
                seconds=read.seconds,
            )
            for read in largest
        )


class Adoptions:
    """The pulls of a replica, one after another.

    Args:
        link: gets the progress of pulls, and a `PullEnded` at the end of each.
        settings: which transports may be opened, the limit of one pull, and what running requests do when new weights
            arrive.
    """

    def __init__(self, link: ControllerLink, settings: RolloutProcess) -> None:
        self._link, self._network = link, settings.network
        self._timeout_s, self._mode = settings.rollout.pull_timeout_s, settings.rollout.adoption
        self._transport = settings.rollout.transport
        self._plans: dict[bytes, Plan] = {}
        """The last plans, by their encoding: each version is mostly pulled by the plan of the one before."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._cancelled = threading.Event()
        """Cancels the current pull; each pull has its own event."""
        self._pulling: Future[_FinishedPull] | None = None
        self._finished: _FinishedPull | None = None
        self._in_place = False
        self._draining_since: float | None = None
        self._drain_s = 0.0

    def pull(self, engine: Engine, order: PullWeights) -> None:
        """Start the ordered pull for `engine`."""
        message, buffers = order.message, order.buffers
        cancel = self._cancelled = threading.Event()
        self._in_place = order.in_place
        if not order.in_place:
            self._drain_s = 0.0  # a drain comes after this pull

        def announce(offer: Offer) -> None:
            self._link.tell(wire.RelayOffered(lease=message.lease, version=message.version), (encode(offer),))

        problem = self._no_relay(in_place=order.in_place)
        if message.announce and problem:
            self._link.tell(wire.RelayOffered(lease=message.lease, version=message.version, problem=problem))

        def work() -> _FinishedPull:
            offer = decode_offer(buffers[0])
            self._check_transports(message.source, offer)
            relays = [decode_offer(encoded) for encoded in buffers[2 + message.has_root_plan :]]
            for name, relay in zip(message.relays, relays, strict=True):
                self._check_transports(name, relay)
            report = engine.pull(
                offer,
                self._plan(buffers[1]),
                root_plan=self._plan(buffers[2]) if message.has_root_plan else None,
                relays=relays,
                announce=announce if message.announce and not problem else None,
                deadline_s=self._timeout_s,
                cancelled=cancel.is_set,
                progress=lambda progress: self._link.report_progress(message.lease, lease_progress(progress)),
                in_place=order.in_place,
            )
            holders = {
                rank.address: name for name, one in zip(message.relays, relays, strict=True) for rank in one.ranks
            }
            return _FinishedPull(report, holders)

        def done(future: Future[_FinishedPull]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                self._finished = future.result()
            else:
                self._drain_s = 0.0
            # Every failure is reported; the old version stays in use, unless the pull was in place.
            self._link.put(PullEnded(message.lease, None if error is None else f"{type(error).__name__}: {error}"))

        self._pulling = self._thread.submit(work)
        self._pulling.add_done_callback(done)

    def _no_relay(self, *, in_place: bool) -> str:
        """Return why a pull is not served to others; empty if it can be."""
        if in_place:
            return "rollout.double_buffer is off: nothing is staged that others could read"
        if self._transport == "local":
            return "rollout.transport = 'local': its readers would not wait for what has not arrived"
        return ""

    def _plan(self, encoded: bytes) -> Plan:
        """Return the decoded plan. Called in the thread of pulls only."""
        if encoded not in self._plans:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[encoded] = decode_plan(encoded)
        return self._plans[encoded]

    def _check_transports(self, source: str, offer: Offer) -> None:
        """Refuse a transport that the settings do not allow. A policy has a transport of its own, unknown here."""
        choice = None if role_of(source) == "policy" else self._transport
        try:
            check_offered_transports(offer, choice, self._network.host, encrypt=self._network.encrypt_weights)
        except WeightsError as error:
            raise WeightsError(f"rollout.transport, network.encrypt_weights: {error}") from error

    def note(self, *, draining: bool) -> None:
        """Record how long new weights wait for running requests."""
        now = time.perf_counter()
        if draining and self._draining_since is None:
            self._draining_since = now
        elif not draining and self._draining_since is not None:
            self._drain_s, self._draining_since = now - self._draining_since, None

    def switch(self, engine: Engine, core: RolloutMachine, order: SwitchWeights) -> list[Action]:
        """Switch to the pulled weights, and answer the lease; returns the machine's actions.

        Raises:
            EngineLostError: a part of `engine` is gone.
        """
        begin, message = time.perf_counter(), core.adopting
        assert message is not None, "a switch follows a pull"
        try:
            adopted = engine.adopt(order.mode)
        except WeightsError as error:
            return core.switch_failed(str(error))
        switch_s = time.perf_counter() - begin
        # What the source sent is in place; whether it is what was published, the layout root says.
        is_published = not message.layout_roots or adopted.layout_root in message.layout_roots
        actions = core.switched(order.lease, proven=adopted.proven and is_published, answered=adopted.proven)
        if adopted.proven:
            self._link.answer(order.lease, self._answer(message, adopted, switch_s), version=core.version)
        else:
            self._link.report(version=core.version)
        return actions

    def _answer(self, message: wire.AdoptWeights, adopted: AdoptionReport, switch_s: float) -> wire.WeightsAdopted:
        """Return the answer for an adoption whose switch took `switch_s`."""
        finished, drain_s = self._finished, self._drain_s
        assert finished is not None, "an adoption follows a pull"
        report = finished.report
        self._drain_s = 0.0
        return wire.WeightsAdopted(
            lease=message.lease,
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
            layout_root=adopted.layout_root,
            source=message.relays[0] if message.relays else message.source,
            layout=message.layout,
            reads=finished.reads(message.source),
        )

    @property
    def last_report(self) -> PullReport | None:
        """The report of the last pull that succeeded."""
        return None if self._finished is None else self._finished.report

    def cancel(self) -> None:
        """Cancel the current pull."""
        self._cancelled.set()

    def stop(self) -> None:
        """Cancel the current pull, and wait until it no longer touches the engine's memory."""
        self.cancel()
        if self._pulling is not None:
            wait([self._pulling], self._timeout_s)

    def close(self) -> None:
        """Cancel the current pull and end the thread, without waiting."""
        self.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

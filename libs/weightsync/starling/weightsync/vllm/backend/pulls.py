"""One version on its way to all workers: plans, tickets, chains of relays, and the end of each pull."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, decode_offer
from starling.weightsync.offers.tickets import allowance, offer_for, reading_cost
from starling.weightsync.plan.fan_out import for_relays
from starling.weightsync.plan.layout import Layout, Place, encode
from starling.weightsync.plan.planner import Plan, PlanCache
from starling.weightsync.puller.report import PullReport
from starling.weightsync.vllm.backend.messages import Cancel, Pull, Pulled, Relayed
from starling.weightsync.vllm.backend.rendezvous import JoinedWorker, Rendezvous

log = logging.getLogger(__name__)

RELAY_S: Final = 5.0
"""How long a worker waits for the one before it in its chain to serve."""
GRACE_S: Final = 15.0
"""Extra time after the deadline, which the workers themselves enforce."""


@dataclass(frozen=True)
class WorkerPlan:
    """How one worker pulls from the trainer."""

    plan: bytes
    most_bytes: int
    """What it may read from each source; see `tickets.allowance`."""


class WorkerPlans:
    """The plans of all workers, and the chains in which those with equal layouts pull from each other.

    Args:
        relay_from_bytes: from this size on workers form chains.
    """

    def __init__(self, relay_from_bytes: float) -> None:
        self._relay_from_bytes = relay_from_bytes
        self._cache = PlanCache()
        self._plans: dict[str, WorkerPlan] = {}
        self._chain_of: dict[str, bytes] = {}
        self._engine_of: dict[str, str] = {}

    def update(self, trained: Layout, workers: Iterable[JoinedWorker]) -> None:
        """Plan for `workers` and forget all others.

        Raises:
            WeightsError: a worker needs a tensor that the trainer lacks, or has in another shape.
        """
        self._plans, self._chain_of, self._engine_of = {}, {}, {}
        for worker in workers:
            try:
                plan = self._cache.plan(trained, worker.layout)
            except WeightsError as error:
                raise WeightsError(
                    f"vLLM was started with another model than the trainer's. {error} Give both the same checkpoint."
                ) from error
            relayed = plan.total_bytes >= self._relay_from_bytes
            self._plans[worker.name] = _worker_plan(for_relays(plan) if relayed else plan)
            self._engine_of[worker.name] = worker.engine
            self._chain_of[worker.name] = _contents(worker.layout) if relayed else worker.name.encode()

    def forget(self, names: Iterable[str]) -> None:
        """Plan no longer for these workers, which have gone."""
        for name in names:
            del self._plans[name], self._chain_of[name], self._engine_of[name]

    def of(self, worker: JoinedWorker) -> WorkerPlan:
        """Return the plan of a worker. Raises WeightsError: it has joined since the plans were made."""
        plan = self._plans.get(worker.name)
        if plan is None:
            raise WeightsError(f"{worker.name} has joined since the plans were made: call join().")
        return plan

    @property
    def names(self) -> set[str]:
        """The workers that are planned for."""
        return {*self._plans}

    @property
    def engines(self) -> set[str]:
        """The engines of these workers."""
        return {*self._engine_of.values()}

    def check_present(self, workers: Iterable[JoinedWorker]) -> None:
        """Raise WeightsError if one that is planned for is not among `workers`, whose connection lasts."""
        gone = self.names - {worker.name for worker in workers}
        if gone:
            raise WeightsError(f"{min(gone)} has gone: start its engine again, and call join().")

    def chains(self, workers: Sequence[JoinedWorker]) -> list[list[JoinedWorker]]:
        """Return the workers by the chain that they are in. Those that pull in place are alone: they serve nothing."""
        found: dict[bytes, list[JoinedWorker]] = {}
        for worker in workers:
            key = self._chain_of[worker.name] if worker.stages else worker.name.encode()
            found.setdefault(key, []).append(worker)
        return list(found.values())


@dataclass
class _Started:
    """A pull that was ordered."""

    number: int
    chain: list[JoinedWorker]
    at: int
    """Its place in the chain."""
    begun_at: float


class PullRound:
    """The pulls of one version by all workers.

    An engine that goes during its pull ends nothing: readers of its workers turn to the trainer.
    """

    _last_number = 0

    def __init__(self, rendezvous: Rendezvous, plans: WorkerPlans, offer: Offer, deadline_s: float) -> None:
        self._rendezvous, self._plans, self._offer, self._deadline_s = rendezvous, plans, offer, deadline_s
        self._end = time.monotonic() + deadline_s
        self._started: dict[str, _Started] = {}
        self._workers: list[JoinedWorker] = []
        self._left: set[str] = set()
        """Those that have neither pulled nor gone."""
        self._reports: dict[str, PullReport] = {}
        self.lost: dict[str, str] = {}
        """Why workers have gone, by name."""

    def run(self) -> dict[str, PullReport]:
        """Have all workers pull; return their reports. Those that pull when they switch have none.

        Raises:
            WeightsError: a worker was gone before, or failed, or was late; or all have gone.
        """
        self._rendezvous.forget_lost()
        self._workers = workers = self._rendezvous.workers
        self._plans.check_present(workers)
        self._left = {worker.name for worker in workers}
        try:
            for chain in self._plans.chains(workers):
                self._order(chain, 0, None)
            while self._left:
                self._take()
            if len(self.lost) == len(workers):
                raise WeightsError(_gone(*next(iter(self.lost.items()))))
        except BaseException:  # whatever it is: end the other pulls, and re-raise
            self._cancel(workers)
            raise
        return self._reports

    def _take(self) -> None:
        """Wait for one event."""
        now = time.monotonic()
        if now > self._end + GRACE_S:
            raise WeightsError(
                f"{min(self._left)} did not pull version {self._offer.version} in {self._deadline_s:g} s."
            )
        event = self._rendezvous.next_event(min(now + RELAY_S / 5, self._end + GRACE_S))
        if event is None:
            self._order_late()
            return
        worker, message = event.worker, event.message
        started = self._started.get(worker.name)
        if message is None:
            self._lose(worker, event.problem)
            return
        if worker.name in self.lost or started is None or getattr(message, "number", -1) != started.number:
            return  # of an earlier version
        if isinstance(message, Relayed):
            self._order(started.chain, started.at + 1, decode_offer(message.offer))
        elif isinstance(message, Pulled):
            if message.problem:
                raise WeightsError(f"{worker.name} could not pull version {self._offer.version}: {message.problem}")
            if message.report is not None:
                self._reports[worker.name] = message.report
            self._left.discard(worker.name)
            self._order(started.chain, started.at + 1, None)  # unless it was ordered before

    def _lose(self, worker: JoinedWorker, problem: str) -> None:
        """Go on without the engine of a worker that has gone: its other workers cannot switch without it."""
        if worker.name in self.lost or worker not in self._workers:  # or a connection from before it joined again
            return
        log.warning("version %d goes to the other engines: %s", self._offer.version, _gone(worker.name, problem))
        of_engine = [other for other in self._workers if other.engine == worker.engine]
        for other in of_engine:
            self.lost[other.name] = other.lost = problem
            self._left.discard(other.name)
            self._reports.pop(other.name, None)
            other.link.close()
        for other in of_engine:
            started = self._started.get(other.name)
            if started is not None:
                self._order(started.chain, started.at + 1, None)

    def _order_late(self) -> None:
        """Order the pulls whose relay has announced nothing for a while."""
        for started in list(self._started.values()):
            if time.monotonic() > started.begun_at + RELAY_S:
                self._order(started.chain, started.at + 1, None)

    def _order(self, chain: list[JoinedWorker], at: int, relay: Offer | None) -> None:
        """Order the pull at a place of a chain, once, from the trainer and from the relay before it."""
        while at < len(chain) and chain[at].name in self.lost:
            at += 1
        if at >= len(chain) or chain[at].name in self._started:
            return
        worker, plan = chain[at], self._plans.of(chain[at])
        PullRound._last_number += 1
        number = PullRound._last_number
        if relay is not None and relay.version != self._offer.version:
            raise WeightsError(
                f"The relay before {worker.name} offers version {relay.version}, not {self._offer.version}."
            )

        def with_tickets(offer: Offer) -> bytes:
            return encode(offer_for(offer, worker.name.replace(" ", "_"), f"pull-{number}", plan.most_bytes, 0))

        self._started[worker.name] = _Started(number, chain, at, time.monotonic())
        order = Pull(
            number=number,
            offer=with_tickets(self._offer),
            plan=plan.plan,
            deadline_s=max(1.0, self._end - time.monotonic()),
            relays=() if relay is None else (with_tickets(relay),),
            announce=at + 1 < len(chain),
        )
        try:
            worker.link.send(order)
        except WeightsError as error:
            self._lose(worker, str(error))

    def _cancel(self, workers: Iterable[JoinedWorker]) -> None:
        for worker in workers:
            try:
                worker.link.send(Cancel())
            except WeightsError:
                pass  # it is gone


def _gone(name: str, problem: str) -> str:
    return f"{name} has gone: {problem}"


def _worker_plan(plan: Plan) -> WorkerPlan:
    cost = reading_cost(plan.total_bytes, plan.num_boxes)
    return WorkerPlan(encode(plan), allowance(cost, reading_cost(plan.distinct_bytes, plan.num_distinct_boxes)))


def _contents(layout: Layout) -> bytes:
    """Return what is equal for workers that hold the same boxes, on whatever host."""
    ranks = tuple(msgspec.structs.replace(rank, place=Place()) for rank in layout.ranks)
    return encode(msgspec.structs.replace(layout, replica="", ranks=ranks))

"""A worker's side of the connection to its trainer: pulls in a thread while vLLM generates, and the switch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, TransportChoice, decode_offer
from starling.weightsync.plan.layout import Layout, encode
from starling.weightsync.plan.planner import decode_plan
from starling.weightsync.transports.endpoints import check_offered_transports
from starling.weightsync.vllm.backend.link import Link
from starling.weightsync.vllm.backend.messages import (
    Cancel,
    Hello,
    Pull,
    Pulled,
    Relayed,
    Switched,
    from_trainer,
    shortened,
)

if TYPE_CHECKING:  # which needs vLLM
    from starling.weightsync.vllm.worker import WorkerWeights

log = logging.getLogger(__name__)

WELCOME_S: Final = 60.0
"""How long the trainer may take to answer a `Hello`."""
CLOSE_S: Final = 10.0


@dataclass(frozen=True)
class ReaderOptions:
    """What a worker may read; see `check_offered_transports`."""

    transport: TransportChoice
    encrypt: bool | None


class TrainerSession:
    """The connection of one worker to its trainer.

    Args:
        link: the opened connection, which the session then owns.
        weights: of this worker.
        stages: whether pulls go into staging; else they take place in `switch`.
        options: what may be read.
    """

    def __init__(self, link: Link, weights: WorkerWeights, *, stages: bool, options: ReaderOptions) -> None:
        self._link, self._weights, self._stages, self._options = link, weights, stages, options
        self._cancelled = threading.Event()
        self._pulling: threading.Thread | None = None
        self._order: Pull | None = None
        self._engine = ""
        self._pulled = -1
        """The version that the last successful pull has brought into staging."""
        self._ended = ""
        """Why the connection has ended; empty while it lasts. The weights are then left as they are."""
        self._receiver = threading.Thread(target=self._receive, name="weightsync-trainer", daemon=True)

    def join(
        self,
        name: str,
        vllm: str,
        layout: Layout,
        config: Mapping[str, Any],
        engine: str = "",
        engine_size: int = 1,
    ) -> None:
        """Tell the trainer what this worker can receive, and begin to take its orders.

        Args:
            name: see `Hello`, as for the others.

        Raises:
            WeightsError: the trainer refuses the worker, or does not answer.
        """
        self._engine = engine or name
        hello = Hello(
            name=name,
            engine=self._engine,
            engine_size=engine_size,
            vllm=vllm,
            layout=encode(layout),
            config=dict(config),
            stages=self._stages,
        )
        self._link.send(hello)
        await_welcome(self._link)
        self._receiver.start()

    def why_left_out(self, engines: Collection[str]) -> str:
        """Return why this worker's engine does not switch, empty if it does: the same for all workers of the engine.

        So it does not depend on whether this worker has noticed yet that its connection has ended.

        Args:
            engines: those that take part, as the trainer's call says.
        """
        if self._engine in engines:
            return ""
        why = self._ended or "another worker of it has gone."
        return f"The trainer has lost this engine, which keeps the weights that it has; have it call join(): {why}"

    def switch(self, version: int) -> None:
        """Switch to the version that was pulled, between two steps of the engine, and tell the trainer what is held.

        Raises:
            WeightsError: the version was not pulled, or could not be adopted.
        """
        begin = time.perf_counter()
        report = None
        if self._ended:
            raise WeightsError(f"There is no connection to the trainer: {self._ended}")
        try:
            if not self._stages:
                report = self._pull_in_place(version)
            elif self._pulled != version:
                raise WeightsError(
                    f"Version {version} was not pulled before the switch to it; send weights with the trainer's own "
                    "send_weights(), which has every worker pull first."
                )
            roots = self._weights.adopt(version)
        except WeightsError as error:
            self._tell(Switched(version=version, problem=shortened(str(error))))
            raise
        except Exception as error:  # raised again: the trainer must not wait for an answer that never comes
            self._tell(Switched(version=version, problem=shortened(f"{type(error).__name__}: {error}")))
            raise
        self._tell(Switched(version=version, root=roots.root, seconds=time.perf_counter() - begin, report=report))

    def close(self) -> None:
        """End the connection and a pull in progress."""
        self._cancelled.set()
        self._link.close()
        if self._receiver.is_alive():
            self._receiver.join(CLOSE_S)
        if self._pulling is not None:
            self._pulling.join(CLOSE_S)
        self._weights.close()

    def _receive(self) -> None:
        """Take orders until the connection ends."""
        try:
            while True:
                order = self._link.receive(from_trainer)
                if isinstance(order, Cancel):
                    self._cancelled.set()
                elif isinstance(order, Pull):
                    self._begin(order)
        except WeightsError as error:
            self._ended = str(error)
            self._cancelled.set()
            log.info("the trainer has left: %s", error)

    def _begin(self, order: Pull) -> None:
        """Start a pull; an earlier one that still runs is cancelled."""
        self._cancelled.set()
        before, self._cancelled = self._pulling, threading.Event()
        self._pulled = -1
        if not self._stages:
            self._order = order
            self._tell(Pulled(number=order.number))
            return
        arguments = (order, before, self._cancelled)
        self._pulling = threading.Thread(target=self._pull, args=arguments, name="weightsync-pull", daemon=True)
        self._pulling.start()

    def _pull(self, order: Pull, before: threading.Thread | None, cancelled: threading.Event) -> None:
        if before is not None:
            before.join(order.deadline_s)

        def announce(offer: Offer) -> None:
            self._tell(Relayed(number=order.number, offer=encode(offer)))

        try:
            offer, arguments = self._read(order)
            arguments["cancelled"] = cancelled.is_set
            report = self._weights.pull(offer, **arguments, announce=announce if order.announce else None)
        except WeightsError as error:
            self._tell(Pulled(number=order.number, problem=shortened(str(error))))
        except Exception as error:  # in a thread of its own: the trainer must hear of it
            log.exception("a pull failed")
            self._tell(Pulled(number=order.number, problem=shortened(f"{type(error).__name__}: {error}")))
        else:
            self._pulled = offer.version
            self._tell(Pulled(number=order.number, report=report))

    def _pull_in_place(self, version: int) -> Any:
        order, self._order = self._order, None
        if order is None:
            raise WeightsError(f"There is no order to pull version {version}.")
        offer, arguments = self._read(order)
        if offer.version != version:
            raise WeightsError(f"Version {offer.version} is offered, not {version}.")
        return self._weights.pull(offer, **arguments, in_place=True)

    def _read(self, order: Pull) -> tuple[Offer, dict[str, Any]]:
        """Check an order; return its offer and the other arguments of the pull."""
        offer, relays = decode_offer(order.offer), [decode_offer(relay) for relay in order.relays]
        for one in (offer, *relays):
            check_offered_transports(one, self._options.transport, self._link.host, encrypt=self._options.encrypt)
        return offer, {"plan": decode_plan(order.plan), "deadline_s": order.deadline_s, "relays": relays}

    def _tell(self, message: Relayed | Pulled | Switched) -> None:
        try:
            self._link.send(message)
        except WeightsError as error:
            log.warning("the trainer was not told: %s", error)


def await_welcome(link: Link) -> None:
    """Wait for the answer to a `Hello`. Raises WeightsError: a refusal, or none within `WELCOME_S`."""
    answer = link.receive(from_trainer, WELCOME_S)
    reason: str = getattr(answer, "refused", "the trainer sent something else than an answer")
    if reason:
        raise WeightsError(reason)

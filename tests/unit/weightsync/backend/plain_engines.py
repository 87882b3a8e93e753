"""Engines of plain tensors: workers that join a trainer as those of vLLM do, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Layout
from starling.weightsync.puller.attestation import AttestedRoots
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullReport
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.vllm.backend.link import Link
from starling.weightsync.vllm.backend.session import ReaderOptions, TrainerSession

VLLM = "vllm 0.32.0"


class PlainWeights:
    """The weights of one worker, with the methods of `WorkerWeights`."""

    stages = False

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        self._tensors = tensors
        self._puller = Puller(layout, serving=ServingOptions("tcp", "127.0.0.1"))
        self._offer: Any = None
        self.spoil: Callable[[], None] = lambda: None
        """Called after each switch, before the digests."""
        self.announced: Callable[[], None] = lambda: None
        """Called when the trainer knows that this worker relays, before the first byte has arrived."""

    def pull(self, offer: Any, plan: Any, *, in_place: bool = False, announce: Any = None, **named: Any) -> PullReport:
        """Pull a version."""
        self._offer = offer

        def announced(own: Any) -> None:
            announce(own)
            self.announced()

        named.update(into=self._tensors if in_place else None, announce=announced if announce else None)
        return self._puller.pull(offer, plan, relays_first=True, **named)

    def adopt(self, version: int) -> AttestedRoots:
        """Switch to it."""
        if self._puller.state == "staged" and self._puller.switch(self._tensors) != version:
            raise WeightsError("Another version was staged.")
        self.spoil()
        return self._puller.attest_roots(self._tensors, self._offer)

    def close(self) -> None:
        """Close the connections."""
        self._puller.close()


class PlainWorker:
    """One worker, with tensors of its own."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        vllm: str = VLLM,
        config: Mapping[str, Any] | None = None,
        stages: bool = True,
        engine: str = "",
        engine_size: int = 1,
    ) -> None:
        self.engine, self.engine_size = engine, engine_size
        self.name, self.tensors, self.vllm, self.config, self.stages = name, tensors, vllm, config or {}, stages
        self.session: TrainerSession | None = None
        self.weights: PlainWeights | None = None
        self.error = ""

    def join(self, info: Mapping[str, Any]) -> None:
        """Join a trainer."""
        self.close()
        layout = layout_of(self.tensors, self.name)
        link = Link.dial(info["address"], info["secret"], info["connect_s"])
        self.weights = PlainWeights(self.tensors, layout)
        options = ReaderOptions(info["transport"], info["encrypt"])
        session: Any = TrainerSession(link, self.weights, stages=self.stages, options=options)  # type: ignore[arg-type]
        try:
            session.join(self.name, self.vllm, layout, self.config, self.engine, self.engine_size)
        except WeightsError as error:
            self.error = str(error)
            session.close()
        else:
            self.session = session

    def close(self) -> None:
        """Leave the trainer."""
        if self.session is not None:
            self.session.close()
            self.session = None


class PlainEngines:
    """The client of some workers."""

    def __init__(self, *workers: PlainWorker) -> None:
        self.workers = workers
        self.calls: list[str] = []
        self.label = ""
        self.fails = False
        """Whether a call to switch ends with an error, though all workers here have switched."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every worker join the trainer."""
        self.calls.append("init")
        for worker in self.workers:
            worker.join(init_info)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.calls.append("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have every worker switch. As in vLLM, the last one of an engine raises what all have to say."""
        self.calls.append("update")
        refused = ""
        last = {worker.engine or worker.name: worker for worker in self.workers}
        for worker in self.workers:
            if worker.session is None:
                continue
            if why := worker.session.why_left_out(update_info["engines"]):
                refused = why if worker in last.values() else refused
                continue
            try:
                worker.session.switch(update_info["version"])
            except WeightsError as error:
                worker.error = str(error)
        if refused:
            raise WeightsError(refused)
        if self.fails:
            raise OSError("another engine is gone")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""
        self.calls.append("finish")
        self.label = weight_version or self.label

    def close(self) -> None:
        """Have all workers leave."""
        for worker in self.workers:
            worker.close()

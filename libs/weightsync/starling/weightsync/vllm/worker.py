"""The weights of one vLLM worker: pulls of versions into staging, and the switch to a version.

A pull runs in any thread while vLLM computes; the switch takes place between two steps of the engine, in the worker's
own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from starling.common.errors import WeightsError
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import Offer
from starling.weightsync.plan.layout import Layout
from starling.weightsync.plan.planner import Plan
from starling.weightsync.puller.attestation import AttestedRoots
from starling.weightsync.puller.deadline import never
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullProgress, PullReport
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.vllm import cpu
from starling.weightsync.vllm.recorded import (
    PartLoader,
    Published,
    RecordedWorker,
    loadable,
    record_worker,
    renew_derived,
)

Parts = Callable[[], Iterator[Mapping[str, torch.Tensor]]]
"""Returns an iterator over tensors to fill, by storage; what was filled is in use when the next ones are requested."""


@dataclass(frozen=True)
class LiveWeights:
    """The tensors of a worker that a version fills."""

    tensors: Callable[[], Mapping[str, torch.Tensor]]
    """Returns them by their names in the layout."""
    apply: Callable[[], None]
    """Makes vLLM compute with these tensors after they have changed."""
    parts: Parts | None = None
    """Makes the tensors that are filled one after the other, where not all of a version goes straight into vLLM's
    parameters; None where all of it does."""
    part_bytes: int = 0
    """Extra bytes that the switch needs for the largest part."""


def record_model(model: torch.nn.Module, config: VllmConfig, published: Published, replica: str) -> RecordedWorker:
    """Record the layout of a worker; see `record_worker`. Padding that no version fills is set to zero."""
    recorded = record_worker(model, config, published, replica)
    if config.load_config.load_format == "dummy":  # vLLM leaves zeros where it loads nothing
        tensors = loadable(model)
        for name in recorded.padded:
            tensors[name].zero_()
    return recorded


def recorded_weights(
    model: torch.nn.Module, config: VllmConfig, published: Published, recorded: RecordedWorker
) -> LiveWeights:
    """Return the weights of a worker whose layout was recorded."""
    loader: PartLoader | None = None
    if recorded.whole or recorded.processed:
        loader = PartLoader(model, config, published, recorded)
    return LiveWeights(
        tensors=lambda: loadable(model),
        apply=lambda: renew(model, config),
        parts=None if loader is None else loader.parts_to_fill,
        part_bytes=0 if loader is None else loader.part_bytes,
    )


def renew(model: torch.nn.Module, config: VllmConfig) -> None:
    """Renew what vLLM derives from its parameters; call it after they have changed."""
    if current_platform.is_cpu():
        cpu.repack(model)
    renew_derived(model, config)


class WorkerWeights:
    """Pulls versions into a worker, and switches to them.

    Args:
        live: what a version fills.
        layout: the layout of all workers.
        rank: this worker's rank in it.
        digests: how a version is verified.
        serving: how pulls that are announced are served to others.
    """

    def __init__(
        self, live: LiveWeights, layout: Layout, rank: int, digests: DigestMode, serving: ServingOptions | None
    ) -> None:
        self._live = live
        self._puller = Puller(layout, rank=rank, digests=digests, serving=serving)
        self._offer: Offer | None = None
        self._root_plan: Plan | None = None

    @property
    def stages(self) -> bool:
        """Whether every pull goes into staging, because vLLM processes or loads what has arrived."""
        return self._live.parts is not None

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        root_plan: Plan | None = None,
        deadline_s: float,
        cancelled: Callable[[], bool] = never,
        in_place: bool = False,
        relays: Sequence[Offer] = (),
        progress: Callable[[PullProgress], None] | None = None,
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """Pull a version, preferably from relays; see `Puller.pull`.

        Args:
            offer: see `Puller.pull`.
            plan: see `Puller.pull`.
            root_plan: see `Puller.attest_roots`.
            deadline_s: see `Puller.pull`.
            cancelled: see `Puller.pull`.
            in_place: write into the live tensors; vLLM must not compute meanwhile. Where `stages`, it is ignored.
            relays: see `Puller.pull`.
            progress: see `Puller.pull`.
            announce: see `Puller.pull`.

        Raises:
            WeightsError: the pull failed.
        """
        self._offer, self._root_plan = offer, root_plan
        return self._puller.pull(
            offer,
            plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            into=self._live.tensors() if in_place and not self.stages else None,
            progress=progress,
            relays=relays,
            relays_first=True,
            announce=announce,
        )

    def adopt(self, version: int) -> AttestedRoots:
        """Switch to the version that was pulled, unless it is in place already; return the roots of what is held.

        Raises:
            WeightsError: another version was pulled, or none.
        """
        if self._offer is None:
            raise WeightsError(f"Version {version} was not pulled.")
        if self._live.parts is not None:
            roots = self._puller.switch_in_parts(self._live.parts(), self._offer, self._root_plan)
            if self._puller.version != version:
                raise WeightsError(f"Version {self._puller.version} was staged, not {version}.")
            self._live.apply()
            return roots
        # By what was pulled and not by its number: a version in place may be lost, or not be what was published.
        if self._puller.state == "staged":
            switched = self._puller.switch(self._live.tensors())
            if switched != version:
                raise WeightsError(f"Version {switched} was staged, not {version}.")
        self._live.apply()
        return self._puller.attest_roots(self._live.tensors(), self._offer, self._root_plan)

    def close(self) -> None:
        """Close all connections; waits for a pull in progress to end."""
        self._puller.close()

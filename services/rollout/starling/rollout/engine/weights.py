"""Weights of an engine whose only worker is this process: pulled, switched in place and verified by digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import layout_root
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullReport

if TYPE_CHECKING:
    import torch

    from starling.weightsync.memory.digests import DigestMode
    from starling.weightsync.offers.offer import Offer
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.report import PullProgress
    from starling.weightsync.transports.endpoints import ServingOptions


class LiveWeights:
    """The weight methods of `Engine` for an engine whose only worker is this process.

    Args:
        layout: the layout of the tensors.
        tensors: returns the live weights by their names in the layout.
        digests: how pulled tensors are verified.
        serving: how pulls that are announced are served to others.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        *,
        digests: DigestMode = "full",
        serving: ServingOptions | None = None,
    ) -> None:
        self.layout = layout
        self._tensors = tensors
        self._puller = Puller(layout, digests=digests, serving=serving)
        self._pulled: tuple[Offer, bool] | None = None
        """The offer that was pulled last, and whether its weights are in place already."""
        self._root_plan: Plan | None = None

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        root_plan: Plan | None = None,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
        relays: Sequence[Offer] = (),
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """See `Engine.pull`; called from another thread than the rest."""
        self._pulled, self._root_plan = None, root_plan
        report = self._puller.pull(
            offer,
            plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            into=self._tensors() if in_place else None,
            progress=progress,
            relays=relays,
            relays_first=True,
            announce=announce,
        )
        self._pulled = (offer, in_place)
        return report

    def switch(self) -> Offer:
        """Put the version that was pulled last in place; return its offer.

        Raises:
            WeightsError: nothing is staged.
        """
        if self._pulled is None:
            raise WeightsError("There is no staged version to adopt: pull first.")
        offer, in_place = self._pulled
        if not in_place:
            self._puller.switch(self._tensors())
        self._pulled = None
        return offer

    def attest(self, offer: Offer) -> tuple[str, str]:
        """Return root and layout root of the live weights, into which the version of `offer` was pulled last."""
        roots = self._puller.attest_roots(self._tensors(), offer, self._root_plan)
        return roots.root, layout_root([roots.rank_root])

    def close(self) -> None:
        """Close all connections; waits for a running pull to end, at the latest by its deadline."""
        self._puller.close()

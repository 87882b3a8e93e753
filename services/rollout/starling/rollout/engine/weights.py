"""The weights of a model in this process: a version is pulled for them, put in place, and proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starling.common.errors import WeightsError
from starling.weightsync.puller.puller import Puller, PullReport

if TYPE_CHECKING:
    import torch

    from starling.weightsync.memory.digests import DigestMode
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.offer import Offer
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.fetch import PullProgress


class LiveWeights:
    """What `Engine` says of weights, for an engine whose only worker is this process.

    Args:
        layout: of the tensors.
        tensors: returns the live weights by the names of the layout.
        digests: how what arrives is proven.
    """

    def __init__(
        self, layout: Layout, tensors: Callable[[], Mapping[str, torch.Tensor]], *, digests: DigestMode = "full"
    ) -> None:
        self.layout = layout
        self._tensors = tensors
        self._puller = Puller(layout, digests=digests)
        self._pulled: tuple[Offer, bool] | None = None
        """What was pulled last, and whether it is in place already."""

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
    ) -> PullReport:
        """As `Engine.pull`; from a thread of its own."""
        self._pulled = None
        report = self._puller.pull(
            offer,
            plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            into=self._tensors() if in_place else None,
            progress=progress,
        )
        self._pulled = (offer, in_place)
        return report

    def switch(self) -> Offer:
        """Put in place what was pulled last, and return what it is an offer of.

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

    def attest(self, offer: Offer) -> str:
        """Return the root of what the live weights hold of the version of `offer`, which was pulled last."""
        return self._puller.attest(self._tensors(), offer)

    def close(self) -> None:
        """Close every connection; waits for a pull under way to end, which its deadline ensures."""
        self._puller.close()

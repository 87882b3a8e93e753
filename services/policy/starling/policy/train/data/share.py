"""Share of a microbatch that a rank computes together with others: some of its tokens (context parallelism).

Model inputs are those of this rank's tokens. Losses and metrics are computed from the outputs of all tokens, on each
rank, so a loss may compare any tokens with each other.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend


class SlotShare(Protocol):
    """Some slots of a microbatch, [N], of which this rank computes n."""

    @property
    def own(self) -> Tensor:
        """int64 [n]: which of the N are this rank's."""

    @property
    def slots(self) -> Tensor:
        """int64 [n]: their slots among this rank's tokens."""

    def join(self, values: Tensor) -> Tensor:
        """Return the values of all slots, [N, ...], from those of this rank's, [n, ...]; differentiable.

        Every rank computes the same loss from them, so the gradient of a value is that on its own rank, not a sum.
        """


class TokenShare(Protocol):
    """The tokens of this rank, and how they attend to those of the others. l are the tokens of this rank."""

    @property
    def trained(self) -> SlotShare:
        """The slots that predict the trained tokens of the microbatch."""

    def take(self, values: Tensor) -> Tensor:
        """Return those of this rank's tokens, [..., l], from `values` of all, [..., L]."""

    def select(self, slots: Tensor) -> SlotShare:
        """Return the share of `slots`, int64 [N], of the whole microbatch."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        structure: Forest,
        scale: float,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        backend: Backend,
    ) -> Tensor:
        """Return the attention of this rank's tokens to those of all ranks, [l, H, E].

        Arguments are those of `starling.algo.attention.interface.attention`, with this rank's tokens in place of all;
        `structure` is that of the whole row.
        """

"""Load of the experts of a mixture: the tokens that the routers of each layer sent to each expert in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from starling.algo.experts import find_experts, num_experts
from starling.policy.train.data.packing import Index, MicrobatchInputs
from starling.policy.train.model.routing import own_choice


class TokenRanks(Protocol):
    """The ranks of a mesh, some of which divide the tokens of a microbatch between its matrices."""

    @property
    def expert_layers(self) -> Sequence[str]:
        """Names of the experts of all layers, those on other ranks included."""

    @property
    def num_experts(self) -> int:
        """Most experts of a layer, likewise."""

    @property
    def num_routers(self) -> int:
        """Routers of all layers that have a load-balancing loss, likewise."""

    def own_segments(self, inputs: MicrobatchInputs) -> Index:
        """Return the segments of the slots whose tokens this rank computes between matrices, -1 for padding."""

    def sum_slots(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks that divide the tokens of a microbatch; the gradient is that of each part."""

    def sum_loads(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks that compute different tokens or layers."""


class ExpertLoad:
    """Counts the tokens of each expert in the forward passes that compute gradients."""

    def __init__(self, model: torch.nn.Module, ranks: TokenRanks | None, *, of_own_choice: bool = False) -> None:
        """Find the experts; a model without any has no load.

        Args:
            model: to be trained.
            ranks: where it is on a mesh.
            of_own_choice: count the experts that its routers would have chosen, in place of replayed ones.
        """
        self._experts, self._ranks, self._of_own_choice = find_experts(model), ranks, of_own_choice
        self._layers = list(self._experts) if ranks is None else list(ranks.expert_layers)
        # A stage of a pipeline may have no experts, and adds its zeros to the counts of the others.
        own = max((num_experts(one) for one in self._experts.values()), default=0)
        self._size = own if ranks is None else ranks.num_experts
        self._device = next(model.parameters()).device
        self._chosen: dict[str, Tensor] = {}
        self._counts: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the choices of the routers in one forward pass."""
        self._chosen = {}
        handles = [
            experts.register_forward_pre_hook(self._recorder(name), with_kwargs=True)
            for name, experts in self._experts.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self, inputs: MicrobatchInputs) -> None:
        """Count the choices that were recorded last, in a pass over the microbatch `inputs`."""
        chosen, self._chosen = self._chosen, {}
        if not chosen:
            return
        own = inputs.segments if self._ranks is None else self._ranks.own_segments(inputs)
        is_filled = torch.from_numpy(own >= 0).to(self._device)
        if self._counts is None:
            self._counts = self._zeros()
        for name, experts in chosen.items():
            ones = is_filled[:, None].expand_as(experts).flatten().to(torch.int64)
            self._counts[self._layers.index(name)].index_add_(0, experts.flatten(), ones)

    def clear(self) -> None:
        """Forget what was counted since the last `read`."""
        self._counts = None

    def read(self) -> dict[str, Tensor]:
        """Return the tokens of each expert [E] of each layer since the last call; on a mesh, every rank calls it.

        Nothing without a pass.
        """
        counts, self._counts = self._counts, None
        if not self._layers:
            return {}
        if self._ranks is not None:
            if counts is None:  # no pass of this rank had a microbatch
                counts = self._zeros()
            counts = self._ranks.sum_loads(counts)
        return {} if counts is None else dict(zip(self._layers, counts, strict=True))

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._layers), self._size, dtype=torch.int64, device=self._device)

    def _recorder(self, name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():  # a reference model computes without
                chosen: Tensor = (args[1] if len(args) > 1 else kwargs["top_k_index"]).detach()
                own = own_choice() if self._of_own_choice else None
                self._chosen[name] = chosen if own is None else own.reshape(chosen.shape)

        return record


class ReplayShare:
    """Counts replayed experts, and those that the model's own routers would not have chosen, in the forward passes that
    compute gradients."""

    def __init__(self, ranks: TokenRanks | None) -> None:
        """Count nothing yet; `ranks`: where the model is on a mesh."""
        self._ranks = ranks
        self._counts: Tensor | None = None

    def count(self, inputs: MicrobatchInputs) -> None:
        """Count those of the last pass over the microbatch `inputs`."""
        if inputs.replay is not None:
            counts = inputs.replay.take_counts()
            self._counts = counts if self._counts is None else self._counts + counts

    def clear(self) -> None:
        """Forget what was counted since the last `read`."""
        self._counts = None

    def read(self, device: torch.device) -> dict[str, float]:
        """Return ``router_replay_share`` since the last call, nothing without a replay; on a mesh, every rank calls it.

        A rank may have counted nothing, because its passes had no microbatch, or its stage no experts.
        """
        counts, self._counts = self._counts, None
        if self._ranks is not None:
            counts = torch.zeros(2, dtype=torch.int64, device=device) if counts is None else counts
            counts = self._ranks.sum_loads(counts)
        if counts is None:
            return {}
        differing, total = counts.tolist()
        return {"router_replay_share": differing / total} if total else {}


def load_metrics(counts: Tensor) -> dict[str, float]:
    """Return how evenly experts are used.

    Args:
        counts: tokens of each layer's experts, [layers, E].

    Returns:
        ``expert_load_max``, tokens of the most used expert over the mean of its layer, in the layer where that is
        greatest; ``expert_load_entropy``, entropy of the shares of the experts over its maximum, mean over layers;
        ``experts_unused``, share of experts without a token. Nothing without tokens.
    """
    totals = counts.sum(dim=1, keepdim=True)
    if not bool((totals > 0).all()):
        return {}
    shares = counts.double() / totals
    entropy = torch.special.entr(shares).sum(dim=1) / math.log(max(counts.shape[1], 2))
    return {
        "expert_load_max": float(shares.max() * counts.shape[1]),
        "expert_load_entropy": float(entropy.mean()),
        "experts_unused": float((counts == 0).double().mean()),
    }

"""Context parallelism: the ranks of the axis cp divide the tokens of a row, and meet in the attention.

Embeddings, norms, matrices and the output layer compute a token from that token alone, so each rank computes its own.
The attention is that of the whole row, with its documents, trees, windows, soft caps and sinks, in one of three ways:

    ulysses       ranks exchange tokens for heads and back (arXiv:2309.14509): a rank has all tokens for a share of
                  the heads. Where there are fewer key heads than ranks, keys and values are repeated.
    all_gather    a rank has its queries and the keys of all tokens (arXiv:2407.21783, section 3.3.2)
    ring          a rank has its queries, and the keys of one rank at a time (arXiv:2310.01889)

For the last two the row is cut into twice as many pieces as ranks, and a rank has one from each end of it: later tokens
see more keys than earlier ones.

The log-probabilities of all tokens are gathered, one number per token, and each rank computes the whole loss from them.
Its gradient with respect to its own tokens is then that of one rank, and the gradients of parameters are sums over the
ranks.

Legend of shapes: L tokens of the row, l of this rank, c ranks, H query heads, G key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend, attention, kernel_inputs
from starling.algo.attention.tiled import TiledAttention
from starling.algo.attention.tiles import Ranges
from starling.common.errors import ConfigError
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.data.replay import Replay
from starling.policy.train.model.layout import AttentionPlan
from starling.policy.train.parallel.collectives import exchange
from starling.policy.train.parallel.context.key_blocks import KeyBlocks
from starling.policy.train.parallel.media import MEDIA_SLOTS, media_slots
from starling.policy.train.parallel.mesh import Mesh

Method = Literal["ulysses", "all_gather", "ring"]
_PIECES: Final[dict[Method, int]] = {"ulysses": 1, "all_gather": 2, "ring": 2}
"""Of the row on each rank."""


def check_segments(model: Any, plan: AttentionPlan, axis: str, mesh: Mesh) -> None:
    """Check that `model` attends by segments, so that a row can be padded until ranks of `axis` can divide its tokens.

    Raises:
        ConfigError: it does not.
    """
    if plan.layout != "forest":
        raise ConfigError(
            f"policy.parallel.{axis} = {mesh.size(axis)} needs a model that attends by segments, and "
            f"{type(model).__name__} does not: {plan.reason}; set it to 1, and use dp_shard"
        )


def divide_tokens(inputs: MicrobatchInputs, mesh: Mesh, placeholders: Sequence[int] = ()) -> MicrobatchInputs:
    """Return this rank's share of a microbatch: some of its tokens, with as many as the ranks can divide.

    Args:
        inputs: the whole microbatch.
        mesh: of the ranks.
        placeholders: tokens of images and videos, whose features are numbered.
    """
    size, method = mesh.size("cp"), mesh.settings.context
    padded = _pad_tokens(inputs, size * lcm(_PIECES[method] if size > 1 else 1, mesh.size("tp")))
    missing = padded.input_ids.shape[1] - inputs.input_ids.shape[1]
    if placeholders:
        padded = replace(padded, extra=padded.extra | {MEDIA_SLOTS: media_slots(padded.input_ids, placeholders)})
    if size == 1:
        return replace(padded, replay=_divide_replay(inputs, mesh, missing, lambda values: values))
    share = ContextShare(mesh.group("cp"), method, padded.input_ids.shape[1], inputs.source)
    return replace(
        padded,
        input_ids=share.take(padded.input_ids),
        position_ids=share.take(padded.position_ids),
        extra={name: share.take(one) if name == MEDIA_SLOTS else one for name, one in padded.extra.items()},
        share=share,
        replay=_divide_replay(inputs, mesh, missing, share.take),
    )


def _divide_replay(
    inputs: MicrobatchInputs, mesh: Mesh, missing: int, take: Callable[[Tensor], Tensor]
) -> Replay | None:
    """Return what this rank's routers replay: of the tokens that it computes between matrices."""
    size, place = mesh.size("tp"), mesh.place("tp")
    if inputs.replay is None or (missing == 0 and size * mesh.size("cp") == 1):
        return inputs.replay
    return inputs.replay.divided(lambda values: take(values).chunk(size, dim=-1)[place], missing)


def _pad_tokens(inputs: MicrobatchInputs, multiple: int) -> MicrobatchInputs:
    """Return `inputs` with a document of padding, so that ranks can divide the tokens of the row."""
    missing = -inputs.input_ids.shape[1] % multiple
    if not missing:
        return inputs
    structure = inputs.structure
    assert structure is not None, "models whose tokens are divided attend by segments"
    # Of one or three dimensions.
    positions = torch.arange(missing, device=inputs.position_ids.device).expand(*inputs.position_ids.shape[:-1], -1)
    return replace(
        inputs,
        input_ids=torch.nn.functional.pad(inputs.input_ids, (0, missing)),
        position_ids=torch.cat([inputs.position_ids, positions], dim=-1),
        structure=Forest((*structure.lengths, missing), (*structure.parents, -1)),
    )


class ContextShare:
    """The tokens of this rank; see `starling.policy.train.data.share.TokenShare`."""

    def __init__(self, group: dist.ProcessGroup, method: Method, num_tokens: int, source: Tensor) -> None:
        """Describe the share.

        Args:
            group: the ranks of the axis cp.
            method: of the attention.
            num_tokens: of the row, L.
            source: see `MicrobatchInputs`.
        """
        self._group, self._rank, self._size, self._method = group, group.rank(), group.size(), method
        self._num_tokens = num_tokens // self._size
        self._ranges = _pieces(num_tokens, self._size, _PIECES[method])
        # Where each slot of the row is, counted over all ranks.
        slots = torch.cat([torch.arange(*piece) for pieces in self._ranges for piece in pieces])
        self._places = torch.argsort(slots).to(source.device)
        self.trained = self.select(source)

    def take(self, values: Tensor) -> Tensor:
        """Return those of this rank's tokens, [..., l], from `values` of all, [..., L]."""
        return torch.cat([values[..., first:last] for first, last in self._ranges[self._rank]], dim=-1)

    def select(self, slots: Tensor) -> ContextSlots:
        """Return the share of `slots`, int64 [N], of the whole microbatch."""
        places = self._places[slots]
        ranks = places // self._num_tokens
        own = (ranks == self._rank).nonzero()[:, 0]
        counts = torch.bincount(ranks, minlength=self._size).tolist()
        order = torch.argsort(ranks, stable=True)
        return ContextSlots(self._group, own, places[own] - self._rank * self._num_tokens, counts, order)

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
        """Return the attention of this rank's tokens to those of all ranks, [l, H, E]."""
        if self._method != "ulysses":
            blocks = KeyBlocks(self._group, self._ranges, self._method)
            row = TiledAttention(structure, scale, window, softcap, backend)
            return blocks.attention(kernel_inputs(query, key, value), row, sinks)[..., : value.shape[-1]]
        repeats = lcm(key.shape[1], self._size) // key.shape[1]
        key, value = (one.to(query.dtype).repeat_interleave(repeats, 1) for one in (key, value))
        inputs = self._to_heads(query, key, value)
        output = attention(
            inputs[0],
            inputs[1],
            inputs[2],
            structure,
            scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.view(self._size, -1)[self._rank],
            backend=backend,
        )
        found = self._exchange(output.reshape(self._size, self._num_tokens, -1))
        return found.transpose(0, 1).reshape(self._num_tokens, query.shape[1], -1)

    def _to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Return all tokens of this rank's share of the heads, [L, heads / c, ...], of tensors [l, heads, ...] each."""
        of_heads = [one.reshape(len(one), self._size, -1) for one in tensors]
        rows = self._exchange(torch.cat(of_heads, dim=2).transpose(0, 1)).flatten(0, 1)
        parts = torch.split(rows, [one.shape[2] for one in of_heads], dim=1)
        return [part.view(len(rows), -1, one.shape[-1]) for part, one in zip(parts, tensors, strict=True)]

    def _exchange(self, rows: Tensor) -> Tensor:
        """Send rows[rank] to each rank, [c, ...]. Returns what each rank has sent here."""
        each = [1] * self._size
        return exchange(rows, each, each, self._group)


def _pieces(num_tokens: int, num_ranks: int, per_rank: int) -> tuple[Ranges, ...]:
    """Return the tokens of each rank: one piece in order, or two, which are equally far from either end of the row."""
    size = num_tokens // (num_ranks * per_rank)
    last = num_ranks * per_rank - 1
    return tuple(
        tuple((piece * size, (piece + 1) * size) for piece in ([rank] if per_rank == 1 else [rank, last - rank]))
        for rank in range(num_ranks)
    )


@dataclass(frozen=True, slots=True, eq=False)
class ContextSlots:
    """This rank's share of some slots; see `starling.policy.train.data.share.SlotShare`."""

    group: dist.ProcessGroup
    own: Tensor
    slots: Tensor
    counts: list[int]
    """Slots of each rank."""
    order: Tensor
    """int64 [N]: the slots, rank by rank."""

    def join(self, values: Tensor) -> Tensor:
        """Return the values of all slots, [N, ...], from those of this rank's, [n, ...]."""
        joined: Tensor = _Join.apply(values, self)  # type: ignore[no-untyped-call]
        return joined


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, share: ContextSlots) -> Tensor:
        ctx.own = share.own
        most = max(share.counts)
        padded = values.new_zeros((most, *values.shape[1:]))
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in share.counts]
        dist.all_gather(gathered, padded, group=share.group)
        rows = torch.cat([one[:count] for one, count in zip(gathered, share.counts, strict=True)])
        return torch.empty_like(rows).index_copy_(0, share.order, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.own), None

"""Quantiser of a published rank: live tensors into its snapshot, with the maxima of other ranks exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Box, Layout
from starling.weightsync.quantise.layouts import (
    CODES,
    SCALES,
    TOTAL,
    published_entries,
    published_layout,
    quantisation_of,
)
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.quantise.schedule import make_schedule
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.quantise import Amax, combine, empty_quantised, partial_amax, quantise_with
from starling.weightsync.tensors.views import tensor_part


class MaximaExchange(Protocol):
    """All-to-all exchange between the ranks of a source; each rank calls it equally often, in the same order."""

    @property
    def rank(self) -> int:
        """Rank of this process in the source."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the source."""

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Send `outgoing[r]` to rank r; return the message of each rank to this one, including its own.

        Args:
            outgoing: float32, one-dimensional, possibly empty.
            sizes: number of elements that each rank sends here.

        Raises:
            WeightsError: not all messages arrived within the deadline.
        """


class GroupExchange:
    """Exchange over a process group of torch.distributed, whose ranks are those of the layout.

    Args:
        group: by default the group of all processes.
        deadline_s: deadline of one exchange, including the skew between the ranks.
        device: device of the messages; by default the CPU, with NCCL the current CUDA device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline_s: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        self._group, self._deadline = group, timedelta(seconds=deadline_s)
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device = torch.device(device or ("cuda" if dist.get_backend(group) == "nccl" else "cpu"))

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Exchange messages; see `MaximaExchange`. After a failure the process group is unusable.

        Raises:
            WeightsError: a rank failed, or the deadline passed.
        """
        sent = torch.cat([message.to(self._device) for message in outgoing])
        received = sent.new_empty(sum(sizes))
        try:
            work = dist.all_to_all_single(
                received,
                sent,
                list(sizes),
                [message.numel() for message in outgoing],
                group=self._group,
                async_op=True,
            )
            assert work is not None
            work.wait(self._deadline)
        except RuntimeError as error:
            raise WeightsError(
                f"The maxima of the other ranks did not arrive within {self._deadline.total_seconds():g} s: {error}"
            ) from error
        return torch.split(received, list(sizes))


Fill: TypeAlias = Callable[[Sequence[torch.Tensor]], None]
"""Function that writes a version into the views of a snapshot."""


class QuantisedShard(NamedTuple):
    """One shard that is quantised."""

    scale: int
    """Number of its tensor's scale, which other tensors may share."""
    box: Box
    spec: QuantSpec


class Quantiser:
    """Quantises the shards of one rank, on their device.

    It takes memory for the maxima of all groups (4 bytes each) and a few float32 tiles; if the shards are on another
    device than the snapshot, also for the codes of one shard.

    Args:
        layout: unquantised layout of all ranks.
        rank: the rank of this process.
        recipe: selects the formats.
        exchange: exchange of maxima; needed if scale groups are cut between ranks, or if a format has a scale for
            whole tensors that several ranks hold.

    Raises:
        WeightsError: as `published_layout`; a group that is incomplete in the layout; a missing exchange, or one
            between other ranks.
    """

    def __init__(self, layout: Layout, rank: int, recipe: QuantRecipe, exchange: MaximaExchange | None = None) -> None:
        self.layout = published_layout(layout, recipe)
        """The published layout."""
        made, shards = quantisation_of(layout.tensors, recipe), layout.ranks[rank].shards
        self._exchange = exchange
        self._places = {(entry.shard, entry.part): place for place, entry in enumerate(published_entries(shards, made))}
        self._jobs = {
            index: QuantisedShard(scale=made.scale_of[shard.tensor], box=shard.box, spec=spec)
            for index, shard in enumerate(shards)
            if (spec := made.specs[shard.tensor]) is not None
        }
        self._schedule = make_schedule(layout, rank, made)
        if self._schedule.num_rounds:
            _check_exchange(exchange, layout, rank)

    def measured(self, sources: Sequence[torch.Tensor]) -> Fill:
        """Compute the scales of `sources`, this rank's shards; return the function that writes them into a snapshot.

        Every rank calls this equally often, for the same versions in the same order. A rank that cannot quantise its
        shards sends NaN to the others, so that they fail instead of waiting.

        Raises:
            WeightsError: an infinite or NaN element, here or on a rank that shares a group; or the exchange failed.
        """
        failure: WeightsError | None = None
        try:
            own = {index: partial_amax(sources[index], job.box, job.spec) for index, job in self._jobs.items()}
        except WeightsError as error:
            failure, own = error, {index: _unknown(job) for index, job in self._jobs.items()}
        try:
            received, totals = self._exchanged(own)
        finally:
            if failure is not None:
                raise failure  # more specific than an error of the exchange
        maxima = {
            index: _whole(self._jobs[index], amax, received.get(index, ()), totals.get(self._jobs[index].scale))
            for index, amax in own.items()
        }
        return partial(self._fill, sources, maxima)

    def _exchanged(self, own: dict[int, Amax]) -> tuple[dict[int, list[Amax]], dict[int, torch.Tensor]]:
        """Return the maxima of other ranks for this rank's groups, by shard, and the maxima of whole tensors."""
        plan, totals = self._schedule, self._own_totals(own)
        outgoing = [
            _joined(
                [own[part.shard].part(part.groups).groups for part in parts] + [totals[scale] for scale in reported]
            )
            for parts, reported in zip(plan.sends, plan.reports, strict=True)
        ]
        shapes = [
            [part.groups.size for part in parts] + [()] * len(scales)
            for parts, scales in zip(plan.receives, plan.collects, strict=True)
        ]
        received: dict[int, list[Amax]] = {}
        for rank, values in enumerate(self._swapped(outgoing, shapes)):
            parts = plan.receives[rank]
            for part, groups in zip(parts, values[: len(parts)], strict=True):
                amax = Amax(box=part.groups, groups=groups, total=own[part.shard].total)
                received.setdefault(part.shard, []).append(amax)
            for scale, total in zip(plan.collects[rank], values[len(parts) :], strict=True):
                totals[scale] = torch.maximum(totals[scale], total.to(totals[scale].device))
        if plan.num_rounds > 1:
            outgoing = [_joined([totals[scale] for scale in scales]) for scales in plan.collects]
            collected = self._swapped(outgoing, [[()] * len(scales) for scales in plan.reports])
            for scales, values in zip(plan.reports, collected, strict=True):
                totals.update(zip(scales, values, strict=True))
        return received, totals

    def _own_totals(self, own: dict[int, Amax]) -> dict[int, torch.Tensor]:
        """Return this rank's maxima of tensors with a scale of the whole, by scale."""
        totals: dict[int, torch.Tensor] = {}
        for index, amax in own.items():
            if amax.total is not None:
                scale = self._jobs[index].scale
                totals[scale] = torch.maximum(totals.get(scale, amax.total), amax.total)
        return totals

    def _swapped(
        self, outgoing: list[torch.Tensor], shapes: list[list[tuple[int, ...]]]
    ) -> Sequence[list[torch.Tensor]]:
        """Send a message to each rank; return the received ones, cut into tensors of `shapes`."""
        messages: Sequence[torch.Tensor] = outgoing  # without rounds, this rank exchanges with itself only
        if self._schedule.num_rounds:
            assert self._exchange is not None
            messages = self._exchange(outgoing, [sum(map(math.prod, each)) for each in shapes])
        found: list[list[torch.Tensor]] = []
        for message, each in zip(messages, shapes, strict=True):
            values = torch.split(message, [*map(math.prod, each)]) if each else ()
            found.append([value.view(shape) for value, shape in zip(values, each, strict=True)])
        return found

    def _fill(self, sources: Sequence[torch.Tensor], maxima: dict[int, Amax], views: Sequence[torch.Tensor]) -> None:
        for index, source in enumerate(sources):
            codes = views[self._places[index, CODES]]
            if index not in self._jobs:
                codes.copy_(source)
                continue
            job = self._jobs[index]
            near = codes if codes.device == source.device else None
            out = quantise_with(
                source, job.box, maxima[index], job.spec, empty_quantised(job.box, job.spec, source.device, near)
            )
            if near is None:
                codes.copy_(out.data)
            owned = job.spec.owned_scale_box(job.box)
            if owned.volume:
                views[self._places[index, SCALES]].copy_(tensor_part(out.scales, job.spec.scale_box(job.box), owned))
            if out.global_scale is not None and (index, TOTAL) in self._places:
                views[self._places[index, TOTAL]].copy_(out.global_scale)


def _check_exchange(exchange: MaximaExchange | None, layout: Layout, rank: int) -> None:
    if exchange is None:
        raise WeightsError(
            f"The ranks of {layout.replica} hold parts of the same scale groups, or of tensors with one scale, and "
            "must exchange their maxima; give an exchange, for example GroupExchange()."
        )
    if (exchange.rank, exchange.num_ranks) != (rank, len(layout.ranks)):
        raise WeightsError(
            f"The exchange is between {exchange.num_ranks} ranks, of which this is {exchange.rank}, but "
            f"{layout.replica} has {len(layout.ranks)}, of which this is {rank}; give the group of the layout's ranks, "
            "in their order."
        )


def _unknown(job: QuantisedShard) -> Amax:
    """Return NaN maxima, which invalidate all that they are combined with."""
    box = job.spec.scale_box(job.box)
    groups = torch.full(box.size, torch.nan, dtype=torch.float32)
    total = torch.tensor(torch.nan, dtype=torch.float32) if job.spec.format.two_level else None
    return Amax(box=box, groups=groups, total=total)


def _whole(job: QuantisedShard, own: Amax, received: Sequence[Amax], total: torch.Tensor | None) -> Amax:
    """Return the maxima of whole groups and of the whole tensor."""
    values = [amax.groups for amax in received] + ([] if total is None else [total])
    if not all(bool(value.isfinite().all()) for value in values):
        raise WeightsError(
            f"Another rank cannot quantise its part of tensor {job.spec.tensor.name}; see its own error."
        )
    return replace(combine(own, received) if received else own, total=total)


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values]) if values else torch.empty(0, dtype=torch.float32)

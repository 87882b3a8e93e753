"""How ranks bring their maxima to one another: one collective call, with a deadline."""

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
    """Brings messages between all ranks of a source; each calls it equally often, in the same order."""

    @property
    def rank(self) -> int:
        """Which rank of the source this process is."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the source."""

    def __call__(self, outgoing: Sequence[torch.Tensor], sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        """Send `outgoing[r]` to rank r; return what rank r sent here, for each rank, this one among them.

        Args:
            outgoing: float32, one-dimensional, possibly empty.
            sizes: the number of elements that each rank sends here.

        Raises:
            WeightsError: not all came within the deadline.
        """


class GroupExchange:
    """Over a process group of torch.distributed, whose ranks are the layout's.

    Args:
        group: by default the group of all processes.
        deadline_s: how long one exchange may take; includes the time by which the ranks are apart.
        device: where messages travel from; by default the CPU, with NCCL the current CUDA device.
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
        """Exchange, as `MaximaExchange` says. After a failure the process group is of no use any more.

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


# JOINED from starling.weightsync.quantise.source: Quantises what one rank publishes, from live tensors into
# its snapshot.


Fill: TypeAlias = Callable[[Sequence[torch.Tensor]], None]
"""Writes a version into the views of a snapshot."""


class Job(NamedTuple):
    """What one shard, which is quantised, is."""

    scale: int
    """Number of the scale of its tensor, which others may have in common with it."""
    box: Box
    spec: QuantSpec


class Quantiser:
    """Quantises the shards of one rank, where they are.

    It takes memory for the maxima of all groups (4 bytes each) and a few float32 tiles; where the shards are not in the
    snapshot's memory but on a device, for the codes of one shard too.

    Args:
        layout: of all ranks, as it is before it is quantised.
        rank: which of them this is.
        recipe: what is quantised, and how.
        exchange: how the ranks tell each other their maxima; needed when scale groups are cut between ranks, or when
            a format has a scale for whole tensors that several ranks hold.

    Raises:
        WeightsError: as `published_layout`; a group that the layout does not hold wholly; no exchange where one is
            needed, or one between other ranks.
    """

    def __init__(self, layout: Layout, rank: int, recipe: QuantRecipe, exchange: MaximaExchange | None = None) -> None:
        self.layout = published_layout(layout, recipe)
        """What is published."""
        made, shards = quantisation_of(layout.tensors, recipe), layout.ranks[rank].shards
        self._exchange = exchange
        self._places = {(entry.shard, entry.part): place for place, entry in enumerate(published_entries(shards, made))}
        self._jobs = {
            index: Job(scale=made.scale_of[shard.tensor], box=shard.box, spec=spec)
            for index, shard in enumerate(shards)
            if (spec := made.specs[shard.tensor]) is not None
        }
        self._schedule = make_schedule(layout, rank, made)
        if self._schedule.num_rounds:
            _check_exchange(exchange, layout, rank)

    def measured(self, sources: Sequence[torch.Tensor]) -> Fill:
        """Find the scales of `sources`, this rank's shards; return what writes the version into a snapshot.

        Every rank calls this equally often, for the same versions in the same order. A rank that cannot quantise its
        shards says so to the others, so that nobody waits for it.

        Raises:
            WeightsError: an infinite or NaN element, here or on a rank that shares a group; or the exchange failed.
        """
        failure: WeightsError | None = None
        try:
            own = {index: partial_amax(sources[index], job.box, job.spec) for index, job in self._jobs.items()}
        except WeightsError as error:
            failure, own = error, {index: _unknown(job) for index, job in self._jobs.items()}
        try:
            heard, totals = self._exchanged(own)
        finally:
            if failure is not None:
                raise failure  # says more than what may have become of the exchange
        maxima = {
            index: _whole(self._jobs[index], amax, heard.get(index, ()), totals.get(self._jobs[index].scale))
            for index, amax in own.items()
        }
        return partial(self._fill, sources, maxima)

    def _exchanged(self, own: dict[int, Amax]) -> tuple[dict[int, list[Amax]], dict[int, torch.Tensor]]:
        """Return what others know of this rank's groups, by shard, and the maxima that scales of tensors need."""
        plan, totals = self._schedule, self._own_totals(own)
        outgoing = [
            _joined(
                [own[part.shard].part(part.groups).groups for part in parts] + [totals[scale] for scale in reported]
            )
            for parts, reported in zip(plan.tells, plan.reports, strict=True)
        ]
        shapes = [
            [part.groups.size for part in parts] + [()] * len(scales)
            for parts, scales in zip(plan.hears, plan.collects, strict=True)
        ]
        heard: dict[int, list[Amax]] = {}
        for rank, values in enumerate(self._swapped(outgoing, shapes)):
            parts = plan.hears[rank]
            for part, groups in zip(parts, values[: len(parts)], strict=True):
                amax = Amax(box=part.groups, groups=groups, total=own[part.shard].total)
                heard.setdefault(part.shard, []).append(amax)
            for scale, total in zip(plan.collects[rank], values[len(parts) :], strict=True):
                totals[scale] = torch.maximum(totals[scale], total.to(totals[scale].device))
        if plan.num_rounds > 1:
            outgoing = [_joined([totals[scale] for scale in scales]) for scales in plan.collects]
            told = self._swapped(outgoing, [[()] * len(scales) for scales in plan.reports])
            for scales, values in zip(plan.reports, told, strict=True):
                totals.update(zip(scales, values, strict=True))
        return heard, totals

    def _own_totals(self, own: dict[int, Amax]) -> dict[int, torch.Tensor]:
        """Return the maxima of what this rank holds of tensors with scales of their own, by scale."""
        totals: dict[int, torch.Tensor] = {}
        for index, amax in own.items():
            if amax.total is not None:
                scale = self._jobs[index].scale
                totals[scale] = torch.maximum(totals.get(scale, amax.total), amax.total)
        return totals

    def _swapped(
        self, outgoing: list[torch.Tensor], shapes: list[list[tuple[int, ...]]]
    ) -> Sequence[list[torch.Tensor]]:
        """Send a message to each rank; return those of each rank, cut into tensors of `shapes`."""
        messages: Sequence[torch.Tensor] = outgoing  # without rounds, all that this rank tells it tells itself
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
            "must exchange their maxima; give an exchange, such as GroupExchange()."
        )
    if (exchange.rank, exchange.num_ranks) != (rank, len(layout.ranks)):
        raise WeightsError(
            f"The exchange is between {exchange.num_ranks} ranks, of which this is {exchange.rank}, but "
            f"{layout.replica} has {len(layout.ranks)}, of which this is {rank}; give the group of the layout's ranks, "
            "in their order."
        )


def _unknown(job: Job) -> Amax:
    """Return maxima that spoil all that they are combined with."""
    box = job.spec.scale_box(job.box)
    groups = torch.full(box.size, torch.nan, dtype=torch.float32)
    total = torch.tensor(torch.nan, dtype=torch.float32) if job.spec.format.two_level else None
    return Amax(box=box, groups=groups, total=total)


def _whole(job: Job, own: Amax, heard: Sequence[Amax], total: torch.Tensor | None) -> Amax:
    """Return the maxima of whole groups and of the whole tensor."""
    told = [amax.groups for amax in heard] + ([] if total is None else [total])
    if not all(bool(value.isfinite().all()) for value in told):
        raise WeightsError(
            f"Another rank cannot quantise its part of tensor {job.spec.tensor.name}; its own error says why."
        )
    return replace(combine(own, heard) if heard else own, total=total)


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values]) if values else torch.empty(0, dtype=torch.float32)

"""A policy replica as its own process has it: rank 0, and the other ranks, which do the same at the same time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.common.errors import WeightsError
from starling.common.ids import TrainerKind
from starling.common.kinds import KINDS
from starling.common.offers import OFFER_TIMEOUT_S
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.policy.shell.loading import PolicyProcess
from starling.policy.shell.rank import (
    AddRoots,
    LayoutParts,
    Load,
    Offer,
    PolicyRank,
    Resume,
    Roots,
    Serve,
    Sleep,
    Snapshot,
    TakeExport,
    TakeState,
    Train,
    Wake,
    WriteExport,
    WriteState,
    serve_rank,
)
from starling.policy.shell.ranks import RankLink, Ranks
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.shared_export import ExportedWeights
from starling.policy.train.checkpoint.state import SavedState, StateSnapshot
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.parallel.group import SharedFiles
from starling.weightsync.offers.offer import Offer as WeightsOffer
from starling.weightsync.offers.offer import RankOffer, Transport, make_offer, root_of_parts
from starling.weightsync.plan.layout import decode, decode_layout, encode, join_ranks
from starling.weightsync.publisher.published import PublishedSnapshot

LOAD_S: Final = 6 * 3600.0
"""Longest that the other ranks may take longer to load the model than rank 0: one loads it after the other."""


class PolicyReplica:
    """All ranks of a replica. Its methods are for the working thread of rank 0."""

    def __init__(
        self, settings: PolicyProcess, arguments: ServiceArguments, path: Path, transport: tuple[Transport, bool]
    ) -> None:
        """Start the other ranks, and load the model on all.

        Args:
            settings: of the policy.
            arguments: its command line.
            path: of the model's folder.
            transport: of the weights, and whether it encrypts them.

        Raises:
            ConfigError: the model cannot be loaded, or the ranks do not fit it.
        """
        parallel = settings.policy.parallel
        self._ranks, files = Ranks(arguments.name, parallel.timeout_s), None
        if parallel.num_ranks > 1 and KINDS[settings.run.kind].trains:
            # Anonymous files, which forks inherit: no file has to be removed, and no other process can open them.
            files = SharedFiles(*(Path(f"/proc/self/fd/{os.memfd_create(name)}") for name in SharedFiles._fields))

            def serve(rank: int, link: RankLink) -> None:
                serve_rank(partial(PolicyRank, settings, arguments, path, transport, rank=rank, files=files), link)

            self._ranks.start(parallel.num_ranks, arguments.folder, settings.run.log_format, serve)
        load = partial(PolicyRank, settings, arguments, path, transport, files=files)
        self.rank, layouts = self._ranks.together(Load(), load, timeout_s=LOAD_S)
        """Rank 0."""
        self._layouts = [decode_layout(one) for one in layouts]
        self._name, self._patience_s = arguments.name, settings.policy.saving.patience_s

    @property
    def is_broken(self) -> bool:
        """Whether the ranks cannot go on together."""
        return self._ranks.is_broken

    def serve(self) -> None:
        """Prepare to publish. Raises ConfigError as `PolicyRank.serve`."""
        layout = self.rank.layout()
        if self._layouts:
            layout = join_ranks(self._name, [layout, *self._layouts])
        self._ranks.together(Serve(layout=encode(layout)), partial(self.rank.serve, layout))

    def train(
        self, message: wire.TrainStep, buffers: tuple[bytes, ...]
    ) -> tuple[dict[str, float], tuple[wire.Alarm, ...]]:
        """Make a step; see `PolicyRank.train`."""
        command = Train(message=message, buffers=buffers)
        return self._ranks.together(command, partial(self.rank.train, message, buffers), agree=True)[0]

    def snapshot(
        self, version: int, layouts: tuple[str, ...], plans: tuple[bytes, ...]
    ) -> PublishedSnapshot | JoinedSnapshot:
        """Copy the present weights into the snapshots of all ranks; see `PolicyRank.snapshot`."""
        begin = time.perf_counter()
        command = Snapshot(version=version, layouts=layouts, plans=plans)
        own, others = self._ranks.together(command, partial(self.rank.snapshot, version, layouts, plans))
        if not others:
            return own
        return JoinedSnapshot(own, time.perf_counter() - begin, self._ranks)

    def add_layout_roots(self, layouts: tuple[str, ...], plans: tuple[bytes, ...]) -> None:
        """Compute further layout roots of the newest version; see `PolicyRank.add_layout_roots`."""
        command = AddRoots(layouts=layouts, plans=plans)
        self._ranks.together(command, partial(self.rank.add_layout_roots, layouts, plans))

    @property
    def model(self) -> Any:
        """The model of rank 0, for its architecture."""
        return self.rank.learner.model

    def take_state(self, version: int, *, run: str = "", metrics: Mapping[str, float] | None = None) -> StateSnapshot:
        """Copy the present state of all ranks into host memory; see `Learner.take_state`."""
        own = partial(self.rank.learner.take_state, version, run=run, metrics=metrics)
        snapshot, others = self._ranks.together(TakeState(version=version), own)
        if not others:
            return snapshot
        return _ReplicaSnapshot(snapshot.state, snapshot.tensors, partial(self._write_state, snapshot))

    def _write_state(self, snapshot: StateSnapshot, storage: Storage, path: str) -> dict[str, str]:
        """Write the state of all ranks, in the thread that writes states."""
        own = partial(self.rank.write_state, snapshot, storage, path)
        return self._ranks.together(WriteState(path=path), own, timeout_s=self._patience_s)[0]

    def resume(self, saved: SavedState, *, next_kind: TrainerKind | None = None) -> int:
        """Restore a saved state on all ranks; see `Learner.resume`."""
        command = Resume(url=saved.url, next_kind=next_kind)
        return self._ranks.together(command, partial(self.rank.resume, saved, next_kind))[0]

    def exported(self, *, merged: bool = False) -> ExportedWeights:
        """Copy the tensors of an export into host memory; see `Learner.exported`."""
        if self.rank.learner.parallel is None:
            return self.rank.learner.exported(merged=merged)
        own = partial(self.rank.learner.exported_parts, merged=merged)
        parts, _ = self._ranks.together(TakeExport(merged=merged), own)
        return _ReplicaWeights(partial(self._write_export, parts, merged))

    def _write_export(self, parts: Mapping[str, Part], merged: bool, folder: Path, shard_mb: int) -> None:
        """Write an export of all ranks, in the thread that writes."""
        files = self.rank.export_files(shard_mb, merged=merged)
        files.create(folder)
        own = partial(files.write, folder, parts)
        command = WriteExport(folder=str(folder), shard_mb=shard_mb, merged=merged)
        self._ranks.together(command, own, timeout_s=self._patience_s)

    def sleep(self) -> int:
        """Leave the devices to others. Returns the bytes freed on that of rank 0."""
        return self._ranks.together(Sleep(), self.rank.sleep)[0]

    def wake(self) -> None:
        """Return to the devices."""
        self._ranks.together(Wake(), self.rank.learner.wake)

    def close(self) -> None:
        """End all ranks."""
        self.rank.publisher.close()
        self._ranks.close(self.rank.leave)


@dataclass(frozen=True)
class _ReplicaSnapshot(StateSnapshot):
    """A state in the host memory of several ranks."""

    write_all: Callable[[Storage, str], dict[str, str]]

    def write(self, storage: Storage, path: str) -> dict[str, str]:
        """Write the parts of all ranks; see `StateSnapshot.write`."""
        return self.write_all(storage, path)


@dataclass(frozen=True)
class _ReplicaWeights:
    """The weights of an export in the host memory of several ranks."""

    write_all: Callable[[Path, int], None]

    def write(self, folder: Path, shard_mb: int) -> None:
        """See `SharedWeights.write`."""
        self.write_all(folder, shard_mb)


class JoinedSnapshot:
    """One version in the snapshots of all ranks, as `starling.common.offers.PublishedVersion` describes it."""

    def __init__(self, own: PublishedSnapshot, stall_s: float, ranks: Ranks) -> None:
        """`own`: that of rank 0; `stall_s`: seconds that all took; `ranks`: the others, which have taken theirs."""
        self.version, self.stall_s = own.version, stall_s
        self._own, self._ranks = own, ranks
        self._others = ranks.ask(Offer(timeout_s=OFFER_TIMEOUT_S))

    def offer(self, timeout_s: float) -> WeightsOffer:
        """Return the offer of all ranks.

        Raises:
            WeightsError: there is none of one of them, or not within `timeout_s`.
        """
        ranks = list(self._own.offer(timeout_s).ranks)
        try:
            ranks += [decode(RankOffer, data) for data in _results(self._others, timeout_s)]
        except FutureTimeoutError as error:
            text = f"Version {self.version} was not digested by all ranks within {timeout_s:g} s."
            raise WeightsError(text) from error
        return make_offer(self.version, ranks)

    def encoded_offer(self, timeout_s: float) -> bytes:
        """Return the offer as it travels. Raises WeightsError as `offer` does."""
        return encode(self.offer(timeout_s))

    def layout_roots(self, timeout_s: float) -> dict[str, str]:
        """Return the layout roots that were asked for, by key, as far as they are known within `timeout_s`."""
        asked = self._ranks.ask(Roots(version=self.version, timeout_s=timeout_s))
        own = self._own.layout_parts(timeout_s)
        try:
            others = [_PARTS.decode(data) for data in _results(asked, timeout_s)]
        except FutureTimeoutError:
            return {}
        return {
            key: root_of_parts([part, *(one[key] for one in others)])
            for key, part in own.items()
            if all(key in one for one in others)
        }


def _results(futures: list[Future[bytes]], timeout_s: float) -> list[bytes]:
    """Return the results of all futures. Raises a timeout, or what one of them raises."""
    deadline = time.monotonic() + timeout_s
    return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


_PARTS: Final = msgspec.msgpack.Decoder(LayoutParts)

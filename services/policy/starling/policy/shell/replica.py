"""A policy replica as its own process has it: rank 0, and the other ranks, which do the same at the same time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.common.errors import ConfigError, StarlingError, WeightsError
from starling.common.ids import TrainerKind
from starling.common.kinds import KINDS
from starling.common.nodes.facts import mark
from starling.common.nodes.nodes import Nodes
from starling.common.offers import OFFER_TIMEOUT_S
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.policy.shell.commands import (
    AddRoots,
    EndProfile,
    Load,
    Offer,
    ReceiveState,
    Resume,
    Roots,
    SendState,
    Serve,
    Sleep,
    Snapshot,
    StartProfile,
    TakeExport,
    TakeState,
    Train,
    Wake,
    WriteExport,
    WriteState,
)
from starling.policy.shell.facts import facts_of, gather_ranks, share_of
from starling.policy.shell.loading import PolicyProcess
from starling.policy.shell.profiles import results_of_ranks
from starling.policy.shell.rank import LayoutParts, PolicyRank, RankSetup, shared_files
from starling.policy.shell.rank_process import serve_rank
from starling.policy.shell.ranks import Ranks
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.shared_export import ExportedWeights
from starling.policy.train.checkpoint.state import SavedState, StateSnapshot
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.parallel.group import RankHost, serve_store
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
        parallel, host, on_host = settings.policy.parallel, None, 1
        setup = RankSetup(settings, arguments, path, transport)
        self._ranks = Ranks(arguments.name, parallel.timeout_s)
        if parallel.has_mesh and KINDS[settings.run.kind].trains:
            setup = replace(setup, files=shared_files())
            on_host = parallel.num_ranks if arguments.nodes is None else share_of(arguments.nodes, parallel.num_ranks)
            self._ranks.start(
                on_host,
                arguments.folder,
                settings.run.log_format,
                lambda rank, link: serve_rank(setup, rank, 0, link),
            )
        self._num_nodes = 1
        if arguments.nodes is not None:
            self._gather(settings, arguments, path, transport)
            self._store, address = serve_store(arguments.nodes.host)  # as long as there are ranks
            host = RankHost(0, 0, on_host, address)
        load = partial(PolicyRank, setup, host=host)
        command = Load(store="" if host is None else host.store)
        with self.ending_nodes():
            self.rank, layouts = self._ranks.together(command, load, timeout_s=LOAD_S)
            """Rank 0."""
        self._layouts = [decode_layout(one) for one in layouts]
        self._name, self._patience_s = arguments.name, settings.policy.saving.patience_s

    def _gather(
        self, settings: PolicyProcess, arguments: ServiceArguments, path: Path, transport: tuple[Transport, bool]
    ) -> None:
        """Wait for the other nodes; arguments as of `__init__`. Raises ConfigError, or UnreachableError."""
        assert arguments.nodes is not None
        marker = secrets.token_hex(16)
        facts = facts_of(settings, arguments, path, transport, marker)
        mark(arguments.folder, arguments.name, marker)
        key = arguments.key_file(settings.network.curve)
        nodes = Nodes(arguments.name, arguments.nodes, settings.network, key, facts)
        try:
            gather_ranks(nodes, settings.policy.parallel)
        except StarlingError as error:
            nodes.close(str(error) if isinstance(error, ConfigError) else "")
            raise
        self._num_nodes = arguments.nodes.num_nodes
        self._ranks.add_nodes(nodes)

    @contextmanager
    def ending_nodes(self) -> Iterator[None]:
        """End the agents of other nodes if a wrong setting is found in this block: a restart would find it, too."""
        try:
            yield
        except ConfigError as error:
            self._ranks.dismiss(str(error))
            raise

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
        snapshot, _ = self._ranks.together(TakeState(version=version), own)
        if self.rank.learner.parallel is None:
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
        # One host after the other: pages of a file that two hosts have mapped, as over NFS, would overwrite each other.
        for node in range(self._num_nodes):
            command = WriteExport(folder=str(folder), shard_mb=shard_mb, merged=merged, node=node)
            own = partial(files.write, folder, parts) if node == 0 else lambda: None
            self._ranks.together(command, own, timeout_s=self._patience_s)

    def send_state(self, peers: tuple[str, str], group: str, version: int) -> None:
        """Send the present state of all ranks to another replica; see `PolicyRank.send_state`."""
        command = SendState(peers=peers, group=group, version=version)
        self._ranks.together(command, partial(self.rank.send_state, peers, group, version))

    def receive_state(self, peers: tuple[str, str], group: str) -> int:
        """Copy the state of all ranks of another replica; see `PolicyRank.receive_state`."""
        command = ReceiveState(peers=peers, group=group)
        return self._ranks.together(command, partial(self.rank.receive_state, peers, group))[0]

    def sleep(self) -> int:
        """Leave the devices to others. Returns the bytes freed on that of rank 0."""
        return self._ranks.together(Sleep(), self.rank.sleep)[0]

    def wake(self) -> None:
        """Return to the devices."""
        self._ranks.together(Wake(), self.rank.learner.wake)

    def start_profile(self, order: wire.Profile) -> None:
        """Have the other ranks start to record, those of the order."""
        self._ranks.ask(StartProfile(order=order))

    def end_profile(self) -> tuple[str, list[str]]:
        """Have the other ranks write what they have recorded. Returns that in words, and their files."""
        return results_of_ranks(self._ranks.ask(EndProfile()))

    def close(self, *, is_over: bool) -> None:
        """End all ranks. `is_over`: this process is not started again, so other nodes end, too."""
        self.rank.publisher.close()
        self._ranks.close(self.rank.leave, is_over=is_over)


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

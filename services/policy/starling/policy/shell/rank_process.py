"""A rank that is not rank 0, in a process of its own: executes the commands of rank 0 and answers them.

Commands are executed in their order, but for those that wait or write, which have threads of their own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import structlog

from starling.common.observe.process import EXIT_FAILED, end_process
from starling.policy.shell.commands import (
    AddRoots,
    Command,
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
from starling.policy.shell.facts import share_of
from starling.policy.shell.profiles import RankProfiles
from starling.policy.shell.rank import PolicyRank, RankSetup
from starling.policy.shell.ranks import RankLink
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.state import StateSnapshot
from starling.policy.train.parallel.group import RankHost
from starling.weightsync.plan.layout import decode_layout, encode
from starling.weightsync.publisher.published import PublishedSnapshot

log = structlog.get_logger(__name__)


def serve_rank(setup: RankSetup, rank: int, first_rank: int, link: RankLink) -> None:
    """Be a rank until rank 0, at the other end of `link`, ends.

    Args:
        setup: of the ranks of this host.
        rank: of this process.
        first_rank: of this host.
        link: to rank 0.
    """

    def load(command: Load) -> PolicyRank:
        host, nodes = None, setup.arguments.nodes
        if nodes is not None:
            num_ranks = share_of(nodes, setup.settings.policy.parallel.num_ranks)
            host = RankHost(nodes.number, first_rank, num_ranks, command.store)
        return PolicyRank(setup, rank=rank, host=host)

    work = _RankWork(load, RankProfiles(setup.arguments, rank))
    decoder = msgspec.msgpack.Decoder(Command)
    while (request := link.receive()) is not None:
        number, encoded = request
        command = decoder.decode(encoded)
        if isinstance(command, Offer):
            work.offers.submit(_answer, link, number, work.offer(command))
        elif isinstance(command, Roots):
            work.offers.submit(_answer, link, number, work.roots(command))
        elif isinstance(command, WriteState | WriteExport):
            work.writer.submit(_answer, link, number, partial(work.write, command))
        else:
            link.answer(number, partial(work.execute, command))
    work.close()


def _answer(link: RankLink, number: int, work: Callable[[], bytes]) -> None:
    """Answer a request in a background thread, where nothing else would notice an unexpected error."""
    try:
        link.answer(number, work)
    except Exception:  # the edge of the thread: the traceback is the report, and the process ends
        log.exception("failed")
        end_process(EXIT_FAILED)


class _RankWork:
    """Executes commands on a rank that is not rank 0."""

    def __init__(self, load: Callable[[Load], PolicyRank], profiles: RankProfiles) -> None:
        self._load, self._profiles = load, profiles
        self._rank: PolicyRank | None = None
        self._snapshot: PublishedSnapshot | None = None
        self._state: StateSnapshot | None = None
        self._export: dict[str, Part] = {}
        self.offers, self.writer = ThreadPoolExecutor(1, "offers"), ThreadPoolExecutor(1, "writer")

    def execute(self, command: Command) -> bytes:
        """Return the answer to a command. Raises StarlingError, or any error of a collective operation."""
        if isinstance(command, Load):
            self._rank = self._load(command)
            gc.freeze()
            gc.enable()
            return encode(self._rank.layout())
        rank = self._rank
        assert rank is not None, "rank 0 ends where a model cannot be loaded"
        match command:
            case Serve():
                rank.serve(decode_layout(command.layout))
                log.info("ready", transport=rank.publisher.transport)
            case Train():
                self._profiles.step(rank, command.message, command.buffers)
            case Snapshot():
                self._snapshot = rank.snapshot(command.version, command.layouts, command.plans)
            case AddRoots():
                rank.add_layout_roots(command.layouts, command.plans)
            case Sleep():
                rank.sleep()
            case Wake():
                rank.learner.wake()
            case Resume():
                rank.resume(rank.open_state(command.url), command.next_kind)
            case SendState():
                rank.send_state(command.peers, command.group, command.version)
            case ReceiveState():
                rank.receive_state(command.peers, command.group)
            case StartProfile():
                self._profiles.start(rank, command.order)
            case EndProfile():
                return self._profiles.end(rank)
            case TakeState():
                self._state = rank.learner.take_state(command.version)
            case TakeExport():
                self._export = rank.learner.exported_parts(merged=command.merged)
        return b""

    def offer(self, command: Offer) -> Callable[[], bytes]:
        """Return a function that waits for the offer of the present snapshot."""
        snapshot = self._snapshot

        def wait() -> bytes:
            assert snapshot is not None, "a snapshot comes before its offer"
            return encode(snapshot.offer(command.timeout_s).ranks[0])

        return wait

    def roots(self, command: Roots) -> Callable[[], bytes]:
        """Return a function that waits for the parts of the layout roots; there are none of an older version."""
        snapshot = self._snapshot

        def wait() -> bytes:
            is_newest = snapshot is not None and snapshot.version == command.version
            return msgspec.msgpack.encode(snapshot.layout_parts(command.timeout_s) if is_newest and snapshot else {})

        return wait

    def write(self, command: WriteState | WriteExport) -> bytes:
        """Write this rank's parts of the state, or of the export, that was copied."""
        assert self._rank is not None
        if isinstance(command, WriteExport):
            if command.node != self._rank.node:
                return b""
            files = self._rank.export_files(command.shard_mb, merged=command.merged)
            files.write(Path(command.folder), self._export)
            return b""
        assert self._state is not None, "a state is copied before it is written"
        self._rank.write_state(self._state, self._rank.storage, command.path)
        return b""

    def close(self) -> None:
        """End everything."""
        if self._rank is not None:
            self._rank.publisher.close()
            self._rank.leave()

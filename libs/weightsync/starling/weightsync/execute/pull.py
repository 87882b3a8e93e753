"""The puller: brings a version into staging while the engine works, switches to it, and proves what the engine holds.

    stale ──pull──> pulling ──> staged ──switch──> current ──pull──> pulling ...
      ^                │           │
      └── any failure ─┘           └── a switch that breaks off ──> torn

A failed pull leaves the live tensors alone: the replica keeps its version. A torn replica holds parts of two versions
and must not generate before it has switched successfully.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
import numpy as np
import torch

from starling.common.errors import WeightsError
from starling.weightsync.execute.deadline import Deadline, never
from starling.weightsync.execute.local import LocalReader
from starling.weightsync.execute.reader import Reader
from starling.weightsync.execute.regions import Memory, view
from starling.weightsync.execute.stage import Proof, Stage, make_stage
from starling.weightsync.execute.tensors import bytes_of, live_views, packed_views, part_of
from starling.weightsync.execute.ucx import UcxReader
from starling.weightsync.layout import Layout, aligned, check_layout, pieces_of
from starling.weightsync.offer import Offer, RankOffer, check_offer, digest_of, root_of
from starling.weightsync.plan import Plan

State = Literal["stale", "pulling", "staged", "current", "torn"]


class PullReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one pull did. The parts sum to `seconds`, up to the time between them."""

    version: int
    transport: str
    """Transport of the sources; joined by ``+`` when they differ."""
    num_buckets: int
    size_bytes: int
    """Payload."""
    seconds: float
    prepare_s: float
    """Checking plan and offer, connecting, opening the snapshots."""
    read_s: float
    """Reading and unpacking."""
    verify_s: float
    """Digests, and confirming that the snapshots stood still."""


class Puller:
    """The destination of one rank. `pull` runs in a thread of the caller's; the live tensors are not touched by it."""

    def __init__(self, layout: Layout, *, rank: int = 0) -> None:
        check_layout(layout)
        self._layout, self._rank = layout, rank
        extent = sum(aligned(piece.size_bytes) for piece in pieces_of(layout, rank))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._staging: Memory = np.frombuffer(mmap.mmap(-1, max(extent, 1), flags=flags), np.uint8)
        self._staged = packed_views(layout, rank, self._staging)
        self._readers: dict[str, Reader] = {}
        self._stage: Stage | None = None
        self._busy = threading.Lock()
        self._staged_version = -1
        self.version = -1
        """The version that the live tensors hold, -1 before the first switch and while torn."""
        self.state: State = "stale"

    def pull(self, offer: Offer, plan: Plan, *, deadline_s: float, cancelled: Callable[[], bool] = never) -> PullReport:
        """Bring the offered version into staging and prove it.

        Args:
            offer: the version, from all source ranks that the plan reads.
            plan: made from the source's layout and this one.
            deadline_s: seconds from now by which it must be done.
            cancelled: asked between any two steps; True ends the pull.

        Raises:
            WeightsError: not done by the deadline, cancelled, refused, revoked, a peer lost, a digest that differs, a
                plan that does not fit, or another pull under way. The live tensors keep their version.
        """
        if not self._busy.acquire(blocking=False):
            raise WeightsError("Another pull is under way.")
        try:
            if self.state != "torn":
                self.state = "pulling"
            self._staged_version = -1
            report = self._pull(offer, plan, Deadline(deadline_s, cancelled))
            self._staged_version = offer.version
            self.state = "staged"
            return report
        except BaseException:
            if self.state == "pulling":
                self.state = "stale"
            self._hang_up(keep=())
            raise
        finally:
            self._busy.release()

    def switch(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Copy the staged version into the live tensors, in place. Return the version.

        Raises:
            WeightsError: nothing is staged, a pull is under way, or the tensors do not fit the layout; then nothing
                was touched.
        """
        if not self._busy.acquire(blocking=False):  # waiting would pause the engine for the length of a pull
            raise WeightsError("There is no staged version to switch to: a pull is under way.")
        try:
            if self._staged_version < 0:
                raise WeightsError("There is no staged version to switch to: pull first.")
            live = live_views(self._layout, self._rank, tensors)
            self.state, self.version = "torn", -1
            with torch.no_grad():
                for destination, source in zip(live, self._staged, strict=True):
                    destination.copy_(source)
            self.version, self._staged_version = self._staged_version, -1
            self.state = "current"
            return self.version
        finally:
            self._busy.release()

    def attest(self, tensors: Mapping[str, torch.Tensor], offer: Offer) -> str:
        """Return the root of what the live tensors really hold of the pieces of `offer`.

        It equals `offer.root` when they hold every piece of that version bit for bit (`offer.expected_root` when the
        plan brings only some of the pieces). The pieces are found by the plan of the last pull.

        Raises:
            WeightsError: no plan yet, another offer's pieces, or two shards that should be equal are not.
        """
        stage = self._stage
        if stage is None or stage.pieces != {rank.rank: rank.pieces for rank in offer.ranks}:
            raise WeightsError(f"Version {offer.version} was not pulled by this plan: there is nothing to attest.")
        live = live_views(self._layout, self._rank, tensors)
        boxes = [piece.box for piece in pieces_of(self._layout, self._rank)]

        def digest(proof: Proof) -> str:
            shard = proof.destination_shard
            return digest_of(bytes_of(part_of(live[shard], boxes[shard], proof.piece.box)).data)

        return root_of((proof.piece, digest(proof)) for group in stage.proofs for proof in group)

    def close(self) -> None:
        """Close every connection; waits for a pull under way to end, which its deadline ensures."""
        with self._busy:
            self._hang_up(keep=())

    def _pull(self, offer: Offer, plan: Plan, deadline: Deadline) -> PullReport:
        begin = time.perf_counter()
        check_offer(offer)
        if self._stage is None or not self._stage.fits(plan, offer):
            self._stage = make_stage(plan, offer, self._layout, self._rank)
        stage = self._stage
        needed = {read.source_rank for read in stage.reads}
        sources = {rank.rank: rank for rank in offer.ranks if rank.rank in needed}
        self._hang_up(keep=[_key(source) for source in sources.values()])
        for source in sources.values():
            self._reader(source).open(source, deadline)
        prepared = time.perf_counter()
        read_s = 0.0
        for read, proofs in zip(stage.reads, stage.proofs, strict=True):
            reader = self._reader(sources[read.source_rank])
            before = time.perf_counter()
            reader.read(read, self._staging, deadline)
            read_s += time.perf_counter() - before
            for proof in proofs:
                deadline.check("comparing digests")
                self._verify(proof, sources[proof.source_rank], reader, deadline)
        for source in sources.values():
            self._reader(source).confirm(deadline)
            self._reader(source).release(deadline)
        end = time.perf_counter()
        return PullReport(
            version=offer.version,
            transport="+".join(sorted({source.transport for source in sources.values()})),
            num_buckets=len(stage.reads),
            size_bytes=sum(bucket.size_bytes for bucket in plan.of_destination(self._rank)),
            seconds=end - begin,
            prepare_s=prepared - begin,
            read_s=read_s,
            verify_s=end - prepared - read_s,
        )

    def _verify(self, proof: Proof, source: RankOffer, reader: Reader, deadline: Deadline) -> None:
        staged = np.ascontiguousarray(view(self._staging, proof.region)).reshape(-1).view(np.uint8)
        if digest_of(staged.data) != source.digests[proof.source_shard]:
            reader.confirm(deadline)  # says so when the snapshot was revoked, which is why then
            raise WeightsError(f"Box {proof.piece.box} of {proof.piece.names[0]} arrived with another digest.")

    def _reader(self, source: RankOffer) -> Reader:
        key = _key(source)
        reader = self._readers.get(key)
        if reader is None:
            reader = UcxReader(source.address) if source.transport == "ucx" else LocalReader(source.address)
            self._readers[key] = reader
        return reader

    def _hang_up(self, keep: list[str] | tuple[str, ...]) -> None:
        for key in [key for key in self._readers if key not in keep]:
            self._readers.pop(key).close()


def _key(source: RankOffer) -> str:
    return f"{source.transport}:{source.address}"

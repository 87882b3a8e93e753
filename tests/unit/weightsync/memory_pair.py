"""A publisher and a destination in child processes, and the memory of each in addition to its tensors.

Private memory counts for its process, and snapshots for their publisher only, although readers on the same host map
them, too. The baseline has code, threads, the model's own tensors, and the memory retained by a first tiny publication.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from starling.weightsync.costs.estimate import destination_peak, publisher_peak
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec
from starling.weightsync.plan.planner import Plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller

ANSWER_S = 120.0
SAMPLED_EVERY_S = 0.002
NUM_VERSIONS = 3
"""One more than there are snapshots: memory must not grow from one version to the next."""
ROWS, COLUMNS = 2048, 1024
LAYER_BYTES = 2 * 3 * ROWS * COLUMNS
"""Without the norm, at two bytes an element."""


def layouts(num_layers: int) -> tuple[Layout, Layout]:
    """Return what the publisher holds and what the destination needs.

    The destination keeps two tensors side by side, whose rows are strided there, and one in two halves, whose rows are
    strided at the source; a norm is too small for a message of its own.
    """
    specs: list[TensorSpec] = []
    held: list[Shard] = []
    wanted: list[Shard] = []

    def add(name: str, *shape: int) -> int:
        box = Box(offset=(0,) * len(shape), size=shape)
        strides = (shape[1], 1) if len(shape) == 2 else (1,)
        held.append(Shard(tensor=len(specs), box=box, storage=name, offset_bytes=0, strides=strides))
        specs.append(TensorSpec(name=name, shape=shape, dtype="bfloat16"))
        return len(specs) - 1

    def want(tensor: int, storage: str, row_elements: int, *spans: tuple[int, int], first: int = 0) -> None:
        box = Box(offset=tuple(a for a, _ in spans), size=tuple(b - a for a, b in spans))
        strides = (row_elements, 1) if len(spans) == 2 else (1,)
        wanted.append(Shard(tensor=tensor, box=box, storage=storage, offset_bytes=2 * first, strides=strides))

    for layer in range(num_layers):
        for number, name in enumerate(("gate", "up")):
            spans = ((0, ROWS), (0, COLUMNS))
            tensor = add(f"{layer}.{name}", ROWS, COLUMNS)
            want(tensor, f"{layer}.gate_up", 2 * COLUMNS, *spans, first=number * COLUMNS)
        tensor = add(f"{layer}.down", ROWS, COLUMNS)
        for half in range(2):
            columns = (half * COLUMNS // 2, (half + 1) * COLUMNS // 2)
            want(tensor, f"{layer}.down.{half}", COLUMNS // 2, (0, ROWS), columns)
        want(add(f"{layer}.norm", COLUMNS), f"{layer}.norm", 1, (0, COLUMNS))
    source, destination = (
        Layout(replica=name, tensors=tuple(specs), ranks=(RankLayout(place=Place(host="h"), shards=tuple(shards)),))
        for name, shards in (("policy-0", held), ("rollout-0", wanted))
    )
    return source, destination


def storages(layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of a rank, with every page touched."""
    extents: dict[str, int] = {}
    for shard in layout.ranks[0].shards:
        last = sum((n - 1) * stride for n, stride in zip(shard.box.size, shard.strides, strict=True))
        extents[shard.storage] = max(extents.get(shard.storage, 0), shard.offset_bytes // 2 + last + 1)
    made = {name: torch.empty(extent, dtype=torch.bfloat16) for name, extent in extents.items()}
    for tensor in made.values():
        tensor.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
    return made


class PublisherSide:
    """The publisher's side."""

    def __init__(self, num_layers: int) -> None:
        self._tensors = {n: storages(layouts(n)[0]) for n in (1, num_layers)}
        self._version = 0
        self._publisher: Publisher | None = None

    def open(self, num_layers: int, transport: Transport) -> None:
        self._num_layers = num_layers
        self._publisher = Publisher(layouts(num_layers)[0], transport=transport)

    def publish(self) -> Offer:
        assert self._publisher is not None
        self._version += 1
        return self._publisher.publish(self._version, self._tensors[self._num_layers])

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None
        gc.collect()


class PullerSide:
    """The destination's side."""

    def __init__(self, num_layers: int) -> None:
        self._tensors = {n: storages(layouts(n)[1]) for n in (1, num_layers)}
        self._puller: Puller | None = None

    def open(self, num_layers: int, plan: Plan) -> None:
        self._num_layers, self._plan = num_layers, plan
        self._puller = Puller(layouts(num_layers)[1])

    def adopt(self, offer: Offer, in_place: bool) -> bool:
        """Bring a version into the live tensors; return whether they hold it."""
        assert self._puller is not None
        live = self._tensors[self._num_layers]
        self._puller.pull(offer, self._plan, deadline_s=ANSWER_S, into=live if in_place else None)
        if not in_place:
            self._puller.switch(live)
        return self._puller.attest(live, offer) == offer.root

    def close(self) -> None:
        if self._puller is not None:
            self._puller.close()
        self._puller = None
        gc.collect()


def _serve_calls(side: type[PublisherSide | PullerSide], num_layers: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    made = side(num_layers)
    pipe.send(None)
    while (order := pipe.recv()) is not None:
        name, arguments = order
        pipe.send(getattr(made, name)(*arguments))


class SideProcess:
    """The child process of one side."""

    def __init__(self, side: type[PublisherSide | PullerSide], num_layers: int) -> None:
        context = mp.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve_calls, args=(side, num_layers, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method in the process, and return its result."""
        self._pipe.send((name, arguments))
        return self.answer()

    def answer(self) -> Any:
        """Return the next message of the process."""
        assert self._pipe.poll(ANSWER_S), "the other process does not answer"
        return self._pipe.recv()

    def memory_bytes(self) -> int:
        """Return the process's memory in bytes: private memory, and its own snapshots."""
        folder = Path(f"/proc/{self.process.pid}")
        lines = (folder / "smaps_rollup").read_text().splitlines()
        private = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))
        return private + sum(_snapshots(folder / "fd").values())


def _snapshots(folder: Path) -> dict[int, int]:
    """Return by inode the size of each arena that a process has open for writing, which only its owner has."""
    found: dict[int, int] = {}
    for file in folder.iterdir():
        try:
            if "starling-snapshots" in os.readlink(file) and file.lstat().st_mode & stat.S_IWUSR:
                status = file.stat()
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            pass  # closed since it was listed
    return found


class PeakMemory:
    """Peak memory of processes during a call, sampled by a thread."""

    def __init__(self, peers: list[SideProcess]) -> None:
        self._peers, self._stop = peers, threading.Event()
        self.before = [peer.memory_bytes() for peer in peers]
        self._most = list(self.before)
        self._thread = threading.Thread(target=self._run)

    def most_during(self, act: Callable[[], None]) -> list[int]:
        """Return by how many bytes each process exceeded its earlier memory while `act` ran."""
        self._thread.start()
        try:
            act()
        finally:
            self._stop.set()
            self._thread.join()
        return [most - before for most, before in zip(self._most, self.before, strict=True)]

    def _run(self) -> None:
        while not self._stop.wait(SAMPLED_EVERY_S):
            for index, peer in enumerate(self._peers):
                self._most[index] = max(self._most[index], peer.memory_bytes())


@dataclass(frozen=True)
class ExtraMemory:
    """Memory of one process in addition to its tensors, in bytes."""

    measured: int
    planned: int
    left: int
    """After everything was closed."""


class MemoryPair:
    """Both processes."""

    def __init__(self, num_layers: int, bucket_bytes: int) -> None:
        self._num_layers, self._bucket_bytes = num_layers, bucket_bytes
        self.peers = [SideProcess(PublisherSide, num_layers), SideProcess(PullerSide, num_layers)]
        for peer in self.peers:
            peer.answer()

    def measure(self, transport: Transport, *, in_place: bool) -> tuple[ExtraMemory, ExtraMemory]:
        """Publish and adopt some versions; return the publisher's memory and the destination's."""
        self._publish_and_adopt(1, transport, in_place)  # loads code
        watch = PeakMemory(self.peers)
        measured = watch.most_during(lambda: self._publish_and_adopt(self._num_layers, transport, in_place))
        left = [peer.memory_bytes() - before for peer, before in zip(self.peers, watch.before, strict=True)]
        source, destination = layouts(self._num_layers)
        plan = self._plan(self._num_layers)
        planned = [
            publisher_peak(source, 0, plan, destination, transport, in_place=in_place).total_bytes,
            destination_peak(plan, destination, 0, transport, in_place=in_place).total_bytes,
        ]
        publisher, puller = map(ExtraMemory, measured, planned, left)
        return publisher, puller

    def close(self) -> None:
        """End the processes."""
        for peer in self.peers:
            peer.process.kill()
            peer.process.join(ANSWER_S)

    def _plan(self, num_layers: int) -> Plan:
        return make_plan(*layouts(num_layers), bucket_bytes=self._bucket_bytes)

    def _publish_and_adopt(self, num_layers: int, transport: Transport, in_place: bool) -> None:
        publisher, destination = self.peers
        publisher.ask("open", num_layers, transport)
        destination.ask("open", num_layers, self._plan(num_layers))
        for _ in range(NUM_VERSIONS):
            assert destination.ask("adopt", publisher.ask("publish"), in_place), (
                "the destination does not hold what was published"
            )
        destination.ask("close")
        publisher.ask("close")


@contextmanager
def pair(num_layers: int, bucket_bytes: int) -> Iterator[MemoryPair]:
    """Run both processes, which are killed afterwards."""
    made = MemoryPair(num_layers, bucket_bytes)
    try:
        yield made
    finally:
        made.close()

"""Child processes: a publisher that publishes on request, and a reader that dies in mid-read."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from starling.weightsync.memory.device_memory import SnapshotPolicy
from starling.weightsync.offers.offer import Offer, Transport, decode_offer
from starling.weightsync.plan.layout import Layout, decode_layout, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

ANSWER_S = 30.0
BUCKET_BYTES = 64 << 10
SIMILAR = 4
"""How many versions in a row differ in few elements only."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return a small model with every awkward case: odd sizes, scalars, empty, strided and tied tensors, NaNs.

    From one version to the next few elements change, but every fourth version is another model.
    """
    draw = torch.Generator().manual_seed(version // SIMILAR)
    embed = torch.randn(257, 129, generator=draw).to(torch.bfloat16)
    odd = torch.randn(7, 13, 11, generator=draw)
    odd.view(torch.int32)[0, 0, :3] = torch.tensor([0x7FC00001, -1, -0x80000000])  # NaN payloads, minus zero
    made = {
        "embed": embed,
        "odd": odd,
        "turned": torch.randn(31, 17, generator=draw).t(),
        "counts": torch.randint(-(2**62), 2**62, (1023,), generator=draw),
        "scalar": torch.randn((), generator=draw),
        "steps": torch.tensor(version),
        "mask": torch.rand(5, 3, generator=draw) < 0.5,
        "empty": torch.empty(0, 4),
        "large": torch.randn(600, 601, generator=draw),
        "head": embed,
    }
    draw.manual_seed(version)
    for name in ("embed", "odd", "counts", "mask", "large"):
        items = made[name].view(-1).view(_INTEGERS[made[name].element_size()])
        items[torch.randint(len(items), (1 + len(items) // 200,), generator=draw)] ^= 1
    made["turned"].T[0, version % SIMILAR] += 1 + version
    return made


def blank() -> dict[str, torch.Tensor]:
    """Return zero tensors of the shapes of `weights`, untied and contiguous."""
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in weights(0).items()}


def publish_while_training(
    publisher: Publisher,
    puller: Puller,
    tensors: dict[str, torch.Tensor],
    engine: dict[str, torch.Tensor],
    trained: Callable[[int], dict[str, torch.Tensor]],
    *,
    in_place: bool = False,
) -> None:
    """Publish four versions of `tensors`, which change as soon as each snapshot returns; pull them, and compare bits.

    Args:
        publisher: of `tensors`.
        puller: of `engine`.
        tensors: the weights of version 0.
        engine: what the versions are written to.
        trained: returns the weights of a version.
        in_place: pull into `engine`, and not through staging memory.
    """
    plan = make_plan(publisher.layout, layout_of(engine, "rollout-0"))
    for version in range(4):
        published = publisher.snapshot(version, tensors)
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        with torch.no_grad():
            for name, changed in trained(version + 1).items():
                tensors[name].copy_(changed)
        offer = published.offer()
        puller.pull(offer, plan, deadline_s=ANSWER_S, into=engine if in_place else None)
        if not in_place:
            puller.switch(engine)
        assert puller.attest(engine, offer) == offer.root
        assert same(engine, expected)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether all tensors hold the same bits."""
    return a.keys() == b.keys() and all(
        a[name].contiguous().reshape(-1).view(torch.uint8).equal(b[name].contiguous().reshape(-1).view(torch.uint8))
        for name in a
        if a[name].numel()
    )


def _publish(
    transport: Transport, read_timeout_s: float, device: str, snapshots: SnapshotPolicy, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
    layout = layout_of(weights(0), "policy-0")
    plans = {"": make_plan(layout, layout_of(blank(), "rollout-0"), bucket_bytes=BUCKET_BYTES)}
    options: dict[str, Any] = {"read_timeout_s": read_timeout_s, "snapshots": snapshots, "delta_versions": 2}
    with Publisher(layout, transport=transport, **options) as publisher:
        pipe.send_bytes(encode(layout))
        while (order := pipe.recv()) is not None:
            version, with_root = order
            tensors = {name: tensor.to(device) for name, tensor in weights(version).items()}
            snapshot = publisher.snapshot(version, tensors, plans if with_root else None)
            pipe.send_bytes(encode(snapshot.offer()))
            if with_root:
                pipe.send_bytes(snapshot.layout_roots()[""].encode())


class Source:
    """A publisher in a child process, started by `start_method`: ``forkserver``, or ``spawn`` for this environment."""

    def __init__(
        self,
        transport: Transport,
        read_timeout_s: float = 60.0,
        start_method: str = "forkserver",
        device: str = "cpu",
        snapshots: SnapshotPolicy = "auto",
    ) -> None:
        context: Any = mp.get_context(start_method)
        self._pipe: Connection
        self._pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_publish, args=(transport, read_timeout_s, device, snapshots, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.layout: Layout = decode_layout(self._answer())
        self.version = -1

    def publish(self) -> Offer:
        """Publish the next version; its tensors are `weights(version)`."""
        self.version += 1
        self._pipe.send((self.version, False))
        return decode_offer(self._answer())

    def publish_with_root(self) -> tuple[Offer, str]:
        """Publish the next version; return its layout root, too, for tensors like `blank()` in these buckets."""
        self.version += 1
        self._pipe.send((self.version, True))
        return decode_offer(self._answer()), self._answer().decode()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int | None:
        """End the process normally; return its exit code."""
        self._pipe.send(None)
        self.process.join(ANSWER_S)
        return self.process.exitcode

    def _answer(self) -> bytes:
        assert self._pipe.poll(ANSWER_S), "the publisher does not answer"
        return self._pipe.recv_bytes()


@contextmanager
def source(
    transport: Transport,
    read_timeout_s: float = 60.0,
    start_method: str = "forkserver",
    device: str = "cpu",
    snapshots: SnapshotPolicy = "auto",
) -> Iterator[Source]:
    """Run a publisher in a child process, which is killed afterwards."""
    peer = Source(transport, read_timeout_s, start_method, device, snapshots)
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.join(ANSWER_S)


def die_reading(layout: bytes, offer: bytes) -> None:
    """Pull, and die by SIGKILL between two buckets."""
    torch.set_num_threads(1)
    mine = layout_of(blank(), "rollout-1")
    plan = make_plan(decode_layout(layout), mine, bucket_bytes=BUCKET_BYTES)
    puller = Puller(mine)

    def die() -> bool:
        if puller._staging is not None and puller._staging.any():
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    puller.pull(decode_offer(offer), plan, deadline_s=ANSWER_S, cancelled=die)

"""Fan-out of weights to eight replicas, and a delta, over links of a known rate.

    OMP_NUM_THREADS=1 python bench/weightsync_fanout.py [--quick] [--transport tcp|ucx]

Needs root and the commands `ip` and `tc`: the publisher and each replica are processes in network namespaces of their
own, joined by a bridge in another one. `tc tbf` limits each link in both directions. All are removed at the end.

Fan-out (64 MiB of bf16 in 64 tensors, links of 200 Mbit/s, full digests): the seconds from the offer
until the last replica has the version in staging, and the bytes that left the publisher over its link, with headers.
- `one`: a single replica from the publisher.
- `direct`: eight replicas, each from the publisher.
- `chain`: eight replicas, each from the previous one, which relays what has arrived.
Each time every replica switches to what it pulled and its attestation is compared with the offer's root.

Delta (one bf16 piece of 128 MiB of which 1 % has changed, a plain socket over a link of 1 Gbit/s): from the new piece
at one side until the other side holds and confirms it. `dense` sends the piece in place; `delta` encodes,
sends and applies, one after the other; `pipelined` does so window by window, all three at once. `published` is more
than the codec: a real publisher and a real puller over a link of 1 Gbit/s, from the call of `snapshot`, with its copy
and digests, until the new version is staged and verified, over the same with a publisher that compares nothing.
`pulled` begins with the offer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from figure import machine, print_figure, progress, rounded, versions

from starling.weightsync.delta.codec import apply
from starling.weightsync.delta.codec import encode as encode_delta
from starling.weightsync.offers.offer import Offer, Transport
from starling.weightsync.plan.fan_out import PUBLISHER
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, decode, encode
from starling.weightsync.plan.planner import decode_plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.transports.endpoints import ServingOptions

BENCH: Final = "weightsync_fanout"
DEADLINE_S: Final = 120.0
NUM_REPLICAS: Final = 8
LINK_MBIT: Final = 200
NUM_TENSORS, ROWS, COLUMNS = 64, 512, 1024
MODEL_BYTES: Final = NUM_TENSORS * ROWS * COLUMNS * 2
BUCKET_BYTES: Final = 256 << 10
DELTA_LINK_MBIT: Final = 1000
PIECE_BYTES: Final = 128 << 20
SIDE: Final = 8192
"""The piece as a square of bf16."""
WINDOW_BYTES: Final = 8 << 20
CHANGED_SHARE: Final = 0.01
BURST_BYTES: Final = 128 << 10
"""Burst of a link after it was idle; at least the largest packet that the kernel segments later."""
GOALS: Final = {"egress_over_model": 1.1, "seconds_over_one": 1.5, "delta_over_dense_on_1_gbit_s": 15.0}
CLONE_NEWNS, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x00020000, 0x40000000, 1

Sources = Sequence[int]
"""For each replica from which one it reads, or `PUBLISHER`."""


# --- namespaces ----------------------------------------------------------------------------------------------------


def missing() -> str:
    """Return why no network can be made here; empty if one can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"No command {' and no '.join(absent)} is to be found: install iproute2."
    if os.geteuid() != 0:
        return "Network namespaces and `tc tbf` need root: run this as root."
    return ""


def run(*words: str | int) -> None:
    """Run a command. Raises RuntimeError with its output when it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, words))}` failed: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    """A namespace with one limited link, `eth0`."""

    namespace: str
    address: str


@contextlib.contextmanager
def network(num_hosts: int, mbit: int) -> Iterator[list[Host]]:
    """Make hosts on one bridge, each link limited to `mbit` both ways; they are removed at the end."""
    prefix = f"starling-{os.getpid()}"
    hub = f"{prefix}-hub"
    hosts = [Host(f"{prefix}-{number}", f"10.203.0.{number + 1}") for number in range(num_hosts)]
    limit = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST_BYTES, "latency", "50ms")
    made: list[str] = []
    try:
        for name in (hub, *(host.namespace for host in hosts)):
            made.append(name)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            peer = ("peer", "name", "eth0", "netns", host.namespace)
            run("ip", "-n", hub, "link", "add", f"port{number}", "type", "veth", *peer)
            run("ip", "-n", hub, "link", "set", f"port{number}", "master", "bridge", "up")
            run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            run("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            run("tc", "-n", hub, "qdisc", "add", "dev", f"port{number}", *limit)
            run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", *limit)
        yield hosts
    finally:
        for name in made:  # a namespace takes its links with it
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace, and let /sys show its devices.

    It ends with its parent, however that ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    run("mount", "--make-rslave", "/")
    run("mount", "-t", "sysfs", "sysfs", "/sys")


def sent_bytes() -> int:
    """Return how many bytes have left this host, with the headers of each packet.

    The link's limiter counts them; the device itself counts the headers of many packets once, before they are cut.
    """
    output = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"], capture_output=True, check=True, timeout=30
    ).stdout
    return next(int(limiter["bytes"]) for limiter in json.loads(output) if limiter["kind"] == "tbf")


# --- processes -----------------------------------------------------------------------------------------------------


class Worker:
    """A process on a host that runs functions of modules that it has, with its own objects.

    It is forked, because loading torch nine times would take longer than the figures; so make workers before threads.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(host.namespace, theirs), name=host.namespace, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a function; its result comes through the pipe."""
        with contextlib.suppress(BrokenPipeError):  # the reason why it has ended is read later
            self.pipe.send((function, arguments))

    def take(self) -> tuple[str, Any]:
        """Return its next message: a kind and a value. Raises RuntimeError when it fails, or sends none in time."""
        if not self.pipe.poll(DEADLINE_S):
            raise RuntimeError(f"{self._process.name} does not answer.")
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{self._process.name} has ended.") from error
        if kind == "failed":
            raise RuntimeError(f"{self._process.name} failed:\n{value}")
        return kind, value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function there and return its result."""
        self.begin(function, *arguments)
        return self.take()[1]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


@contextlib.contextmanager
def workers(num: int, mbit: int) -> Iterator[list[Worker]]:
    """Start a worker on each host."""
    with network(num, mbit) as hosts, contextlib.ExitStack() as stack:
        made = []
        for host in hosts:
            made.append(Worker(host))
            stack.callback(made[-1].close)
        yield made


OBJECTS: dict[Any, Any] = {}
"""Objects of a worker."""


def _work(namespace: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # logs: standard output is for figures only
    OBJECTS["pipe"] = pipe
    try:
        enter(namespace)
        torch.set_num_threads(1)
    except Exception:  # noqa: BLE001 - sent to the other side
        pipe.send(("failed", traceback.format_exc()))
        return
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("done", function(*arguments)))
        except Exception:  # noqa: BLE001 - sent to the other side
            pipe.send(("failed", traceback.format_exc()))


# --- fan-out: what workers do --------------------------------------------------------------------------------------


def model_layout(replica: str, tensors: Sequence[int]) -> Layout:
    """Return the layout of these tensors on one rank, each in its own storage."""
    box = Box(offset=(0, 0), size=(ROWS, COLUMNS))
    specs = [TensorSpec(name=f"layers.{n}.weight", shape=box.size, dtype="bfloat16") for n in tensors]
    shards = [
        Shard(tensor=at, box=box, storage=spec.name, offset_bytes=0, strides=(COLUMNS, 1))
        for at, spec in enumerate(specs)
    ]
    return Layout(replica=replica, tensors=tuple(specs), ranks=(RankLayout(place=Place(), shards=tuple(shards)),))


def open_publisher(transport: Transport, host: str) -> None:
    """Make the model and its publisher."""
    layout = model_layout("trainer", range(NUM_TENSORS))
    generator = torch.Generator().manual_seed(0)
    OBJECTS["weights"] = {
        spec.name: torch.randint(-30000, 30000, spec.shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
        for spec in layout.tensors
    }
    OBJECTS["publisher"] = Publisher(layout, transport=transport, host=host)


def publish(version: int) -> tuple[bytes, str, int]:
    """Change every tensor and publish; return the offer, the transport, and the bytes sent so far."""
    for tensor in OBJECTS["weights"].values():
        tensor.view(torch.int16).add_(1)
    offer = OBJECTS["publisher"].publish(version, OBJECTS["weights"])
    return encode(offer), offer.ranks[0].transport, sent_bytes()


def open_puller(layout: bytes, plan: bytes, transport: Transport, host: str) -> None:
    """Make a puller and the live tensors."""
    described = decode(Layout, layout)
    OBJECTS["live"] = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in described.tensors}
    OBJECTS["puller"] = Puller(described, serving=ServingOptions(transport, host), stall_s=DEADLINE_S)
    OBJECTS["plan"] = decode_plan(plan)


def pull(offer: bytes, source: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Pull into staging, from the publisher or from a replica as soon as that offers the version.

    The offer of this replica is sent as ``("offer", offer)`` before its bytes arrive; that of the other one comes
    through the pipe. Returns the payload by source, and the lanes.
    """
    pipe: Connection = OBJECTS["pipe"]
    relays: list[Offer] = []
    if source != PUBLISHER:
        if not pipe.poll(DEADLINE_S):
            raise RuntimeError(f"Replica {source} offers nothing.")
        relays.append(decode(Offer, pipe.recv()))
    report = OBJECTS["puller"].pull(
        decode(Offer, offer),
        OBJECTS["plan"],
        deadline_s=DEADLINE_S,
        relays=relays,
        relays_first=True,
        announce=lambda own: pipe.send(("offer", encode(own))),
    )
    by_source: dict[str, int] = {}
    for address, size in report.bytes_by_source.items():
        host = address.rpartition(":")[0]
        by_source[host] = by_source.get(host, 0) + size
    return by_source, tuple(sorted(report.lanes))


def prove(offer: bytes) -> None:
    """Switch to the pulled version, and raise unless it equals the published one."""
    version, puller, live = decode(Offer, offer), OBJECTS["puller"], OBJECTS["live"]
    puller.switch(live)
    if puller.attest(live, version) != version.root:
        raise AssertionError("a replica holds other weights than were published")


# --- fan-out: the figures ------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One way to bring a version to replicas, with its times and bytes of each round."""

    name: str
    sources: Sources
    seconds: list[float] = field(default_factory=list)
    egress: list[int] = field(default_factory=list)
    """Bytes out of the publisher's link."""
    payload: list[int] = field(default_factory=list)
    """Bytes of payload."""
    lanes: set[str] = field(default_factory=set)


def measure_fan_out(transport: Transport, rounds: int) -> list[Side]:
    """Return the measurements of each way."""
    direct = [PUBLISHER] * NUM_REPLICAS
    chain = [number - 1 for number in range(NUM_REPLICAS)]  # the first of them is PUBLISHER
    sides = [Side("one", direct[:1]), Side("direct", direct), Side("chain", chain)]
    trained, engine = (model_layout(name, range(NUM_TENSORS)) for name in ("trainer", "engine"))
    plan = encode(make_plan(trained, engine, bucket_bytes=BUCKET_BYTES))
    with workers(1 + NUM_REPLICAS, LINK_MBIT) as (publisher, *replicas):
        publisher.call(open_publisher, transport, publisher.host.address)
        for replica in replicas:
            replica.call(open_puller, encode(engine), plan, transport, replica.host.address)
        version = 0
        for number in range(rounds + 1):  # the first warms up: connections, pages
            for side in sides:
                if not number and side.name == "direct":  # `chain` warms up all that it uses
                    continue
                version += 1
                offer, used, before = publisher.call(publish, version)
                if used != transport:
                    raise RuntimeError(f"Transport {transport} is not to be had here; {used} would stand in.")
                seconds, results = spread(replicas, offer, side.sources)
                egress = publisher.call(sent_bytes) - before
                for replica in replicas[: len(side.sources)]:
                    replica.call(prove, offer)
                if number:
                    side.seconds.append(seconds)
                    side.egress.append(egress)
                    side.payload.append(sum(by.get(publisher.host.address, 0) for by, _ in results))
                    side.lanes.update(lane for _, lanes in results for lane in lanes)
                    summary = f"{seconds:.2f} s, {egress / MODEL_BYTES:.3f} models sent"
                    progress(f"{transport}, {side.name}, round {number} of {rounds}: {summary}")
    return sides


def spread(replicas: Sequence[Worker], offer: bytes, sources: Sources) -> tuple[float, list[Any]]:
    """Distribute a version to replicas; return the seconds until the last one has it, and the report of each.

    Offers of relays are forwarded as by a controller.
    """
    begin = time.perf_counter()
    pulling = {replica.pipe: number for number, replica in enumerate(replicas[: len(sources)])}
    results: dict[int, Any] = {}
    for replica, own in zip(replicas, sources, strict=False):
        replica.begin(pull, offer, own)
    while len(results) < len(sources):
        ready = wait(list(pulling), DEADLINE_S)
        if not ready:
            raise RuntimeError("No replica has sent a message in time.")
        for pipe in ready:
            number = pulling[pipe]  # type: ignore[index]
            kind, value = replicas[number].take()
            if kind == "done":
                results[number] = value
                continue
            for taker, own in enumerate(sources):
                if own == number:
                    replicas[taker].pipe.send(value)
    return time.perf_counter() - begin, [results[number] for number in range(len(sources))]


def bench_fan_out(transport: Transport, rounds: int) -> None:
    """Print the figures of fan-out."""
    sides = measure_fan_out(transport, rounds)
    one = sides[0]
    detail = {
        "num_replicas": NUM_REPLICAS,
        "num_bytes": MODEL_BYTES,
        "bucket_bytes": BUCKET_BYTES,
        "link_mbit_per_s": LINK_MBIT,
        "lanes": sorted({lane for side in sides for lane in side.lanes}),
        "rounds": rounds,
        "seconds": {side.name: rounded(median(side.seconds)) for side in sides},
        "egress_over_model": {side.name: rounded(median(side.egress) / MODEL_BYTES) for side in sides},
        "payload_over_model": {side.name: rounded(median(side.payload) / MODEL_BYTES) for side in sides},
        "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        **machine(),
        "versions": versions("torch", "numpy", "xxhash"),
    }
    for side in sides[1:]:
        egress = median(side.egress) / MODEL_BYTES
        seconds = median(a / b for a, b in zip(side.seconds, one.seconds, strict=True))
        show(f"{transport}_{side.name}_egress_over_model", egress, detail)
        show(f"{transport}_{side.name}_seconds_over_one", seconds, detail)


# --- delta on a slow link ------------------------------------------------------------------------------------------

Piece = npt.NDArray[np.uint16]


def open_receiver(host: str) -> int:
    """Listen, and make the base; return the port."""
    OBJECTS["server"] = socket.create_server((host, 0))
    OBJECTS["base"], OBJECTS["new"] = pieces()
    OBJECTS["received"] = OBJECTS["base"].copy()
    OBJECTS["buffer"] = np.zeros(PIECE_BYTES + 64, np.uint8)
    port: int = OBJECTS["server"].getsockname()[1]
    return port


def open_sender(host: str, port: int) -> None:
    """Connect, and make both versions of the piece."""
    OBJECTS["socket"] = socket.create_connection((host, port))
    OBJECTS["base"], OBJECTS["new"] = pieces()
    OBJECTS["buffer"] = np.zeros(PIECE_BYTES + 64, np.uint8)


def pieces() -> tuple[Piece, Piece]:
    """Return a piece of random bits, and a copy with a share of its elements changed at random places."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 65536, PIECE_BYTES // 2, np.uint16)
    new = base.copy()
    new[rng.choice(len(new), round(CHANGED_SHARE * len(new)), replace=False)] ^= 1
    return base, new


def windows(piece: Piece, window_bytes: int) -> Iterator[Piece]:
    """Cut a piece."""
    for begin in range(0, len(piece), window_bytes // 2):
        yield piece[begin : begin + window_bytes // 2]


def receive(how: Literal["dense", "delta"], window_bytes: int) -> None:
    """Receive what `send` sends, in place; confirm and check it."""
    if "peer" not in OBJECTS:
        OBJECTS["peer"], _ = OBJECTS["server"].accept()
    peer, received, buffer = OBJECTS["peer"], OBJECTS["received"], OBJECTS["buffer"]
    np.copyto(received, OBJECTS["base"])
    buffer.fill(0)
    peer.sendall(b"r")

    def fill(memory: memoryview) -> None:
        while memory.nbytes:
            num = peer.recv_into(memory)
            if not num:
                raise ConnectionError("the sender is gone")
            memory = memory[num:]

    if how == "dense":
        fill(memoryview(received).cast("B"))
    else:
        head = bytearray(8)
        for window in windows(received, window_bytes):
            fill(memoryview(head))
            size = int.from_bytes(head, "little")
            fill(memoryview(buffer)[:size])
            apply(buffer[:size], window)
    peer.sendall(b"d")
    if not np.array_equal(received, OBJECTS["new"]):
        raise AssertionError("the receiver holds another piece than was sent")


def send(how: Literal["dense", "delta"], window_bytes: int) -> tuple[float, float, int]:
    """Bring the new piece to the other side; return the seconds, those of encoding, and the bytes sent."""
    connection, base, new, buffer = (OBJECTS[name] for name in ("socket", "base", "new", "buffer"))
    if connection.recv(1) != b"r":
        raise ConnectionError("the receiver is gone")
    encode_s = 0.0
    before = sent_bytes()
    begin = time.perf_counter()
    if how == "dense":
        connection.sendall(memoryview(new).cast("B"))
    else:
        for window, old in zip(windows(new, window_bytes), windows(base, window_bytes), strict=True):
            start = time.perf_counter()
            encoded = encode_delta(window, old, 2, out=buffer)
            encode_s += time.perf_counter() - start
            connection.sendall(len(encoded.data).to_bytes(8, "little"))
            connection.sendall(encoded.data)
    if connection.recv(1) != b"d":
        raise ConnectionError("the receiver is gone")
    return time.perf_counter() - begin, encode_s, sent_bytes() - before


def open_changing(key: str, transport: Transport, host: str, delta_versions: int) -> None:
    """Make a publisher of one tensor."""
    OBJECTS["tensor", key] = torch.from_numpy(pieces()[0].view(np.int16)).view(torch.bfloat16).view(SIDE, SIDE)
    OBJECTS[key] = Publisher(square("trainer"), transport=transport, host=host, delta_versions=delta_versions)


def square(replica: str) -> Layout:
    """Return the layout of the piece, as a tensor of one rank."""
    spec = TensorSpec(name="weight", shape=(SIDE, SIDE), dtype="bfloat16")
    shard = Shard(
        tensor=0, box=Box(offset=(0, 0), size=spec.shape), storage="weight", offset_bytes=0, strides=(SIDE, 1)
    )
    return Layout(replica=replica, tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))


def open_following(key: str) -> None:
    """Make a puller of that tensor."""
    OBJECTS["plan"] = make_plan(square("trainer"), square("engine"), bucket_bytes=WINDOW_BYTES)
    OBJECTS[key] = Puller(square("engine"))


def change_and_publish(key: str, version: int) -> tuple[float, float, bytes]:
    """Change a share of the elements and publish; return when that began, when the offer was there, and the offer."""
    items = OBJECTS["tensor", key].view(torch.int16).view(-1)
    rng = np.random.default_rng(version)
    items[torch.from_numpy(rng.choice(len(items), round(CHANGED_SHARE * len(items)), replace=False))] ^= 1
    begin = time.perf_counter()
    offer = OBJECTS[key].publish(version, {"weight": OBJECTS["tensor", key]})
    return begin, time.perf_counter(), encode(offer)


def follow(key: str, offer: bytes) -> tuple[float, int]:
    """Pull; return when it was done, and the bytes that travelled."""
    report = OBJECTS[key].pull(decode(Offer, offer), OBJECTS["plan"], deadline_s=DEADLINE_S)
    return time.perf_counter(), sum(report.bytes_by_source.values())


def measure_publication(transport: Transport, rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """Return seconds from the snapshot and from the offer, and payload bytes, of both ways."""
    found: dict[str, list[tuple[float, float, int]]] = {"dense": [], "delta": []}
    with workers(2, DELTA_LINK_MBIT) as (publisher, replica):
        for key, versions_kept in (("dense", 0), ("delta", 2)):
            publisher.call(open_changing, key, transport, publisher.host.address, versions_kept)
            replica.call(open_following, key)
        for number in range(rounds + 1):
            for key, results in found.items():
                begin, offered, offer = publisher.call(change_and_publish, key, number)
                end, size = replica.call(follow, key, offer)
                if number:
                    results.append((end - begin, end - offered, size))
                    progress(f"published {key}, round {number} of {rounds}: {end - begin:.3f} s, {size} bytes")
    return found


def bench_publication(transport: Transport, rounds: int) -> None:
    """Print the figures of a delta through publisher and puller."""
    found = measure_publication(transport, rounds)
    detail = {
        "num_bytes": PIECE_BYTES,
        "changed_share": CHANGED_SHARE,
        "link_mbit_per_s": DELTA_LINK_MBIT,
        "rounds": rounds,
        "seconds": {name: rounded(median(result[0] for result in results)) for name, results in found.items()},
        "bytes": {name: median(result[2] for result in results) for name, results in found.items()},
        **machine(),
        "versions": versions("torch", "numpy", "xxhash"),
    }
    for at, name in enumerate(("published", "pulled")):
        ratio = median(dense[at] / delta[at] for dense, delta in zip(found["dense"], found["delta"], strict=True))
        show(f"{transport}_{name}_over_dense_on_1_gbit_s", ratio, detail)


def bench_delta(rounds: int) -> None:
    """Print the figures of a delta on a slow link."""
    found: dict[str, list[tuple[float, float, int]]] = {"dense": [], "delta": [], "pipelined": []}
    with workers(2, DELTA_LINK_MBIT) as (receiver, sender):
        port = receiver.call(open_receiver, receiver.host.address)
        sender.call(open_sender, receiver.host.address, port)
        for number in range(rounds + 1):
            for name, results in found.items():
                window = WINDOW_BYTES if name == "pipelined" else PIECE_BYTES
                how = "dense" if name == "dense" else "delta"
                receiver.begin(receive, how, window)
                result = sender.call(send, how, window)
                receiver.take()
                if number:
                    results.append(result)
                    progress(f"{name}, round {number} of {rounds}: {result[0]:.4f} s, encoding {result[1]:.4f} s")
    detail = {
        "num_bytes": PIECE_BYTES,
        "changed_share": CHANGED_SHARE,
        "link_mbit_per_s": DELTA_LINK_MBIT,
        "burst_bytes": BURST_BYTES,
        "rounds": rounds,
        "seconds": {name: rounded(median(result[0] for result in results)) for name, results in found.items()},
        "encode_s": {name: rounded(median(result[1] for result in results)) for name, results in found.items()},
        "bytes_sent": {name: median(result[2] for result in results) for name, results in found.items()},
        **machine(),
        "versions": versions("numpy"),
    }
    for name in ("delta", "pipelined"):
        ratio = median(dense[0] / result[0] for dense, result in zip(found["dense"], found[name], strict=True))
        show(f"{name}_over_dense_on_1_gbit_s", ratio, detail)


# --- all of it -----------------------------------------------------------------------------------------------------


def show(figure: str, value: float | None, detail: dict[str, Any]) -> None:
    """Print one figure, with its goal; figures for comparison only have none."""
    goal: float | None = None
    if "_direct_" not in figure:
        goal = next((goal for ending, goal in GOALS.items() if figure.endswith(ending)), None)
    better: Literal["higher", "lower"] = "higher" if "over_dense" in figure else "lower"
    print_figure(BENCH, figure, value, unit="ratio", goal=goal, better=better, detail=detail)


def _end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    """Measure and print; return 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of the fan-out and three of the delta")
    parser.add_argument("--transport", choices=("tcp", "ucx"), action="append", help="of the fan-out; both by default")
    parser.add_argument("--only", choices=("fan-out", "delta"), help="one of the two")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("UCX_TLS", "tcp")  # shared memory would bypass the links
    os.environ.setdefault("UCX_NET_DEVICES", "eth0")
    jobs: list[tuple[list[str], Callable[[], None]]] = []
    if arguments.only != "delta":
        for transport in arguments.transport or ("tcp", "ucx"):
            ways = [f"{transport}_{side}" for side in ("direct", "chain")]
            figures = [f"{way}_{what}" for way in ways for what in ("egress_over_model", "seconds_over_one")]
            jobs.append((figures, partial(bench_fan_out, transport, 1 if arguments.quick else 3)))
    if arguments.only != "fan-out":
        figures = ["delta_over_dense_on_1_gbit_s", "pipelined_over_dense_on_1_gbit_s"]
        jobs.append((figures, partial(bench_delta, 3 if arguments.quick else 9)))
        for transport in arguments.transport or ("tcp", "ucx"):
            figures = [f"{transport}_{name}_over_dense_on_1_gbit_s" for name in ("published", "pulled")]
            jobs.append((figures, partial(bench_publication, transport, 3 if arguments.quick else 9)))
    lacking, status = missing(), 0
    for figures, job in jobs:
        problem = lacking
        if not problem:
            try:
                job()
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                problem, status = str(error), 1
        if problem:
            progress(problem)
        for figure in figures if problem else ():
            reason = problem.strip().splitlines()[-1]
            show(figure, None, {"reason": reason})
    return status


if __name__ == "__main__":
    sys.exit(main())

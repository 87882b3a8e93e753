"""Weights from trainers to engines: goodput, end-to-end time and training stall, compared with other methods.

    python bench/weightsync.py [--quick]

All methods alternate within each round, on one machine; a ratio is the median over the rounds of the ratio within the
round. The reference is memcpy: one thread copying 256 MiB, or the model, from one warm buffer to another.

Goodput (256 MiB in one tensor, from one process into another's staging, digests off):
- `local`: read in place from the publisher's memory; `ucx`: over shared memory; `ucx_tcp`: the same over loopback TCP;
  `tcp`: plain sockets, used where UCX is missing; `tcp_encrypted`: the same under AES-256-GCM, the default between
  hosts; `gloo`: this library over a pair group of torch; `socket`: nothing but `sendall` and `recv_into`.

End to end (1 GiB of bf16: ten layers of Qwen2 of width 2048; four FSDP ranks to two TP ranks of a fused engine, strided
pieces, full digests): from the offer until both engines hold the version in their live tensors.
- `local`, `ucx`: this library, pulled in place.
- `gloo`: the full tensors broadcast by torch.distributed to both engines, which copy their slices.
- `safetensors`: one file in /dev/shm, written by the trainer, loaded by both engines, which copy their slices.
- `zeromq`: each tensor's slices sent by PUSH without copying, received and copied into place.
The last three start from gathered tensors: the time of the gather is not counted.

Training stall: the seconds that `Publisher.snapshot` takes for 256 MiB, over one memcpy of as much.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import zmq
from figure import machine, print_figure, progress, rounded, versions

from starling.weightsync.layouts.symbolic import model_layout, shard_layout
from starling.weightsync.layouts.vllm import worker_layout
from starling.weightsync.offers.offer import RankOffer, make_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, decode, encode
from starling.weightsync.plan.planner import decode_plan, make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.transports.nixl.agent import has_nixl

MIB = 1 << 20
GOODPUT_BYTES = 256 * MIB
DEADLINE_S = 120.0
NUM_SOURCES, NUM_ENGINES = 4, 2
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def flat_layout(replica: str, num_bytes: int) -> Layout:
    """Return the layout of one tensor of bytes."""
    box = Box(offset=(0,), size=(num_bytes,))
    shard = Shard(tensor=0, box=box, storage="w", offset_bytes=0, strides=(1,))
    spec = TensorSpec(name="w", shape=(num_bytes,), dtype="uint8")
    return Layout(replica=replica, tensors=(spec,), ranks=(RankLayout(place=Place(), shards=(shard,)),))


def storages(layout: Layout, rank: int, seed: int | None) -> dict[str, torch.Tensor]:
    """Return a rank's memory: random bits, or zeros; every page is touched."""
    extents: dict[str, int] = {}
    for shard in layout.ranks[rank].shards:
        last = sum((n - 1) * stride for n, stride in zip(shard.box.size, shard.strides, strict=True))
        end = shard.offset_bytes // 2 + last + 1
        extents[shard.storage] = max(extents.get(shard.storage, 0), end)
    made: dict[str, torch.Tensor] = {}
    for name, extent in extents.items():
        made[name] = torch.empty(extent, dtype=torch.bfloat16)
        if seed is None:
            made[name].zero_()
        else:
            made[name].view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
    return made


# --- processes -----------------------------------------------------------------------------------------------------


class Worker:
    """A child process that runs functions of this module by name, with its own objects."""

    def __init__(self, name: str, **environment: str) -> None:
        os.environ.update(environment)  # a spawned process takes this one's
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), name=name, daemon=True)
        self._process.start()
        theirs.close()
        for variable in environment:
            del os.environ[variable]

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start a function; `end` returns its result."""
        self._pipe.send((function.__name__, arguments))

    def end(self) -> Any:
        """Wait for the function, and return its result."""
        if not self._pipe.poll(DEADLINE_S):
            raise SystemExit(f"{self._process.name} does not answer")
        ok, result = self._pipe.recv()
        if not ok:
            raise SystemExit(f"{self._process.name} failed:\n{result}")
        return result

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function and return its result."""
        self.begin(function, *arguments)
        return self.end()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


HERE: dict[str, Any] = {}
"""Objects of a worker."""


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, globals()[name](*arguments)))
        except Exception:  # noqa: BLE001 - sent to the other side
            pipe.send((False, traceback.format_exc()))


def together(workers: list[Worker], function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Call one function in several workers at once."""
    for worker, given in zip(workers, arguments, strict=True):
        worker.begin(function, *given)
    return [worker.end() for worker in workers]


# --- what workers do -----------------------------------------------------------------------------------------------


def open_source(key: str, layout: bytes, rank: int, transport: str, host: str, digests: str) -> None:
    """Make a publisher and its tensors. `transport`: also ``tcp+aes``, which is encrypted ``tcp``."""
    described = decode(Layout, layout)
    flat = len(described.tensors) == 1
    held = {"w": torch.randint(0, 255, described.tensors[0].shape, dtype=torch.uint8)} if flat else HERE.get("weights")
    if held is None:
        held = HERE["weights"] = storages(described, rank, seed=rank)
    transport, _, cipher = transport.partition("+")
    publisher = Publisher(
        described,
        rank=rank,
        transport=transport,
        host=host,
        digests=digests,
        encrypt=bool(cipher),  # type: ignore[arg-type]
    )
    HERE[key] = (publisher, held, [0])


def publish(key: str) -> bytes:
    """Publish the next version of one rank."""
    publisher, held, count = HERE[key]
    count[0] += 1
    return encode(publisher.publish(count[0], held).ranks[0])


def stall(key: str) -> tuple[float, float]:
    """Return the seconds of a snapshot, and of a memcpy of as much."""
    publisher, held, count = HERE[key]
    copy = HERE.setdefault("copy", torch.zeros_like(held["w"]))
    begin = time.perf_counter()
    copy.copy_(held["w"])
    middle = time.perf_counter()
    count[0] += 1
    publication = publisher.snapshot(count[0], held)
    end = time.perf_counter()
    publication.offer()
    return end - middle, middle - begin


def open_engine(key: str, layout: bytes, plan: bytes, rank: int, digests: str) -> None:
    """Make a puller and the live tensors."""
    described = decode(Layout, layout)
    flat = len(described.tensors) == 1
    held = {"w": torch.zeros(described.tensors[0].shape, dtype=torch.uint8)} if flat else HERE.get("live")
    if held is None:
        held = HERE["live"] = storages(described, rank, seed=None)
    HERE[key] = (Puller(described, rank=rank, digests=digests), held, decode_plan(plan))  # type: ignore[arg-type]


def pull(key: str, ranks: list[bytes], in_place: bool) -> tuple[float, tuple[str, ...]]:
    """Pull the offered version, into staging or in place; return the seconds, and the lanes."""
    puller, held, plan = HERE[key]
    offers = [decode(RankOffer, rank) for rank in ranks]
    offer = make_offer(HERE.setdefault(f"{key} version", 0) + 1, offers)
    HERE[f"{key} version"] += 1
    begin = time.perf_counter()
    report = puller.pull(offer, plan, deadline_s=DEADLINE_S, into=held if in_place else None)
    return time.perf_counter() - begin, report.lanes


def checksum(key: str) -> list[tuple[str, int]]:
    """Return a checksum of each live storage, to compare the results of two methods."""
    return [(name, int(tensor.view(torch.int16).sum(dtype=torch.int64))) for name, tensor in HERE[key][1].items()]


def close(key: str) -> None:
    """Free a publisher or a puller."""
    HERE.pop(key)[0].close()


def listen() -> tuple[str, int]:
    """Open a plain socket for `send_plain`."""
    HERE["server"] = socket.create_server(("127.0.0.1", 0))
    return tuple(HERE["server"].getsockname()[:2])  # type: ignore[return-value]


def send_plain() -> None:
    """Send 256 MiB to one connection."""
    if "peer" not in HERE:
        HERE["peer"], _ = HERE["server"].accept()
        HERE["payload"] = memoryview(np.full(GOODPUT_BYTES, 7, np.uint8))
    HERE["peer"].recv(1)
    HERE["peer"].sendall(HERE["payload"])


def receive_plain(host: str, port: int) -> float:
    """Receive 256 MiB; return the seconds."""
    if "plain" not in HERE:
        HERE["plain"] = socket.create_connection((host, port))
        HERE["target"] = memoryview(np.zeros(GOODPUT_BYTES, np.uint8))
    view = HERE["target"]
    begin = time.perf_counter()
    HERE["plain"].send(b"g")
    received = 0
    while received < len(view):
        received += HERE["plain"].recv_into(view[received:])
    return time.perf_counter() - begin


def copy_once(num_bytes: int) -> float:
    """Return the seconds of one memcpy."""
    key = f"memcpy {num_bytes}"
    if key not in HERE:
        HERE[key] = (np.full(num_bytes, 1, np.uint8), np.full(num_bytes, 2, np.uint8))
    source, destination = HERE[key]
    begin = time.perf_counter()
    np.copyto(destination, source)
    return time.perf_counter() - begin


def join_group(rank: int, folder: str) -> None:
    """Join the gloo group of one trainer and two engines."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=1 + NUM_ENGINES
    )


def full_tensors(layout: bytes) -> None:
    """Make the gathered model, for the methods that send it whole."""
    described = decode(Layout, layout)
    HERE["full"] = {
        spec.name: torch.randint(-30000, 30000, spec.shape, dtype=torch.int16).view(torch.bfloat16)
        for spec in described.tensors
        if not spec.same_as
    }


def place_slices(layout: Layout, rank: int, name: str, tensor: torch.Tensor) -> None:
    """Copy an engine's slices of a full tensor into its live tensors."""
    live = HERE["live"]
    for shard in HERE.setdefault("by_name", _by_name(layout, rank)).get(name, ()):
        part = tensor
        for dim, (begin, n) in enumerate(zip(shard.box.offset, shard.box.size, strict=True)):
            part = part.narrow(dim, begin, n)
        live[shard.storage].as_strided(shard.box.size, shard.strides, shard.offset_bytes // 2).copy_(part)


def _by_name(layout: Layout, rank: int) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for shard in layout.ranks[rank].shards:
        found.setdefault(layout.tensors[shard.tensor].name, []).append(shard)
    return found


def broadcast_out() -> None:
    """Broadcast the full tensors."""
    for tensor in HERE["full"].values():
        torch.distributed.broadcast(tensor.view(torch.uint8), 0)


def broadcast_in(layout: bytes, rank: int) -> float:
    """Receive the full tensors and copy the slices."""
    described = HERE.setdefault("described", decode(Layout, layout))
    begin = time.perf_counter()
    for spec in described.tensors:
        if not spec.same_as:
            buffer = torch.empty(spec.shape, dtype=torch.bfloat16)
            torch.distributed.broadcast(buffer.view(torch.uint8), 0)
            place_slices(described, rank, spec.name, buffer)
    return time.perf_counter() - begin


def save_file_out(path: str) -> float:
    """Write the full tensors as one safetensors file."""
    from safetensors.torch import save_file

    begin = time.perf_counter()
    save_file(HERE["full"], path)
    return time.perf_counter() - begin


def load_file_in(layout: bytes, rank: int, path: str) -> float:
    """Load an engine's slices of the file."""
    from safetensors import safe_open

    described = HERE.setdefault("described", decode(Layout, layout))
    begin = time.perf_counter()
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            place_slices(described, rank, name, file.get_tensor(name))
    return time.perf_counter() - begin


def zeromq_bind() -> list[str]:
    """Bind one PUSH socket for each engine."""
    context = HERE["zmq"] = zmq.Context()
    HERE["push"] = [context.socket(zmq.PUSH) for _ in range(NUM_ENGINES)]
    for push in HERE["push"]:
        push.bind("tcp://127.0.0.1:0")
    return [push.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for push in HERE["push"]]


def zeromq_out(layout: bytes) -> None:
    """Send each engine its slices, contiguous."""
    described = HERE.setdefault("described", decode(Layout, layout))
    for rank, push in enumerate(HERE["push"]):
        for name, shards in HERE.setdefault(f"shards {rank}", _by_name(described, rank)).items():
            for shard in shards:
                part = HERE["full"][name]
                for dim, (begin, n) in enumerate(zip(shard.box.offset, shard.box.size, strict=True)):
                    part = part.narrow(dim, begin, n)
                push.send(part.contiguous().view(torch.uint8).numpy(), copy=False)


def zeromq_in(layout: bytes, rank: int, address: str) -> float:
    """Receive the slices in place."""
    described = HERE.setdefault("described", decode(Layout, layout))
    if "pull" not in HERE:
        HERE["pull"] = zmq.Context().socket(zmq.PULL)
        HERE["pull"].connect(address)
    begin = time.perf_counter()
    for shards in HERE.setdefault("by_name", _by_name(described, rank)).values():
        for shard in shards:
            frame = HERE["pull"].recv(copy=False)
            tensor = torch.frombuffer(frame.buffer, dtype=torch.bfloat16).view(shard.box.size)
            live = HERE["live"][shard.storage]
            live.as_strided(shard.box.size, shard.strides, shard.offset_bytes // 2).copy_(tensor)
    return time.perf_counter() - begin


# --- the figures ---------------------------------------------------------------------------------------------------


def measure_goodput(rounds: int) -> dict[str, list[float]]:
    """Return seconds by method for 256 MiB, and of the snapshot and its memcpy."""
    source, engine = Worker("source"), Worker("engine")
    # UCX would not choose TCP between processes of one host: these two have nothing else.
    tcp_source, tcp_engine = Worker("source", UCX_TLS="tcp"), Worker("engine", UCX_TLS="tcp")
    seconds: dict[str, list[float]] = {}
    lanes: dict[str, tuple[str, ...]] = {}
    layout = encode(flat_layout("source", GOODPUT_BYTES))
    engine_layout = flat_layout("engine", GOODPUT_BYTES)
    plan = encode(make_plan(flat_layout("source", GOODPUT_BYTES), engine_layout))
    try:
        address = source.call(listen)
        sides = {
            "local": ("local", source, engine),
            "ucx": ("ucx", source, engine),
            "ucx_tcp": ("ucx", tcp_source, tcp_engine),
            "tcp": ("tcp", source, engine),
            "tcp_encrypted": ("tcp+aes", source, engine),
            "gloo": ("gloo", source, engine),
            **({"nixl": ("nixl", source, engine)} if has_nixl() else {}),
        }
        for side, (transport, giver, taker) in sides.items():
            giver.call(open_source, side, layout, 0, transport, "127.0.0.1", "off")
            taker.call(open_engine, side, encode(engine_layout), plan, 0, "off")
        for number in range(rounds + 1):  # the first warms up: connections, pages, caches
            found: dict[str, float] = {"memcpy": engine.call(copy_once, GOODPUT_BYTES)}
            for side, (_, giver, taker) in sides.items():
                offer = giver.call(publish, side)
                found[side], lanes[side] = taker.call(pull, side, [offer], False)
            source.begin(send_plain)
            found["socket"] = engine.call(receive_plain, *address)
            source.end()
            found["snapshot"], found["snapshot_memcpy"] = source.call(stall, "local")
            if number:
                for side, value in found.items():
                    seconds.setdefault(side, []).append(value)
                told = ", ".join(f"{side} {GOODPUT_BYTES / value / 1e9:.2f}" for side, value in found.items())
                progress(f"goodput, round {number} of {rounds}, GB/s: {told}")
    finally:
        for worker in (source, engine, tcp_source, tcp_engine):
            worker.close()
    progress(f"lanes: {lanes}")
    return seconds


def measure_end_to_end(rounds: int) -> tuple[int, dict[str, list[float]]]:
    """Return the model's bytes, and seconds by method."""
    trained = shard_layout(model_layout(CONFIG, f"fsdp{NUM_SOURCES}"), "trainer")
    served = worker_layout(CONFIG, "engine", tp=NUM_ENGINES)
    plan = make_plan(trained, served)
    num_bytes = plan.total_bytes
    sources = [Worker(f"source-{rank}") for rank in range(NUM_SOURCES)]
    engines = [Worker(f"engine-{rank}") for rank in range(NUM_ENGINES)]
    seconds: dict[str, list[float]] = {}
    source_layout, engine_layout, encoded = encode(trained), encode(served), encode(plan)
    try:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for rank, worker in enumerate([sources[0], *engines]):
                worker.begin(join_group, rank, folder)
            for worker in [sources[0], *engines]:
                worker.end()
            sources[0].call(full_tensors, source_layout)
            addresses = sources[0].call(zeromq_bind)
            for transport in ("local", "ucx"):
                together(
                    sources,
                    open_source,
                    [(transport, source_layout, r, transport, "127.0.0.1", "full") for r in range(NUM_SOURCES)],
                )
                together(
                    engines,
                    open_engine,
                    [(transport, engine_layout, encoded, r, "full") for r in range(NUM_ENGINES)],
                )
            for number in range(rounds + 1):
                found = {"memcpy": engines[0].call(copy_once, num_bytes)}
                for transport in ("local", "ucx"):
                    offers = together(sources, publish, [(transport,)] * NUM_SOURCES)
                    results = together(engines, pull, [(transport, offers, True)] * NUM_ENGINES)
                    found[transport] = max(result[0] for result in results)
                sources[0].begin(broadcast_out)
                found["gloo"] = max(together(engines, broadcast_in, [(engine_layout, r) for r in range(NUM_ENGINES)]))
                sources[0].end()
                path = str(Path(folder) / "model.safetensors")
                saved = sources[0].call(save_file_out, path)
                found["safetensors"] = saved + max(
                    together(engines, load_file_in, [(engine_layout, r, path) for r in range(NUM_ENGINES)])
                )
                os.unlink(path)
                sources[0].begin(zeromq_out, engine_layout)
                found["zeromq"] = max(
                    together(engines, zeromq_in, [(engine_layout, r, addresses[r]) for r in range(NUM_ENGINES)])
                )
                sources[0].end()
                if number:
                    for side, value in found.items():
                        seconds.setdefault(side, []).append(value)
                    told = ", ".join(f"{side} {num_bytes / value / 1e9:.2f}" for side, value in found.items())
                    progress(f"end to end, round {number} of {rounds}, GB/s: {told}")
    finally:
        for worker in [*sources, *engines]:
            worker.close()
    return num_bytes, seconds


def ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios of rates, which are the inverse ratios of seconds."""
    return median(b / a for a, b in zip(over, under, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    known = parser.parse_args()
    rounds = 3 if known.quick else 9

    def show(
        figure: str, value: float, goal: float | None, seconds: dict[str, list[float]], num_bytes: int, better: Any
    ) -> None:
        detail = {
            "num_bytes": num_bytes,
            "rounds": rounds,
            "gb_per_s": {side: rounded(num_bytes / median(values) / 1e9) for side, values in seconds.items()},
            **machine(),
            "versions": versions("torch", "numpy", "xxhash"),
        }
        print_figure("weightsync", figure, value, unit="ratio", goal=goal, better=better, detail=detail)

    seconds = measure_goodput(rounds)
    optional = [("goodput_nixl_over_memcpy", "nixl", "memcpy", None)] if "nixl" in seconds else []
    for figure, over, under, goal in (
        ("goodput_local_over_memcpy", "local", "memcpy", 0.9),
        ("goodput_ucx_over_memcpy", "ucx", "memcpy", 0.6),
        ("goodput_ucx_tcp_over_socket", "ucx_tcp", "socket", 1.2),
        ("goodput_tcp_over_socket", "tcp", "socket", None),
        ("goodput_tcp_encrypted_over_tcp", "tcp_encrypted", "tcp", None),
        ("goodput_gloo_over_socket", "gloo", "socket", None),
        *optional,
    ):
        show(figure, ratio(seconds[over], seconds[under]), goal, seconds, GOODPUT_BYTES, "higher")
    stalls = ratio(seconds["snapshot_memcpy"], seconds["snapshot"])
    show("publication_stall_over_memcpy", stalls, 1.2, seconds, GOODPUT_BYTES, "lower")
    num_bytes, seconds = measure_end_to_end(rounds)
    for side, under, goal in (
        ("local", "memcpy", 0.45),
        ("ucx", "memcpy", 0.25),
        *(("ucx", other, 2.0) for other in ("gloo", "safetensors", "zeromq")),
        *(("local", other, 2.0) for other in ("gloo", "safetensors", "zeromq")),
    ):
        value = ratio(seconds[side], seconds[under])
        show(f"end_to_end_{side}_over_{under}", value, goal, seconds, num_bytes, "higher")


if __name__ == "__main__":
    sys.exit(main())

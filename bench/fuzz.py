"""Malformed and mutated messages against the decoder, and against a running hub while a valid peer works on.

    python bench/fuzz.py [--quick | --frames N] [--seed S]

- The decoder gets every message, as both ends decode it; anything but a `WireError` is a failure.
- The hub runs in its own process, with CURVE and without rate limits, so that every message reaches the decoder. Its
  peers: two with valid keys (one that uses another's name and role, one that sends mutations of its allowed messages),
  one without a key, and one that sends bytes to the port. None of them reads answers. A valid policy makes round trips
  meanwhile: each of its messages must arrive once and be answered. The memory of the hub is measured after a tenth of
  the messages and at the end.
- A flood of valid messages, far above the default limits: the same policy must not lose a message.

Prints one figure for each; the goals are zero failures, zero lost messages, and memory that does not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
import zmq
from figure import machine, print_figure, progress, quantile, rounded, versions
from mutations import Mutator, decode

from starling.common.errors import WireError
from starling.common.net import curve
from starling.common.net.dealer import Dealer
from starling.common.net.frames import receive
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.net.keyring import make_keys
from starling.common.net.limits import DEFAULT_RATE_LIMITS, RateLimits
from starling.common.wire import codec, messages
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope

RUN = "fuzz"
VALID = "policy-0"
THIEF, OWN = "reward-0", "rollout-0"
UNLIMITED = RateLimits(messages_per_s=1e9, bytes_per_s=1e12)
ANSWER_WITHIN_S = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_GROWTH_MIB = 16.0
"""Allowed growth; leaking a kilobyte per message would be a hundred times as much."""


def envelope(sender: str, seq: int) -> Envelope:
    """Return the envelope of a valid message."""
    return Envelope(protocol=PROTOCOL_VERSION, run=RUN, sender=sender, incarnation=1, seq=seq)


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / (1 << 20)


# --- the decoder ---------------------------------------------------------------------------------------------------


def fuzz_decoder(num: int, seed: int) -> None:
    """Decode `num` messages in this process."""
    mutator = Mutator(seed, RUN, OWN)
    outcomes: Counter[str] = Counter()
    before = 0.0
    for number in range(num):
        frames = mutator.next()
        try:
            decode(frames)
            outcomes["decoded"] += 1
        except WireError as error:
            outcomes[error.kind] += 1
        except Exception as error:  # noqa: BLE001 (what is looked for)
            outcomes["failed"] += 1
            progress(f"{type(error).__name__}: {error}: {[frame.hex() for frame in frames]}")
        if number == num // 10:
            before = rss_mib(os.getpid())
    after = rss_mib(os.getpid())
    detail = {"seed": seed, "frames": num, "outcomes": dict(outcomes), **versions("msgspec", "pyzmq")}
    print_figure("fuzz", "decoder_failures", outcomes["failed"], unit="messages", goal=0, better="lower", detail=detail)
    print_memory("decoder_growth", before, after)


def print_memory(figure: str, before: float, after: float) -> None:
    """Print the memory growth of a process."""
    detail = {"before_mib": rounded(before), "after_mib": rounded(after)}
    print_figure("fuzz", figure, after - before, unit="MiB", goal=MAX_GROWTH_MIB, better="lower", detail=detail)


# --- the hub's process ---------------------------------------------------------------------------------------------


def serve_hub(folder: Path, *, limited: bool) -> None:
    """Answer the valid peer with the received and dropped messages so far, until this process is killed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    keys = HubKeys(curve.load_key(folder / "controller.json"), curve.load_allowed(folder), folder)
    hub = Hub("tcp://127.0.0.1:0", RUN, 1, keys, limits=DEFAULT_RATE_LIMITS if limited else UNLIMITED)
    print(hub.address, flush=True)
    heard: Counter[str] = Counter()
    while True:
        for happened in hub.poll(1.0):
            if not isinstance(happened, ReceivedMessage):
                continue
            name, message = happened.envelope.sender, happened.message
            heard[name] += 1
            if name == VALID and isinstance(message, messages.StepTrained):
                data = {"heard": dict(heard), "dropped": dict(hub.dropped)}
                hub.send(name, messages.OperatorReply(request=message.lease, ok=True, text="", data=data))


# --- hostile peers -------------------------------------------------------------------------------------------------


def be_hostile(kind: str, address: str, folder: Path, seed: int, num: int) -> None:
    """Send `num` messages, and read nothing."""
    if kind == "bytes":
        throw_bytes(address, seed, num)
        return
    name = {"thief": THIEF, "own": OWN, "flood": OWN, "stranger": ""}[kind]
    context: zmq.Context[Any] = zmq.Context()
    line: zmq.Socket[Any] = context.socket(zmq.DEALER)
    line.linger, line.sndtimeo = 60_000, 60_000
    if name:
        curve.connect_with(line, curve.load_key(folder / f"{name}.json"))
    else:
        line.linger, line.sndtimeo = 0, 0
    line.connect(address)
    mutator = Mutator(seed, RUN, VALID if kind == "thief" else OWN)
    for seq in range(num):
        frames = codec.pack(envelope(OWN, seq), messages.Heartbeat()) if kind == "flood" else mutator.next()
        with suppress(zmq.Again):
            line.send_multipart(frames)
    if kind in ("thief", "own"):
        # Closing with unread answers would reset the connection, and the hub would lose messages that it has not read.
        sys.stdin.read()
    line.close()
    context.term()


def throw_bytes(address: str, seed: int, num: int) -> None:
    """Open connections and send bytes that are not, or almost, ZMTP."""
    draw = random.Random(seed)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31)
    for _ in range(num):
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=10.0) as line:
            first = greeting[: draw.randint(0, len(greeting))] if draw.random() < 0.7 else b""
            line.sendall(first + draw.randbytes(draw.choice((1, 10, 200, 5000))))


# --- the valid peer ------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A policy that makes one round trip after the other."""

    dealer: Dealer
    sent: int = 0
    lost: int = 0
    latencies: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)

    def round_trip(self) -> None:
        """Send one message, and wait for its answer."""
        self.sent += 1
        lease, begin = f"train:{self.sent}:1.{self.sent}", time.perf_counter()
        message = messages.StepTrained(lease=lease, step=self.sent, metrics={"loss": 1.0})
        self.dealer.send(codec.pack(envelope(VALID, self.sent), message))
        while time.perf_counter() < begin + ANSWER_WITHIN_S:
            received = receive(self.dealer.socket, 0)
            answer = None if received is None else codec.unpack_down(received[0])
            if isinstance(answer, messages.OperatorReply) and answer.request == lease:
                self.last = answer.data
                self.latencies.append(time.perf_counter() - begin)
                return
        self.lost += 1

    def work(self, seconds: float) -> None:
        """Make round trips for `seconds`, at a limited rate to leave CPU time to the hub."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.round_trip()
            time.sleep(0.001)

    @property
    def num_missing(self) -> int:
        """Number of messages that were not answered, or not received exactly once by the hub."""
        return max(self.lost, abs(self.sent - self.last.get("heard", {}).get(VALID, 0)))

    @property
    def num_hostile(self) -> int:
        """Number of other peers' messages that the hub has received."""
        heard = sum(self.last.get("heard", {}).values()) + sum(self.last.get("dropped", {}).values())
        return heard - self.last.get("heard", {}).get(VALID, 0)


@contextmanager
def running_hub(folder: Path, *, limited: bool) -> Iterator[tuple[subprocess.Popen[str], Worker, Path]]:
    """Run a hub and a connected worker; yields them with the hub's log."""
    log = folder / f"hub-{'limited' if limited else 'open'}.log"
    command = [sys.executable, __file__, "--hub", "limited" if limited else "open", str(folder)]
    with log.open("w") as file, ExitStack() as stack:
        hub = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        stack.callback(hub.wait)
        stack.callback(hub.kill)
        assert hub.stdout is not None
        address = hub.stdout.readline().strip()
        dealer = Dealer(address, VALID, curve.load_key(folder / f"{VALID}.json"))
        stack.callback(dealer.close)
        dealer.socket.rcvtimeo = 1000
        (folder / "address").write_text(address)
        worker = Worker(dealer)
        worker.round_trip()
        if worker.lost:
            raise SystemExit(f"the hub at {address} never answered")
        yield hub, worker, log


def hostile_process(kind: str, folder: Path, seed: int, num: int) -> subprocess.Popen[bytes]:
    """Start a hostile peer."""
    address = (folder / "address").read_text()
    command = [sys.executable, __file__, "--hostile", kind, address, str(folder), str(seed), str(num)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def fuzz_hub(folder: Path, num: int, seed: int) -> None:
    """Send `num` messages to a hub, half of them under another peer's name, and print the figures."""
    kinds = {"thief": num // 2, "own": num - num // 2, "stranger": max(num // 100, 10), "bytes": max(num // 500, 10)}
    with running_hub(folder, limited=False) as (hub, worker, log):
        begin = time.monotonic()
        hostile = [hostile_process(kind, folder, seed + i, n) for i, (kind, n) in enumerate(kinds.items())]
        before, seen_at = 0.0, begin
        while hub.poll() is None and time.monotonic() < seen_at + ANSWER_WITHIN_S:
            seen = worker.num_hostile
            worker.work(0.2)
            if worker.num_hostile > seen:
                seen_at = time.monotonic()
            if not before and worker.num_hostile >= num // 10:
                before = rss_mib(hub.pid)
            if worker.num_hostile >= num and all(p.poll() is not None for p in hostile[2:]):
                break
        crashed = hub.poll() is not None
        after = 0.0 if crashed else rss_mib(hub.pid)
        seconds = time.monotonic() - begin
        detail = {
            "seed": seed,
            "messages": num,
            "seen": worker.num_hostile,
            "seconds": rounded(seconds),
            "round_trips": worker.sent,
            "p99_us": rounded(1e6 * quantile(worker.latencies, 0.99)),
            "dropped": worker.last["dropped"],
            "log_lines": len(log.read_text().splitlines()),
            **machine(),
            "versions": {**versions("pyzmq", "msgspec"), "libzmq": zmq.zmq_version()},
        }
        unseen = max(0, num - worker.num_hostile)
        print_figure("fuzz", "hub_crashes", int(crashed), unit="crashes", goal=0, better="lower", detail=detail)
        counts = {"of": worker.sent, "hostile_unseen": unseen}
        print_figure("fuzz", "valid_lost", worker.num_missing, unit="messages", goal=0, better="lower", detail=counts)
        print_memory("hub_growth", before, after)
        for process in hostile:
            process.kill()
            process.communicate()


def flood_hub(folder: Path, num: int) -> None:
    """Let one peer exceed its rate limit by far, and print the effect on the others."""
    with running_hub(folder, limited=True) as (_, worker, log):
        worker.work(0.5)
        quiet, worker.latencies = worker.latencies, []
        flood = hostile_process("flood", folder, 0, num)
        while flood.poll() is None:
            worker.work(0.2)
        detail = {
            "flood": num,
            "heard": worker.last["heard"].get(OWN, 0),
            "dropped": worker.last["dropped"],
            "round_trips": worker.sent,
            "p99_us": {
                name: rounded(1e6 * quantile(x, 0.99)) for name, x in (("quiet", quiet), ("flood", worker.latencies))
            },
            "log_lines": log.read_text().splitlines(),
        }
        print_figure(
            "fuzz", "valid_lost_in_a_flood", worker.num_missing, unit="messages", goal=0, better="lower", detail=detail
        )


def main() -> None:
    """Run the fuzzer, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="50,000 messages instead of 1,000,000")
    parser.add_argument("--frames", type=int, default=0, help="so many messages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hub", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--hostile", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hub is not None:
        serve_hub(Path(arguments.hub[1]), limited=arguments.hub[0] == "limited")
    elif arguments.hostile is not None:
        kind, address, folder, seed, num = arguments.hostile
        be_hostile(kind, address, Path(folder), int(seed), int(num))
    else:
        num = arguments.frames or (50_000 if arguments.quick else 1_000_000)
        fuzz_decoder(num, arguments.seed)
        with tempfile.TemporaryDirectory(prefix="starling-fuzz-") as temporary:
            keys = Path(temporary) / "keys"
            make_keys(keys, (VALID, THIEF, OWN))
            fuzz_hub(keys, num, arguments.seed)
            flood_hub(keys, min(num, 200_000))


if __name__ == "__main__":
    main()

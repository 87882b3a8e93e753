"""Round trips between the controller's socket and a replica's, over tcp with CURVE, against bare pyzmq.

    OMP_NUM_THREADS=1 python bench/wire.py [--quick]

One process is the controller, each replica is a process of its own. The controller sends a command, the replica
answers it; both messages take about 300 bytes. What is compared:

- `ours`: `Hub` at the controller; at the replica a DEALER with our codec, as `ControllerLink` uses it, but in one
  thread that waits in `recv`. The messages exist before the clock starts: what a service does to make them is not
  counted. Every message is encoded, enveloped, decoded and checked as a typed struct, and every sender is
  authenticated.
- `link`: the same with the whole `ControllerLink`: its thread, its lease table, its queue to the working thread, and
  the release of each lease, a third message that the others do without.
- `bare`: a ROUTER and a DEALER with CURVE, and frames of the same sizes with opaque bytes, never encoded or read.
- `plain`: the same without CURVE (only in the details).

Prints one figure for each of 1, 16 and 64 commands in flight: round trips per second of ours over those of bare
pyzmq, and the same for the 99th percentile of the latency, and for the whole `ControllerLink`. Each round measures
all sides, one after another; a ratio is the median over the rounds of the ratio within the round, because other load
of the machine changes from round to round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import zmq
from figure import machine, print_figure, progress, quantile, rounded, versions

from starling.common.net import curve
from starling.common.net.frames import receive, send
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.net.keyring import make_keys
from starling.common.net.limits import RateLimits
from starling.common.net.link import ControllerLink, LinkClosed, ReceivedCommand
from starling.common.net.settings import LinkSettings
from starling.common.observe.process import collect_seldom
from starling.common.wire import codec, messages
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope

RUN = "bench/attempt-1/0badcafe"
WINDOWS = (1, 16, 64)
SIDES = ("bare", "ours", "link", "plain")
NAMES = {"bare": "policy-0", "ours": "policy-1", "link": "policy-2"}
"""Names with keys; the answers are messages of a policy."""
UNLIMITED = RateLimits(messages_per_s=1e9, bytes_per_s=1e12)
"""Rate limits disabled: these replicas send more than any real one."""
ANSWER_TIMEOUT_S = 10.0
METRIC_NAMES = (
    "loss entropy grad_norm reward_mean reward_std clip_fraction approx_kl num_tokens learning_rate staleness_mean "
    "padding_waste train_s"
)
METRICS = dict.fromkeys(METRIC_NAMES.split(), 1000.5)


def make_command(number: int) -> messages.GenerateGroup:
    """Return a command of about 300 bytes."""
    prompt = messages.Prompt(id=f"train/0/{number}", text="Spell this word backward: " + "benchmark " * 8)
    sampling = messages.Sampling(max_tokens=128, seed=number)
    return messages.GenerateGroup(
        lease=f"generate/train/{number}/1",
        purpose="train",
        prompt=prompt,
        num_completions=8,
        sampling=sampling,
        min_version=number,
    )


def make_answer(lease: str, number: int) -> messages.StepTrained:
    """Return an answer of about 300 bytes."""
    return messages.StepTrained(lease=lease, step=number, metrics=METRICS)


# --- the replica's process -----------------------------------------------------------------------------------------


def answer_bare(address: str, key: curve.KeyFile | None) -> None:
    """Answer every message with the same bytes, until the connection's owner kills this process."""
    socket = zmq.Context().socket(zmq.DEALER)
    if key is not None:
        curve.connect_with(socket, key)
    socket.connect(address)
    frames = sized_frames(make_answer("generate/train/1000/1", 1000), NAMES["bare"])
    socket.send_multipart(frames)
    while True:
        socket.recv_multipart()
        socket.send_multipart(frames)


def answer_ours(address: str, key: curve.KeyFile) -> None:
    """Decode every command and answer it, with the calls that `ControllerLink` makes in its thread."""
    socket = zmq.Context().socket(zmq.DEALER)
    socket.maxmsgsize = codec.MAX_BUFFER_BYTES
    curve.connect_with(socket, key)
    socket.connect(address)
    hello, answer = messages.Hello(role="policy", host="here", pid=1), make_answer("generate/train/1000/1", 1000)
    send(socket, codec.pack(envelope(key.name, 1), hello))
    seq = 1
    while True:
        received = receive(socket, 0)
        assert received is not None
        parts, _ = received
        codec.unpack_envelope(parts)
        command = codec.unpack_down(parts)
        assert isinstance(command, messages.GenerateGroup)
        seq += 1
        send(socket, codec.pack(envelope(key.name, seq), answer))


def answer_link(address: str, key: curve.KeyFile) -> None:
    """Answer every command as a service does."""
    hello = messages.Hello(role="policy", host="here", pid=1)
    link = ControllerLink(LinkSettings(name=key.name, run=RUN, controller=address, key=key), hello)
    link.start()
    number = 0
    while True:
        match link.receive(0.5):
            case ReceivedCommand(message=message):
                number += 1
                link.work(message.lease)
                link.answer(message.lease, make_answer(message.lease, number))
            case LinkClosed():
                return


def envelope(sender: str, seq: int) -> Envelope:
    """Return the envelope that a replica writes."""
    return Envelope(protocol=PROTOCOL_VERSION, run=RUN, sender=sender, incarnation=1_700_000_000_000, seq=seq)


def sized_frames(message: Any, sender: str) -> list[bytes]:
    """Return frames of the same sizes as ours, for sides that do not encode."""
    return [bytes(frame) for frame in codec.pack(envelope(sender, 1000), message)]


# --- the controller's process --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """Round trips per second, and the seconds that each took."""

    rate: float
    latencies: list[float]


Exchange = Callable[[int, int], Trial]


class BareController:
    """A ROUTER and nothing else."""

    def __init__(self, key: curve.KeyFile | None) -> None:
        context: zmq.Context[Any] = zmq.Context.instance()
        self._socket: zmq.Socket[Any] = context.socket(zmq.ROUTER)
        self._socket.rcvtimeo = int(ANSWER_TIMEOUT_S * 1000)
        if key is not None:
            # No authenticator: every client that knows the public key is accepted.
            self._socket.curve_server = True
            self._socket.curve_secretkey = key.secret.encode()
            self._socket.curve_publickey = key.public.encode()
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def meet(self) -> None:
        """Wait for the replica's first message."""
        self._route = self._socket.recv_multipart()[0]
        self._frames = [self._route, *sized_frames(make_command(1000), "controller")]

    def exchange(self, num: int, window: int) -> Trial:
        """Make `num` round trips with `window` commands in flight."""
        socket, frames, clock = self._socket, self._frames, time.perf_counter
        sent_at: list[float] = []
        latencies: list[float] = []
        begin = clock()
        for _ in range(window):
            sent_at.append(clock())
            socket.send_multipart(frames)
        for number in range(num):
            socket.recv_multipart()
            latencies.append(clock() - sent_at[number])
            if len(sent_at) < num:
                sent_at.append(clock())
                socket.send_multipart(frames)
        return Trial(num / (clock() - begin), latencies)


class HubController:
    """The controller's own socket, polled as its shell polls it."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        keys = HubKeys(curve.load_key(folder / "controller.json"), curve.load_allowed(folder))
        self.hub = Hub("tcp://127.0.0.1:0", RUN, 1_700_000_000_000, keys, limits=UNLIMITED)
        self.address = self.hub.address
        self._wanted = set(names)
        self._number = 0

    def meet(self) -> None:
        """Wait for every replica's hello, and welcome them."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while self._wanted:
            if time.monotonic() > deadline:
                raise SystemExit(f"no hello from {', '.join(self._wanted)}")
            for happened in self.hub.poll(0.1):
                if isinstance(happened, ReceivedMessage) and isinstance(happened.message, messages.Hello):
                    name = happened.envelope.sender
                    self._wanted.discard(name)
                    if name == NAMES["link"]:
                        self._welcome(name)

    def exchange_with(self, name: str) -> Exchange:
        """Return the exchange with one replica; that of a `ControllerLink` releases each lease."""
        release = name == NAMES["link"]

        def exchange(num: int, window: int) -> Trial:
            hub, clock = self.hub, time.perf_counter
            # Only a `Link` looks at the lease: to the others each command may be the same.
            commands = [make_command(self._number + i) for i in range(num if release else 1)]
            self._number += num
            sent_at: list[float] = []
            latencies: list[float] = []
            begin = clock()
            for number in range(window):
                sent_at.append(clock())
                hub.send(name, commands[number % len(commands)], cause="tick")
            while len(latencies) < num:
                happened = hub.poll(ANSWER_TIMEOUT_S)
                if not happened:
                    raise SystemExit(f"no answer from {name} within {ANSWER_TIMEOUT_S:g} s")
                for arrival in happened:
                    if not isinstance(arrival, ReceivedMessage):
                        raise SystemExit(f"{arrival.name} is gone")
                    answer = arrival.message
                    if not isinstance(answer, messages.StepTrained):
                        if isinstance(answer, messages.Heartbeat):
                            self._welcome(arrival.envelope.sender)
                        continue
                    latencies.append(clock() - sent_at[len(latencies)])
                    hello = arrival.envelope
                    cause = f"{hello.sender}/{hello.incarnation}/{hello.seq}"
                    if release:
                        hub.release(name, (answer.lease,))
                    if len(sent_at) < num:
                        sent_at.append(clock())
                        hub.send(name, commands[(len(sent_at) - 1) % len(commands)], cause=cause)
            return Trial(num / (clock() - begin), latencies)

        return exchange

    def _welcome(self, name: str) -> None:
        self.hub.send(name, messages.Welcome(heartbeat_s=1.0, lease_s=60.0))


# --- the figures ---------------------------------------------------------------------------------------------------


def measure(num: int, rounds: int) -> dict[int, dict[str, list[Trial]]]:
    """Return the trials of all sides, by window and side."""
    replicas: list[subprocess.Popen[bytes]] = []
    collect_seldom()  # as the controller's process does
    with tempfile.TemporaryDirectory(prefix="starling-wire-") as temporary:
        folder = Path(temporary)
        make_keys(folder, list(NAMES.values()))
        hub = HubController(folder, [NAMES["ours"], NAMES["link"]])
        bare, plain = BareController(curve.load_key(folder / "controller.json")), BareController(None)
        addresses = {"bare": bare.address, "ours": hub.address, "link": hub.address, "plain": plain.address}
        try:
            for side in SIDES:
                arguments = [sys.executable, __file__, "--replica", side, addresses[side], temporary]
                replicas.append(subprocess.Popen(arguments))
            for controller in (bare, plain, hub):
                controller.meet()
            exchanges: dict[str, Exchange] = {
                "bare": bare.exchange,
                "ours": hub.exchange_with(NAMES["ours"]),
                "link": hub.exchange_with(NAMES["link"]),
                "plain": plain.exchange,
            }
            return run_rounds(exchanges, num, rounds)
        finally:
            for replica in replicas:
                replica.kill()
                replica.wait()
            hub.hub.close()


def run_rounds(exchanges: dict[str, Exchange], num: int, rounds: int) -> dict[int, dict[str, list[Trial]]]:
    """Measure alternately: every side once per round and window."""
    for exchange in exchanges.values():
        exchange(num // 10, 1)
    trials: dict[int, dict[str, list[Trial]]] = {window: {side: [] for side in exchanges} for window in WINDOWS}
    for number in range(rounds):
        for window in WINDOWS:
            for side, exchange in exchanges.items():
                trials[window][side].append(exchange(num, window))
        rates_text = ", ".join(f"{side} {trials[1][side][-1].rate:.0f}" for side in exchanges)
        progress(f"round {number + 1} of {rounds}: round trips/s with 1 in flight: {rates_text}")
    return trials


def report(trials: dict[int, dict[str, list[Trial]]], num: int) -> None:
    """Print the figures."""
    for window, sides in trials.items():
        rates = {side: [trial.rate for trial in runs] for side, runs in sides.items()}
        tails = {side: [quantile(trial.latencies, 0.99) for trial in runs] for side, runs in sides.items()}
        middles = {side: [quantile(trial.latencies, 0.5) for trial in runs] for side, runs in sides.items()}
        detail = {
            "in_flight": window,
            "round_trips": num,
            "rounds": len(rates["bare"]),
            "round_trips_per_s": {side: rounded(median(values)) for side, values in rates.items()},
            "p50_us": {side: rounded(1e6 * median(values)) for side, values in middles.items()},
            "p99_us": {side: rounded(1e6 * median(values)) for side, values in tails.items()},
            "command_bytes": sum(map(len, sized_frames(make_command(1000), "controller"))),
            "answer_bytes": sum(map(len, sized_frames(make_answer("generate/train/1000/1", 1000), NAMES["bare"]))),
            **machine(),
            "versions": {**versions("pyzmq", "msgspec"), "libzmq": zmq.zmq_version()},
        }
        # By default a rollout has 16 slots: only the controller's side is held to more.
        for side, goal in (("ours", 0.7), ("link", 0.7 if window <= 16 else None)):
            value = median(a / b for a, b in zip(rates[side], rates["bare"], strict=True))
            figure = f"{side}_over_bare_round_trips_{window}_in_flight"
            print_figure("wire", figure, value, unit="ratio", goal=goal, better="higher", detail=detail)
            value = median(a / b for a, b in zip(tails[side], tails["bare"], strict=True))
            slowest = None if goal is None else rounded(1 / goal)
            figure = f"{side}_over_bare_p99_{window}_in_flight"
            print_figure("wire", figure, value, unit="ratio", goal=slowest, better="lower", detail={"see": "above"})


def main() -> None:
    """Run the benchmark, or a replica process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer round trips; some seconds")
    parser.add_argument("--replica", nargs=3, metavar=("SIDE", "ADDRESS", "KEYS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replica is None:
        num, rounds = (2000, 5) if arguments.quick else (10_000, 9)
        report(measure(num, rounds), num)
        return
    side, address, folder = arguments.replica
    if side == "plain":
        answer_bare(address, None)
    answers = {"bare": answer_bare, "ours": answer_ours, "link": answer_link}
    answers[side](address, curve.load_key(Path(folder) / f"{NAMES[side]}.json"))


if __name__ == "__main__":
    main()

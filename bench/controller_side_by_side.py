"""Latency of results to the policy and rate of commands to a replica: Starling compared with HTTP and Redis streams.

    OMP_NUM_THREADS=1 python bench/controller_side_by_side.py [--quick]

Both sides run real processes on one host, over TCP: a controller, a policy, and 1, 8 or 64 rollouts, each a process.

- Ours (controller_star.py): `Hub`, codec and `Link`, with CURVE. Encrypted, authenticated, leased, released.
- Theirs (controller_http.py): the traffic of Cosmos-RL, JSON over HTTP to a FastAPI controller and from there by Redis
  streams, in plain text, with no result kept for sending again. It runs in an environment of its own, made here from
  controller-http-requirements.txt, and needs `redis-server` on the PATH (Debian: redis-server).

A burst: every rollout has a result (8 completions of 256 tokens, with ids and log-probabilities, as lists) at the same
instant. Its latency lasts from there until the policy has decoded all of it; fetching the next prompt, acknowledging
the step and releasing leases happen between bursts. `text` is their default without token ids and log-probabilities;
the policy would then have to tokenize the texts again, which is not measured. Commands are sent to one replica at the
highest possible rate, until it has decoded the last one.

Neither controller makes decisions, stores or scores. In every round the sides run alternately, while the other one is
suspended (SIGSTOP); a first burst warms up and is not counted. A ratio is the median over the rounds of the ratio in
the round. CPU time per result is a separate figure, which depends less on other load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import zmq
from controller_traffic import GROUP_SIZE, NUM_TOKENS, POLICY
from environment import environment_python
from figure import machine, print_figure, progress, quantile, rounded, versions

from starling.common.net import keyring

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "controller-http-requirements.txt"
WINDOWS = (1, 8, 64)
KINDS = ("theirs", "text", "ours")
ANSWER_TIMEOUT_S, END_TIMEOUT_S = 90.0, 10.0
GOAL = 5.0


@dataclass(frozen=True)
class Scale:
    """Size of the measurement."""

    rounds: int
    bursts: dict[int, int]
    """Number of bursts per round, by number of rollouts."""
    num_commands: int


FULL = Scale(7, {1: 100, 8: 30, 64: 8}, 5000)
QUICK = Scale(5, {1: 20, 8: 5, 64: 1}, 2000)


class Role:
    """A process of one side; the benchmark exchanges JSON lines with it."""

    def __init__(self, command: list[str], group: int) -> None:
        """Start the process in process group `group`; 0 for a new one."""
        self._name = " ".join(Path(word).name for word in command[1:3])
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=group)
        self._heard = b""

    def say(self, **message: Any) -> None:
        """Send a JSON line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def hear(self) -> dict[str, Any]:
        """Return its next JSON line; end the benchmark after a timeout."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while b"\n" not in self._heard:
            descriptor = self.process.stdout.fileno()
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemExit(f"{self._name} did not answer within {ANSWER_TIMEOUT_S:g} s")
            read = os.read(descriptor, 1 << 16)
            if not read:
                raise SystemExit(f"{self._name} ended with {self.process.wait(ANSWER_TIMEOUT_S)}")
            self._heard += read
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Side:
    """The processes of one side."""

    def __init__(self, script: list[str], keys: Path | None, num_rollouts: int) -> None:
        """Start a controller, a policy and `num_rollouts` rollouts, with `keys` on the side that needs them."""
        self.num_rollouts = num_rollouts
        folder = [] if keys is None else [str(keys)]
        self._roles = [Role([*script, "controller", *folder], 0)]
        self._controller = self._roles[0]
        self._group = self._controller.process.pid
        try:
            about = self.about = self._controller.hear()
            where = [about["address"]] if "address" in about else [about["api"], str(about["redis"])]
            self._policy = self._start([*script, "policy", *where, *folder])
            self._policy.hear()
            self._rollouts = self._start([*script, "rollouts", where[0], *folder, str(num_rollouts)])
            self._rollouts.hear()
        except BaseException:  # leave no process of a side that failed to start
            self.close()
            raise

    def _start(self, command: list[str]) -> Role:
        self._roles.append(Role(command, self._group))
        return self._roles[-1]

    def burst(self, *, tokens: bool) -> list[float]:
        """Let every rollout deliver one result; return the latency of each in seconds."""
        self._policy.say(results=self.num_rollouts)
        self._rollouts.say(tokens=tokens)
        ready, decoded = self._rollouts.hear()["ready"], self._policy.hear()["decoded"]
        self._rollouts.hear()
        return [(after - before) / 1e9 for before, after in zip(ready, decoded, strict=True)]

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all processes and threads of the side so far."""
        spent_ns = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[2]) == self._group:
                    threads = (folder / "task").glob("*/schedstat")
                    spent_ns += sum(int(thread.read_text().split()[0]) for thread in threads)
        return spent_ns / 1e9

    def command_rate(self, num: int) -> float:
        """Send `num` commands to the policy; return the rate at which it decodes them."""
        self._policy.say(commands=num)
        self._controller.say(commands=num)
        begin = self._controller.hear()["began"]
        end = self._policy.hear()["decoded"]
        self._controller.say(release=num)
        return num / ((end - begin) / 1e9)

    @contextlib.contextmanager
    def turn(self) -> Any:
        """Resume the side, and suspend it afterwards."""
        os.killpg(self._group, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._group, signal.SIGSTOP)

    def __enter__(self) -> Self:
        """Suspend the side until its first measurement."""
        os.killpg(self._group, signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.close()

    def close(self) -> None:
        """End the controller, which ends its children, then kill all processes of the side."""
        os.killpg(self._group, signal.SIGCONT)
        self._roles[0].close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._roles[0].process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        for role in self._roles:
            role.process.wait(END_TIMEOUT_S)


@dataclass
class Measured:
    """Measurements of all rounds."""

    medians: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Median latency in seconds per round, by number of rollouts and kind."""
    tails: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """99th percentile of the latency, likewise."""
    cpu: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """CPU seconds of the whole side per result, prompts and acknowledgements included."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure(scale: Scale, python: Path) -> Measured:
    """Measure everything."""
    measured = Measured(rates={"theirs": [], "ours": []})
    theirs, ours = [str(python), str(HERE / "controller_http.py")], [sys.executable, str(HERE / "controller_star.py")]
    for num in WINDOWS:
        with tempfile.TemporaryDirectory(prefix="starling-controller-") as temporary:
            keys = Path(temporary) / "keys"
            keyring.make_keys(keys, [POLICY, *(f"rollout-{i}" for i in range(num))])
            with Side(theirs, None, num) as http, Side(ours, keys, num) as star:
                sides = {"theirs": http, "text": http, "ours": star}
                measured.about = {name: sides[name].about for name in ("theirs", "ours")}
                run_rounds(measured, sides, num, scale)
    return measured


def run_rounds(measured: Measured, sides: dict[str, Side], num: int, scale: Scale) -> None:
    """Measure the sides alternately with `num` rollouts; commands only with one rollout."""
    medians = measured.medians[num] = {kind: [] for kind in KINDS}
    tails = measured.tails[num] = {kind: [] for kind in KINDS}
    cpu = measured.cpu[num] = {kind: [] for kind in KINDS}
    for number in range(scale.rounds):
        for kind in KINDS:
            side, tokens = sides[kind], kind != "text"
            with side.turn():
                side.burst(tokens=tokens)
                before = side.cpu_seconds()
                seconds = [value for _ in range(scale.bursts[num]) for value in side.burst(tokens=tokens)]
                cpu[kind].append((side.cpu_seconds() - before) / len(seconds))
                if num == 1 and kind in measured.rates:
                    measured.rates[kind].append(side.command_rate(scale.num_commands))
            medians[kind].append(median(seconds))
            tails[kind].append(quantile(seconds, 0.99))
        latencies = ", ".join(f"{kind} {1000 * medians[kind][-1]:.2f} ms" for kind in KINDS)
        progress(f"round {number + 1} of {scale.rounds}, {num} rollouts: {latencies}")


def report(measured: Measured, scale: Scale) -> None:
    """Print the figures."""
    common = {
        "tokens_per_group": GROUP_SIZE * NUM_TOKENS,
        "rounds": scale.rounds,
        "theirs": {name: value for name, value in measured.about["theirs"].items() if name not in ("api", "redis")},
        "ours": {name: value for name, value in measured.about["ours"].items() if name != "address"},
        **machine(),
        "versions": {**versions("pyzmq", "msgspec", "numpy"), "libzmq": zmq.zmq_version()},
    }
    for num in measured.medians:
        quantities = (
            ("result_to_policy_seconds_p50", measured.medians[num]),
            ("result_to_policy_seconds_p99", measured.tails[num]),
            ("processor_seconds_per_result", measured.cpu[num]),
        )
        for name, values in quantities:
            shown = {kind: rounded(1000 * median(seconds)) for kind, seconds in values.items()}
            detail = {"rollouts": num, "results_per_round": num * scale.bursts[num], "milliseconds": shown, **common}
            for kind in ("theirs", "text"):
                ratio = median(a / b for a, b in zip(values[kind], values["ours"], strict=True))
                goal = GOAL if kind == "theirs" and name.startswith("result") else None
                told = detail if kind == "theirs" else {"see": "above"}
                figure = f"{name}_{num}_rollouts_{kind}_over_ours"
                print_figure("controller", figure, ratio, unit="ratio", goal=goal, better="higher", detail=told)
    rates = measured.rates
    ratio = median(a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True))
    per_s = {side: rounded(median(values)) for side, values in rates.items()}
    detail = {"commands": scale.num_commands, "commands_per_s": per_s, **common}
    figure = "commands_per_second_ours_over_theirs"
    print_figure("controller", figure, ratio, unit="ratio", goal=GOAL, better="higher", detail=detail)


def report_missing(reason: str) -> None:
    """Print the figures that could not be measured."""
    names = [
        f"result_to_policy_seconds_{name}_{num}_rollouts_theirs_over_ours" for num in WINDOWS for name in ("p50", "p99")
    ]
    for figure in (*names, "commands_per_second_ours_over_theirs"):
        print_figure(
            "controller", figure, None, unit="ratio", goal=GOAL, better="higher", detail={"reason": reason, **machine()}
        )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute once the environment is there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # to end all started processes on an interrupt, too
    if shutil.which("redis-server") is None:
        report_missing("redis-server is not on the PATH: install it, on Debian with `apt-get install redis-server`")
        return
    python = environment_python("controller-http", REQUIREMENTS)
    scale = QUICK if arguments.quick else FULL
    report(measure(scale, python), scale)


if __name__ == "__main__":
    main()

"""Minimal controller and policy for `rollout.py`, with one rollout process.

The process is what `starling rollout` starts. It connects to a real `Hub`, encrypted, and pulls from a real
`Publisher`. This module replaces the decisions of the controller's core: which group is next, and when to adopt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import psutil

from starling.common.net import curve, keyring
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.wire import messages as wire
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of

RUN: Final = "bench/attempt-1/0badcafe"
NAME: Final = "rollout-0"
HEARTBEAT_S: Final = 1.0
POLL_S: Final = 0.05
START_S: Final = 600.0
WORK_S: Final = 600.0


@dataclass(frozen=True)
class Job:
    """One group to generate."""

    text: str
    num_completions: int
    max_tokens: int
    seed: int


@dataclass
class Served:
    """Measurements of one load of jobs."""

    seconds: float
    num_tokens: int
    cpu_s: float = 0.0
    """CPU seconds of the measured processes."""
    adopted: list[wire.WeightsAdopted] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(found.user + found.system for found in times)


class BenchController:
    """Controller and publisher of one rollout that has adopted version 0."""

    def __init__(self, hub: Hub, pid: int, weights: Sequence[Mapping[str, Any]]) -> None:
        """Wait for the rollout and make it adopt version 0; versions cycle through the tensors of `weights`."""
        self._hub, self._pid, self._num_leases, self._version = hub, pid, 0, -1
        self._weights = cycle(weights)
        source = layout_of(weights[0], "policy-0")
        self._publisher = Publisher(source, transport="ucx")
        self._plan = encode(make_plan(source, self._welcome()))
        lease = self._adopt()
        adopted = self._answer(lease, wire.WeightsAdopted, START_S)
        self.transport = "+".join(adopted.lanes) or adopted.transport

    def run(self, jobs: Sequence[Job], *, in_flight: int, adopt_every_s: float | None = None) -> Served:
        """Run the jobs, `in_flight` at a time, with an adoption every `adopt_every_s`; return when all have ended."""
        waiting, leases = list(reversed(jobs)), set[str]()
        begin, begin_cpu = time.monotonic(), cpu_seconds(self._pid)
        served, due, adopting = Served(0.0, 0), begin + (adopt_every_s or 0.0), ""
        while waiting or leases:
            while waiting and len(leases) < in_flight:
                leases.add(self._generate(waiting.pop()))
            if adopt_every_s is not None and not adopting and time.monotonic() >= due:
                due, adopting = max(due + adopt_every_s, time.monotonic()), self._adopt()
            for message in self._poll(begin + WORK_S):
                match message:
                    case wire.GroupGenerated(lease=lease) if lease in leases:
                        leases.remove(lease)
                        served.num_tokens += sum(made.num_tokens for made in message.trajectories)
                    case wire.WeightsAdopted(lease=lease) if lease == adopting:
                        adopting = ""
                        served.adopted.append(message)
                    case wire.LeaseFailed():
                        raise SystemExit(f"{message.lease} failed: {message.reason}")
        served.seconds, served.cpu_s = time.monotonic() - begin, cpu_seconds(self._pid) - begin_cpu
        if adopting:
            self._answer(adopting, wire.WeightsAdopted, WORK_S)
        return served

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def _welcome(self) -> Layout:
        """Wait for the rollout's hello; return its layout."""
        deadline = time.monotonic() + START_S
        while True:
            for event in self._hub.poll(POLL_S):
                if isinstance(event, ReceivedMessage) and isinstance(event.message, wire.Hello):
                    self._greet(event)
                    return decode(Layout, event.buffers[0])
            if time.monotonic() > deadline:
                raise SystemExit(f"the rollout did not start within {START_S:g} s")

    def _greet(self, answered: ReceivedMessage) -> None:
        """Answer a hello or a heartbeat."""
        envelope = answered.envelope
        welcome = wire.Welcome(heartbeat_s=HEARTBEAT_S, lease_s=WORK_S)
        self._hub.send(NAME, welcome, cause=f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}")

    def _lease(self, kind: str) -> str:
        self._num_leases += 1
        return f"{kind}:t{self._num_leases}:1.{self._num_leases}"

    def _generate(self, job: Job) -> str:
        lease = self._lease("generate")
        message = wire.GenerateGroup(
            lease=lease,
            purpose="train",
            prompt=wire.Prompt(id=f"train/0/{job.seed}", text=job.text),
            num_completions=job.num_completions,
            sampling=wire.Sampling(max_tokens=job.max_tokens, seed=job.seed),
            min_version=0,
        )
        assert self._hub.send(NAME, message), "the rollout is connected"
        return lease

    def _adopt(self) -> str:
        """Publish the next version and order its adoption; return the lease."""
        self._version += 1
        offer = self._publisher.publish(self._version, next(self._weights))
        lease = self._lease("adopt")
        message = wire.AdoptWeights(lease=lease, version=self._version, source="policy-0")
        assert self._hub.send(NAME, message, buffers=(encode(offer), self._plan)), "the rollout is connected"
        return lease

    def _answer(self, lease: str, kind: type[wire.WeightsAdopted], timeout_s: float) -> wire.WeightsAdopted:
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._poll(deadline):
                if getattr(message, "lease", None) == lease:
                    if not isinstance(message, kind):
                        raise SystemExit(f"{lease}: {message}")
                    return message

    def _poll(self, deadline: float) -> Iterator[wire.Up]:
        """Yield the rollout's messages; answer heartbeats and release leases."""
        if time.monotonic() > deadline:
            raise SystemExit("the rollout did not answer in time")
        for event in self._hub.poll(POLL_S):
            if not isinstance(event, ReceivedMessage):
                raise SystemExit(f"{event.name} has left")
            message = event.message
            if isinstance(message, wire.Heartbeat):
                self._greet(event)
            elif (lease := getattr(message, "lease", None)) is not None:
                self._hub.release(NAME, (lease,))
            yield message


@contextmanager
def serving(folder: Path, flags: Sequence[str], weights: Sequence[Mapping[str, Any]]) -> Iterator[BenchController]:
    """Start a rollout with these settings, and end it afterwards."""
    keys = folder / "keys"
    keyring.make_keys(keys, [NAME], replace=keys.exists())
    hub = Hub(
        "tcp://127.0.0.1:0",
        RUN,
        time.time_ns() // 1_000_000,
        HubKeys(curve.load_key(keys / "controller.json"), curve.load_allowed(keys)),
    )
    command = [sys.executable, "-m", "starling.rollout.shell.main", "--name", NAME, "--controller", hub.address]
    command += ["--dir", str(folder), "--run.id", RUN, *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    with (folder / "rollout.log").open("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            controller = BenchController(hub, process.pid, weights)
            try:
                yield controller
            finally:
                controller.close()
        except SystemExit as failed:
            log.seek(0)
            raise SystemExit(f"{failed}; the rollout's log:\n{log.read()[-4000:]}") from None
        finally:
            process.terminate()
            end(process)
            hub.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Wait for a terminating process; after a minute kill it. Kill the rest of its process group, too."""
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60.0)

"""The controller's and the policy's side of `rollout.py`: one real rollout process, its prompts and its weights.

The process is what `starling rollout` starts. It speaks with a real `Hub`, encrypted; its weights come from a real
`Publisher`. What the controller's core would decide is decided here: which group is next, and when to adopt.
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
from starling.common.net.hub import Hub, HubKeys, ReceivedMessage
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
    """What came of a load of jobs."""

    seconds: float
    num_tokens: int
    cpu_s: float = 0.0
    """Processor seconds of the side's processes."""
    adopted: list[wire.WeightsAdopted] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and of all below it, so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(found.user + found.system for found in times)


class Desk:
    """One rollout that has joined and adopted version 0."""

    def __init__(self, hub: Hub, pid: int, weights: Sequence[Mapping[str, Any]]) -> None:
        """Wait for the rollout, and give it its first weights; versions have the tensors of `weights` in turn."""
        self._hub, self._pid, self._num_leases, self._version = hub, pid, 0, -1
        self._weights = cycle(weights)
        source = layout_of(weights[0], "policy-0")
        self._publisher = Publisher(source, transport="ucx")
        self._plan = encode(make_plan(source, self._welcome()))
        lease = self._adopt()
        adopted = self._answer(lease, wire.WeightsAdopted, START_S)
        self.transport = "+".join(adopted.lanes) or adopted.transport

    def run(self, jobs: Sequence[Job], *, in_flight: int, adopt_every_s: float | None = None) -> Served:
        """Have the jobs done, so many at a time, with an adoption now and then; returns when all have come back."""
        waiting, held = list(reversed(jobs)), set[str]()
        begin, begin_cpu = time.monotonic(), cpu_seconds(self._pid)
        served, due, adopting = Served(0.0, 0), begin + (adopt_every_s or 0.0), ""
        while waiting or held:
            while waiting and len(held) < in_flight:
                held.add(self._generate(waiting.pop()))
            if adopt_every_s is not None and not adopting and time.monotonic() >= due:
                due, adopting = max(due + adopt_every_s, time.monotonic()), self._adopt()
            for message in self._poll(begin + WORK_S):
                match message:
                    case wire.GroupGenerated(lease=lease) if lease in held:
                        held.remove(lease)
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
        """End what it serves."""
        self._publisher.close()

    def _welcome(self) -> Layout:
        """Wait until the rollout says hello. Returns what it holds."""
        deadline = time.monotonic() + START_S
        while True:
            for happened in self._hub.poll(POLL_S):
                if isinstance(happened, ReceivedMessage) and isinstance(happened.message, wire.Hello):
                    self._greet(happened)
                    return decode(Layout, happened.buffers[0])
            if time.monotonic() > deadline:
                raise SystemExit(f"the rollout did not start within {START_S:g} s")

    def _greet(self, answered: ReceivedMessage) -> None:
        """Answer a hello or a heartbeat: the rollout wants to know which."""
        said = answered.envelope
        welcome = wire.Welcome(heartbeat_s=HEARTBEAT_S, lease_s=WORK_S)
        self._hub.send(NAME, welcome, cause=f"{said.sender}/{said.incarnation}/{said.seq}")

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
        assert self._hub.send(NAME, message), "the rollout reads"
        return lease

    def _adopt(self) -> str:
        """Publish the next version and have it adopted. Returns the lease."""
        self._version += 1
        offer = self._publisher.publish(self._version, next(self._weights))
        lease = self._lease("adopt")
        message = wire.AdoptWeights(lease=lease, version=self._version, source="policy-0")
        assert self._hub.send(NAME, message, buffers=(encode(offer), self._plan)), "the rollout reads"
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
        """Yield what the rollout says, and answer what is to be answered at once."""
        if time.monotonic() > deadline:
            raise SystemExit("the rollout did not answer in time")
        for happened in self._hub.poll(POLL_S):
            if not isinstance(happened, ReceivedMessage):
                raise SystemExit(f"{happened.name} is gone")
            message = happened.message
            if isinstance(message, wire.Heartbeat):
                self._greet(happened)
            elif (lease := getattr(message, "lease", None)) is not None:
                self._hub.release(NAME, (lease,))
            yield message


@contextmanager
def serving(folder: Path, flags: Sequence[str], weights: Sequence[Mapping[str, Any]]) -> Iterator[Desk]:
    """Start a rollout with these settings; it is ended when the context is left."""
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
            desk = Desk(hub, process.pid, weights)
            try:
                yield desk
            finally:
                desk.close()
        except SystemExit as failed:
            log.seek(0)
            raise SystemExit(f"{failed}; the rollout said:\n{log.read()[-4000:]}") from None
        finally:
            process.terminate()
            end(process)
            hub.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Wait for a process to end that was told to; after a minute kill it. What it left behind is killed, too."""
    try:
        process.wait(60.0)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60.0)

"""A whole run on simulated time: the real controller core, and replicas reduced to what they say and hear.

Everything is decided by one seed. Each message is packed and unpacked as on the wire, and the network between loses,
doubles, delays and reorders as its `Faults` say. After every event `simulated_checks` looks at the controller.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulated_checks import Checks, Violation
from simulated_replicas import Policy, Replica, Reward, Rollout

from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, Prompt, Sampling
from starling.controller.core.events import Event, Finish, Note, PeerLost, Received, Send, StopRequested, Ticked
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan

TICK_S = 0.25
PATIENCE_S = 900.0
"""A run that takes longer, on simulated time, hangs."""
CONTROLLER = "controller"


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how often."""

    loss: float = 0.0
    duplicates: float = 0.0
    reorder: bool = False
    """Each message takes its own time, up to 2 s, and may overtake others."""
    crash_every_s: float = 0.0
    """Mean time between the deaths of any rollout; 0 for never."""
    silent_deaths: float = 0.0
    """Share of the deaths that close no connection."""
    score_s: float = 0.05
    scorer_failures: float = 0.0
    pull_failures: float = 0.0
    torn: float = 0.0
    """Share of the switches after which the engine holds something else."""
    slow_pull_s: float = 0.3


CALM = Faults()


class Stream:
    """An endless supply of prompts that notes which were read."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.read: list[str] = []

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        prompt = Prompt(id=f"{self.name}/{position}", text="x")
        self.read.append(prompt.id)
        return prompt


def plan_of(seed: int) -> RunPlan:
    """Return a run of some size."""
    rng = random.Random(f"plan {seed}")
    return RunPlan(
        seed=seed,
        sampling=Sampling(max_tokens=8),
        eval_sampling=Sampling(max_tokens=8, temperature=0.0),
        num_sft_steps=rng.choice((0, 0, 2)),
        examples_per_step=2,
        num_steps=rng.randint(3, 6),
        prompts_per_step=rng.randint(1, 4),
        group_size=2,
        max_staleness=rng.choice((0, 1, 1, 2)),
        max_tries=8,
        evaluate_at_start=rng.random() < 0.5,
        evaluate_at_end=rng.random() < 0.5,
        num_rollouts=rng.randint(1, 3),
        num_rewards=rng.randint(1, 2),
        lease_s=6.0,
    )


@dataclass(order=True)
class _Due:
    time: float
    number: int
    action: Callable[[], None] = field(compare=False)


class World:
    """The clock, the network, the controller and its replicas."""

    def __init__(self, seed: int, faults: Faults, plan: RunPlan | None = None) -> None:
        self.rng, self.faults = random.Random(f"world {seed} {faults}"), faults
        self.plan = plan_of(seed) if plan is None else plan
        self.now = 0.0
        self._due: list[_Due] = []
        self._num_scheduled = 0
        self._last_delivery: dict[tuple[str, str], float] = {}
        self._seq = 0
        self._stop_at = float("inf")
        self.replicas: dict[str, Replica] = {}
        self.notes: list[Note] = []
        self.finish: Finish | None = None
        held_out = [Prompt(id=f"held-out/{i}", text="x") for i in range(3)]
        self.prompts = Stream("train")
        self.controller = Controller(self.plan, self.prompts, Stream("sft"), held_out)
        self.checks = Checks(self.plan, self.controller.state)

    # --- time ------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do `action` in `seconds`."""
        self._num_scheduled += 1
        heapq.heappush(self._due, _Due(self.now + seconds, self._num_scheduled, action))

    def run(self, stop_at: float = float("inf")) -> World:
        """Run to the end. Raises Violation when something is wrong."""
        self._start_replicas()
        self.after(0.0, self._tick)
        if self.faults.crash_every_s:
            self.after(self.rng.expovariate(1 / self.faults.crash_every_s), self._crash)
        if stop_at < float("inf"):
            self.after(stop_at, lambda: self._take(StopRequested(self.now, "stopped")))
        while self.finish is None:
            due = heapq.heappop(self._due)
            self.now = due.time
            if self.now > PATIENCE_S:
                raise Violation(f"the run hangs; it waits for {self.controller.state.waiting_for}")
            due.action()
        self.checks.at_end(self.finish, stopped=stop_at < float("inf"))
        return self

    # --- the network -----------------------------------------------------------------------------------------------

    def to_controller(self, sender: Replica, frames: list[bytes | memoryview]) -> None:
        """Carry what a replica says."""

        def arrive() -> None:
            envelope = codec.unpack_envelope(frames)
            message, buffers = codec.unpack_up(frames), tuple(bytes(frame) for frame in frames[2:])
            self._take(Received(self.now, envelope.sender, envelope.epoch, message, buffers))

        self._carry((sender.name, CONTROLLER), arrive)

    def _to_replica(self, send: Send) -> None:
        replica = self.replicas.get(send.peer)
        if replica is None or not replica.alive:
            return
        self._seq += 1
        envelope = Envelope(protocol=PROTOCOL_VERSION, run="r", sender=CONTROLLER, epoch=1, seq=self._seq)
        frames = codec.pack(envelope, send.message, send.buffers)
        self._carry((CONTROLLER, send.peer), lambda: replica.hear(frames))

    def _carry(self, line: tuple[str, str], arrive: Callable[[], None]) -> None:
        faults = self.faults
        if self.rng.random() < faults.loss:
            return
        for _ in range(1 + (self.rng.random() < faults.duplicates)):
            if faults.reorder:
                delay = self.rng.choice((0.01, 0.1, 0.5, 2.0)) * self.rng.random()
            else:
                at = max(self.now + 0.01 * self.rng.random(), self._last_delivery.get(line, 0.0))
                self._last_delivery[line] = at
                delay = at - self.now
            self.after(delay, arrive)

    # --- what happens ----------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if self.finish is not None:
            return
        commands = self.controller.step(event)
        for command in commands:
            match command:
                case Send():
                    self._to_replica(command)
                case Note():
                    self.notes.append(command)
                case Finish():
                    self.finish = command
        self.checks.after_event(commands)

    def _tick(self) -> None:
        self._take(Ticked(self.now))
        self.after(TICK_S, self._tick)

    def _start_replicas(self) -> None:
        self._start(Policy(self, "policy-0", epoch=1))
        for i in range(self.plan.num_rollouts):
            self._start(Rollout(self, f"rollout-{i}", epoch=1, num_slots=self.rng.randint(1, 4)))
        for i in range(self.plan.num_rewards):
            self._start(Reward(self, f"reward-{i}", epoch=1, num_slots=self.rng.randint(1, 4)))

    def _start(self, replica: Replica) -> None:
        self.replicas[replica.name] = replica
        self.after(self.rng.random(), replica.begin)

    def _crash(self) -> None:
        names = sorted(name for name, r in self.replicas.items() if isinstance(r, Rollout) and r.alive)
        if names and self.controller.state.phase in ("sft", "grpo"):
            name = self.rng.choice(names)
            old = self.replicas[name]
            old.alive = False
            if self.rng.random() >= self.faults.silent_deaths:
                self.after(0.02 * self.rng.random(), lambda: self._take(PeerLost(self.now, name)))
            new = Rollout(self, name, epoch=old.epoch + 1, num_slots=old.num_slots)
            self.after(self.rng.uniform(0.1, 3.0), lambda: self._start(new))
        self.after(self.rng.expovariate(1 / self.faults.crash_every_s), self._crash)

"""Host of the controller: what its shell does, in simulated time, through crashes and restarts.

Commands are carried out in order. A command that follows a `Write` waits until the record is durable. A crash loses the
commands that still wait; messages in transit may arrive or not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Down, Envelope, Prompt
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    Command,
    Event,
    Fetch,
    Fetched,
    FinishRun,
    Note,
    Prune,
    Received,
    Send,
    Store,
    Stored,
    Ticked,
    Write,
)
from starling.controller.core.machine import Controller
from starling.controller.core.recovery import restore
from starling.controller.core.replicas.scaling.desired import DesiredReplicas
from starling.controller.core.state import ControllerState, RunPrompts
from starling.sim.checks.autoscaling import AutoscaleChecks
from starling.sim.checks.guarantees import Guarantees
from starling.sim.checks.invariants import Invariants
from starling.sim.checks.recovery import difference
from starling.sim.environment.clock import SimulatedClock
from starling.sim.environment.journal import SimulatedJournal
from starling.sim.environment.network import SimulatedNetwork
from starling.sim.errors import require
from starling.sim.scenario.scenario import Scenario

CONTROLLER: Final = "controller"
TICK_S: Final = 0.25
MAX_FILE_S: Final = 0.05
"""Longest time to read or write the groups of a step."""
MAX_OUTAGE_S: Final = 8.0
COMPACTED_TICKS: Final = 0.1
"""Share of the ticks after which the journal is compacted."""


class Peer(Protocol):
    """A receiver of messages: a replica or an operator."""

    @property
    def alive(self) -> bool:
        """Return whether it still runs."""

    def receive(self, envelope: Envelope, message: Down, frames: list[bytes | memoryview], /) -> None:
        """Handle a message of the controller."""


class PromptStream:
    """An endless stream of prompts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        return Prompt(id=f"{self._name}/{position}", text=f"{self._name} {position}", reference=str(position % 2))


class ControllerHost:
    """The incarnations of the controller, one after the other, and the journal that they share."""

    def __init__(
        self,
        scenario: Scenario,
        clock: SimulatedClock,
        rng: random.Random,
        network: SimulatedNetwork,
        invariants: Invariants,
        guarantees: Guarantees,
        autoscaling: AutoscaleChecks,
        find_peer: Callable[[str], Peer | None],
    ) -> None:
        """`find_peer` returns the newest replica or the operator of a name."""
        self._scenario, self._clock, self._rng, self._network = scenario, clock, rng, network
        self._invariants, self._guarantees, self._find_peer = invariants, guarantees, find_peer
        self._autoscaling = autoscaling
        self.journal = SimulatedJournal(clock, rng, scenario.workload.fsync_s, self._flush)
        self.incarnation = 0
        self.up = False
        self.notes: list[Note] = []
        self.finish: FinishRun | None = None
        self.num_events = 0
        self._held: deque[tuple[int, Command, str]] = deque()
        self._deferred: list[tuple[Event, str]] = []
        self._seq = 0
        self._crashed_at: list[float] = []
        self._compactions = random.Random(f"{scenario.seed} compactions")

    def start(self) -> None:
        """Start the next incarnation of the controller, from the records in the journal."""
        self.incarnation += 1
        self.up = True
        plan, held_out = self._scenario.plan, [PromptStream("held-out").prompt(i) for i in range(3)]
        streams = PromptStream("train"), PromptStream("sft")
        past = self.journal.entries()
        self.controller = Controller(plan, *streams, held_out, journal=past, incarnation=self.incarnation)
        if self.journal.is_compacted:
            whole = ControllerState(plan, RunPrompts(*streams, held_out), self.incarnation)
            restore(whole, self.journal.all_entries())
            found = difference(whole, self.controller.state)
            require(not found, f"the compacted journal restores another state: {found}")
        self._invariants.begin(self.controller.state)
        self._guarantees.begin(self.journal)
        self._autoscaling.begin(self.controller.state.replicas.desired.counts.get("rollout"))
        self._tick(self.incarnation)
        deferred, self._deferred = self._deferred, []
        for event, cause in deferred:
            self._clock.after(0.1 * self._rng.random(), self._handle_deferred, event, cause)

    def desired(self) -> DesiredReplicas | None:
        """Return the desired numbers of replicas, as a snapshot has them; None while there is no controller."""
        return self.controller.state.replicas.desired if self.up and self.finish is None else None

    def members(self) -> set[str]:
        """Return the names of the members, as a snapshot has them."""
        return set(self.controller.state.replicas.membership.members) if self.up else set()

    def crash(self) -> None:
        """Crash, and restart after a random outage."""
        if not self.up or self.finish is not None:
            return
        self.up = False
        self._crashed_at.append(self._clock.now)
        self._held.clear()
        self.journal.crash()
        self._clock.after(MAX_OUTAGE_S * self._rng.random() ** 2, self.start)

    def lose_power(self) -> None:
        """Crash, and lose the messages that the sockets of peers had buffered."""
        self._deferred.clear()
        self.crash()

    def handle(self, event: Event, cause: str = "") -> None:
        """Have the controller handle an event, and check its commands and its state; `cause`: id of the message."""
        if self.finish is not None:
            return
        if not self.up:
            if self._rng.random() < 0.5:  # still buffered by the peer's socket, and delivered after the restart
                self._deferred.append((event, cause))
            return
        self.num_events += 1
        self._invariants.before_event(event)
        commands = self.controller.step(event)
        self._guarantees.on_event(event, commands)
        for command in commands:
            self._execute(command, cause)
        self._invariants.after_event(self._clock.now, commands)

    def _handle_deferred(self, event: Event, cause: str) -> None:
        now = self._clock.now
        if isinstance(event, Received):
            self.handle(Received(now, event.sender, event.incarnation, event.message, event.buffers), cause)

    def _tick(self, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.handle(Ticked(self._clock.now))
            if self._compactions.random() < COMPACTED_TICKS and (record := compact(self.controller.state)) is not None:
                self.journal.compact(record)
            self._clock.after(TICK_S, self._tick, incarnation)

    def _execute(self, command: Command, cause: str) -> None:
        match command:
            case Write(record=record, payload=payload):
                self._guarantees.on_write(record, self.journal.num_records)
                self._autoscaling.on_write(record)
                self.journal.append(record, payload)
            case Note():
                self.notes.append(command)
            case _:
                if isinstance(command, Send):
                    self._guarantees.on_queued(command)
                self._held.append((self.journal.num_records, command, cause))
                self._flush()

    def _flush(self) -> None:
        """Carry out the commands whose records are durable."""
        while self._held and self._held[0][0] <= self.journal.num_durable:
            _, command, cause = self._held.popleft()
            match command:
                case Send():
                    self._send(command, cause)
                case Prune(step=step):
                    self.journal.prune(step)
                case Store(step=step, groups=groups):
                    self._guarantees.on_stored(step, groups)
                    self._clock.after(MAX_FILE_S * self._rng.random(), self._stored, step, self.incarnation)
                case Fetch(step=step):
                    self._clock.after(MAX_FILE_S * self._rng.random(), self._fetched, step, self.incarnation)
                case FinishRun():
                    self.finish = command

    def _fetched(self, step: int, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.handle(Fetched(self._clock.now, step, self.journal.fetch(step)))

    def _stored(self, step: int, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.handle(Stored(self._clock.now, step))

    def _send(self, send: Send, cause: str) -> None:
        self._guarantees.on_sent(send)
        peer = self._find_peer(send.peer)
        if peer is None or not peer.alive:
            return
        self._seq += 1
        envelope = Envelope(
            protocol=PROTOCOL_VERSION,
            run="r",
            sender=CONTROLLER,
            incarnation=self.incarnation,
            seq=self._seq,
            cause=cause,
        )
        frames = codec.pack(envelope, send.message, send.buffers)
        self._network.send(send.peer, False, self._arrive, self.incarnation, peer.receive, send.peer, frames)

    def _arrive(
        self,
        incarnation: int,
        receive: Callable[[Envelope, Down, list[bytes | memoryview]], None],
        peer: str,
        frames: list[bytes | memoryview],
    ) -> None:
        """Deliver a message, unless the crash of its sender lost it: each connection breaks at a time of its own."""
        if incarnation != self.incarnation or not self.up:
            cut = random.Random(f"{self._scenario.seed} {peer} {incarnation}").uniform(0.0, 0.02)
            if self._clock.now > self._crashed_at[incarnation - 1] + cut:
                return
        receive(codec.unpack_envelope(frames), codec.unpack_down(frames), frames)

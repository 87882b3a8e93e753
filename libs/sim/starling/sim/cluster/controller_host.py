"""Where the controller lives: what its shell does, on simulated time, through its crashes and restarts.

Commands are carried out in order. Whatever comes after a `Write` waits until that record is durable; a crash loses
what still waits, and the messages that are under way may arrive or not.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from starling.common.wire import codec
from starling.common.wire.messages import PROTOCOL_VERSION, Down, Envelope, Prompt
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
from starling.sim.environment.journal import SimulatedJournal

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

CONTROLLER: Final = "controller"
TICK_S: Final = 0.25
FETCH_S: Final = 0.05
LONGEST_OUTAGE_S: Final = 8.0


class Stream:
    """An endless supply of prompts."""

    def __init__(self, name: str) -> None:
        self._name = name

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at `position`."""
        return Prompt(id=f"{self._name}/{position}", text=f"{self._name} {position}", reference=str(position % 2))


class ControllerHost:
    """One controller after another, and the journal that they share."""

    def __init__(self, world: SimulatedCluster) -> None:
        self._world, self._clock, self._rng = world, world.clock, world.rng
        self.journal = SimulatedJournal(world.clock, world.rng, world.scenario.work.fsync_s, self._flush)
        self.incarnation = 0
        self.up = False
        self.notes: list[Note] = []
        self.finish: FinishRun | None = None
        self.num_events = 0
        self._waiting: deque[tuple[int, Command, str]] = deque()
        self._deferred: list[tuple[Event, str]] = []
        self._seq = 0
        self._crashed_at: list[float] = []

    def start(self) -> None:
        """Begin, or begin again with what the journal kept."""
        self.incarnation += 1
        self.up = True
        plan, held_out = self._world.scenario.plan, [Stream("held-out").prompt(i) for i in range(3)]
        streams = Stream("train"), Stream("sft")
        past = self.journal.past()
        self.controller = Controller(plan, *streams, held_out, past=past, incarnation=self.incarnation)
        self._world.invariants.begin(self.controller.state)
        self._world.promises.begin(self.journal)
        self._tick(self.incarnation)
        deferred, self._deferred = self._deferred, []
        for late in deferred:
            self._clock.after(0.1 * self._rng.random(), self._come_late, *late)

    def crash(self) -> None:
        """Die, and be started again after a while."""
        if not self.up or self.finish is not None:
            return
        self.up = False
        self._crashed_at.append(self._clock.now)
        self._waiting.clear()
        self.journal.crash()
        self._clock.after(LONGEST_OUTAGE_S * self._rng.random() ** 2, self.start)

    def take(self, event: Event, cause: str = "") -> None:
        """Let the controller decide, and look at what it decided; `cause`: the id of the message that came."""
        if self.finish is not None:
            return
        if not self.up:
            if self._rng.random() < 0.5:  # what its peers' sockets still hold comes when the line is up again
                self._deferred.append((event, cause))
            return
        self.num_events += 1
        self._world.invariants.before_event(event)
        commands = self.controller.step(event)
        self._world.promises.decided(event, commands)
        for command in commands:
            self._do(command, cause)
        self._world.invariants.after_event(self._clock.now, commands)

    def _come_late(self, event: Event, cause: str) -> None:
        now = self._clock.now
        if isinstance(event, Received):
            self.take(Received(now, event.sender, event.epoch, event.message, event.buffers), cause)

    def _tick(self, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.take(Ticked(self._clock.now))
            self._clock.after(TICK_S, self._tick, incarnation)

    def _do(self, command: Command, cause: str) -> None:
        match command:
            case Write(record=record, payload=payload):
                self._world.promises.written(record, self.journal.num_records)
                self.journal.append(record, payload)
            case Note():
                self.notes.append(command)
            case _:
                if isinstance(command, Send):
                    self._world.promises.asked(command)
                self._waiting.append((self.journal.num_records, command, cause))
                self._flush()

    def _flush(self) -> None:
        """Carry out what waits for nothing any more."""
        while self._waiting and self._waiting[0][0] <= self.journal.num_durable:
            _, command, cause = self._waiting.popleft()
            match command:
                case Send():
                    self._send(command, cause)
                case Prune(step=step):
                    self.journal.prune(step)
                case Store(step=step, groups=groups):
                    self._world.promises.stored(step, groups)
                    self._clock.after(FETCH_S * self._rng.random(), self._stored, step, self.incarnation)
                case Fetch(step=step):
                    self._clock.after(FETCH_S * self._rng.random(), self._fetched, step, self.incarnation)
                case FinishRun():
                    self.finish = command

    def _fetched(self, step: int, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.take(Fetched(self._clock.now, step, self.journal.fetch(step)))

    def _stored(self, step: int, incarnation: int) -> None:
        if self.up and incarnation == self.incarnation:
            self.take(Stored(self._clock.now, step))

    def _send(self, send: Send, cause: str) -> None:
        self._world.promises.sent(send)
        replica = self._world.peer(send.peer)
        if replica is None or not replica.alive:
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
        self._world.network.carry(send.peer, False, self._arrive, self.incarnation, replica.hear, send.peer, frames)

    def _arrive(
        self,
        incarnation: int,
        hear: Callable[[Envelope, Down, list[bytes | memoryview]], None],
        peer: str,
        frames: list[bytes | memoryview],
    ) -> None:
        """Deliver a message, unless it was lost with the controller that said it: each line breaks off somewhere."""
        if incarnation != self.incarnation or not self.up:
            cut = random.Random(f"{self._world.scenario.seed} {peer} {incarnation}").uniform(0.0, 0.02)
            if self._clock.now > self._crashed_at[incarnation - 1] + cut:
                return
        hear(codec.unpack_envelope(frames), codec.unpack_down(frames), frames)

"""Scenario harness: the controller's core, its journal on disk, and scripted replicas.

The controller may crash after any event: with all its commands carried out, with only its records written, or with
neither. It then recovers from the journal, through the code by which a real one resumes a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transcript import SMALL, Script, Stream
from wording import command_line, record_text

from starling.common.wire import messages as wire
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    CheckpointRead,
    Event,
    Fetch,
    Fetched,
    FinishRun,
    Prune,
    Received,
    Send,
    Store,
    Stored,
    Write,
)
from starling.controller.core.machine import Controller
from starling.controller.core.records import ControllerStarted
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import start_incarnation

LostCommands = Literal["", "unsaid", "unwritten"]


@dataclass
class Replica:
    """State of a scripted replica."""

    name: str
    options: dict[str, str]
    """Options of its last hello."""
    incarnation: int = 1
    version: int = -1
    held: dict[str, wire.LeasedCommand] = field(default_factory=dict)
    """Its commands by lease, until they are released."""
    buffers: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    """Those of the commands, by lease."""
    is_up: bool = True


class Harness(Script):
    """A `Script` whose controller can crash and recover from its journal."""

    def __init__(self, folder: Path, num_held_out: int, *, compacts: bool = False, **changes: Any) -> None:
        """`changes` override fields of the plan in `transcript`; the journal is written to `folder`.

        `compacts`: the journal is compacted before every event, which must not change anything.
        """
        super().__init__(SMALL, num_held_out, **changes)
        self.file = folder / "journal.sqlite"
        self.replicas: dict[str, Replica] = {}
        self.newest_leases: dict[tuple[str, str], str] = {}
        """Newest lease of each replica by kind and subject: ``("rollout-0", "generate:t0")``."""
        self.fetched_step = -1
        """Step of the last `Fetch`."""
        self.stored_steps: list[int] = []
        """Steps whose groups were stored in files, in the order of their `Store` commands."""
        self.ended = False
        self.compacts = compacts
        self.restart_controller()

    def restart_controller(self) -> list[str]:
        """Start the controller from the journal."""
        self.store = Journal(self.file)
        number = start_incarnation(self.store, "scenario", self.plan)
        past = list(self.store.read())
        self.controller = Controller(
            self.plan, Stream("train"), Stream("sft"), self.held_out, journal=past, incarnation=number
        )
        self.state = self.controller.state
        self.commands = []
        return [f"journal <- {record_text(ControllerStarted(incarnation=number))}"]

    def crash(self, lost: LostCommands = "") -> list[str]:
        """Crash and restart the controller; the `lost` ones of its last commands are never carried out."""
        self.carry_out(lost)
        self.store.close()
        return self.restart_controller()

    def receive(self, sender: str, message: wire.Up, *buffers: bytes, incarnation: int = 0) -> list[str]:
        """Deliver `message` from the present incarnation of `sender`."""
        replica = self.replicas.get(sender)
        return super().receive(
            sender, message, *buffers, incarnation=incarnation or (replica.incarnation if replica else 1)
        )

    def answer_fetch(self) -> list[str]:
        """Let the journal answer the last `Fetch`."""
        self.carry_out()
        return self._step(Fetched(self.now, self.fetched_step, self.store.fetch(self.fetched_step)))

    def report_stored(self) -> list[str]:
        """Report that the file of the last `Store` is on disk."""
        self.carry_out()
        return self._step(Stored(self.now, self.stored_steps[-1]))

    def read_checkpoint(self, digest: str) -> list[str]:
        """Report that the controller has read the model's folder."""
        return self._step(CheckpointRead(self.now, digest))

    def _step(self, event: Event) -> list[str]:
        self.carry_out()
        if self.compacts and (record := compact(self.state)) is not None:
            self.store.compact(record)
        self.commands = self.controller.step(event)
        self.ended = self.ended or any(isinstance(command, FinishRun) for command in self.commands)
        is_heartbeat = isinstance(event, Received) and isinstance(event.message, wire.Heartbeat)
        shown = [
            command_line(command, self.aliases, self.plan.sampling)
            for command in self.commands
            if not (is_heartbeat and isinstance(command, Send) and isinstance(command.message, wire.Welcome))
        ]
        return [text for text in shown if text is not None]

    def carry_out(self, lost: LostCommands = "") -> None:
        """Carry out the last commands, except those that a crash prevents.

        Commands before the first record are carried out at once; later ones wait for the records.
        """
        commands, self.commands = self.commands, []
        first = next((index for index, command in enumerate(commands) if isinstance(command, Write)), len(commands))
        done = commands[:first] if lost else commands
        for command in commands if lost != "unwritten" else []:
            if isinstance(command, Write):
                self.store.append(command.record, command.payload)
            elif isinstance(command, Prune):
                self.store.prune(command.step)
        self.store.commit()
        for command in done:
            if isinstance(command, Send):
                self._deliver(command)
            elif isinstance(command, Store):
                self.stored_steps.append(command.step)
            elif isinstance(command, Fetch):
                self.fetched_step = command.step

    def _deliver(self, send: Send) -> None:
        replica = self.replicas.get(send.peer)
        if replica is None or not replica.is_up:
            return
        if isinstance(send.message, wire.LeasedCommand):
            lease = send.message.lease
            replica.held[lease], replica.buffers[lease] = send.message, send.buffers
            self.newest_leases[send.peer, lease.rpartition(":")[0]] = lease
        elif isinstance(send.message, wire.ReleaseLeases):
            for lease in send.message.leases:
                replica.held.pop(lease, None)

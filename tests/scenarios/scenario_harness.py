"""Scenario harness: the controller's core, its journal on disk, and scripted replicas.

The controller may crash after any event: with all its commands carried out, with only its records written, or with
neither. It then recovers from the journal, through the code by which a real one resumes a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transcript import SMALL, Script, Stream
from wording import noted, wording

from starling.common.wire import messages as wire
from starling.controller.core.events import (
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

Undone = Literal["", "unsaid", "unwritten"]


@dataclass
class Replica:
    """The state of one replica."""

    name: str
    options: dict[str, str]
    """The options of its last hello."""
    epoch: int = 1
    version: int = -1
    held: dict[str, wire.LeasedCommand] = field(default_factory=dict)
    """Its leases, until they are released."""
    is_up: bool = True


class Harness(Script):
    """A script whose controller can crash."""

    def __init__(self, folder: Path, num_held_out: int, **changes: Any) -> None:
        """`changes` are those of the plan of `transcript`; the journal lies in `folder`."""
        super().__init__(SMALL, num_held_out, **changes)
        self.file = folder / "journal.sqlite"
        self.replicas: dict[str, Replica] = {}
        self.given: dict[tuple[str, str], str] = {}
        """The newest lease of each replica by kind and subject: ``("rollout-0", "generate:t0")``."""
        self.wanted = -1
        """The step that was to be fetched from the journal last."""
        self.written: list[int] = []
        """The steps whose groups are in files, in the order in which they were written."""
        self.ended = False
        self.restart_controller()

    def restart_controller(self) -> list[str]:
        """Start the controller from the journal."""
        self.store = Journal(self.file)
        begun = start_incarnation(self.store, "scenario", self.plan)
        self.controller = Controller(
            self.plan, Stream("train"), Stream("sft"), self.held_out, journal=begun.entries, incarnation=begun.number
        )
        self.state = self.controller.state
        self.commands = []
        return [f"journal <- {noted(ControllerStarted(incarnation=begun.number))}"]

    def crashes(self, undone: Undone = "") -> list[str]:
        """The controller crashes and restarts; the `undone` ones of its last commands are never carried out."""
        self.arrive(undone)
        self.store.close()
        return self.restart_controller()

    def hears(self, sender: str, message: wire.Up, *buffers: bytes, epoch: int = 0) -> list[str]:
        """`sender` sends `message`, under its present incarnation."""
        replica = self.replicas.get(sender)
        return super().hears(sender, message, *buffers, epoch=epoch or (replica.epoch if replica else 1))

    def answers(self) -> list[str]:
        """The journal answers the last `Fetch`."""
        self.arrive()
        return self._step(Fetched(self.now, self.wanted, self.store.fetch(self.wanted)))

    def stored(self) -> list[str]:
        """The file that was to be written last is on disk."""
        self.arrive()
        return self._step(Stored(self.now, self.written[-1]))

    def _step(self, event: Event) -> list[str]:
        self.arrive()
        self.commands = self.controller.step(event)
        self.ended = self.ended or any(isinstance(command, FinishRun) for command in self.commands)
        beats = isinstance(event, Received) and isinstance(event.message, wire.Heartbeat)
        shown = [
            wording(command, self.aliases, self.plan.sampling)
            for command in self.commands
            if not (beats and isinstance(command, Send) and isinstance(command.message, wire.Welcome))
        ]
        return [text for text in shown if text is not None]

    def arrive(self, undone: Undone = "") -> None:
        """Carry out the last commands, except those that a crash prevents.

        Commands before the first record are carried out at once; later ones wait for the records.
        """
        commands, self.commands = self.commands, []
        first = next((index for index, command in enumerate(commands) if isinstance(command, Write)), len(commands))
        done = commands[:first] if undone else commands
        for command in commands if undone != "unwritten" else []:
            if isinstance(command, Write):
                self.store.append(command.record, command.payload)
            elif isinstance(command, Prune):
                self.store.prune(command.step)
        self.store.commit()
        for command in done:
            if isinstance(command, Send):
                self._arrives(command)
            elif isinstance(command, Store):
                self.written.append(command.step)
            elif isinstance(command, Fetch):
                self.wanted = command.step

    def _arrives(self, send: Send) -> None:
        replica = self.replicas.get(send.peer)
        if replica is None or not replica.is_up:
            return
        if isinstance(send.message, wire.LeasedCommand):
            lease = send.message.lease
            replica.held[lease] = send.message
            self.given[send.peer, lease.rpartition(":")[0]] = lease
        elif isinstance(send.message, wire.ReleaseLeases):
            for lease in send.message.leases:
                replica.held.pop(lease, None)

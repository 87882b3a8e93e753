"""The controller process: a ROUTER, a clock, a journal, and files around the core."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from starling.common.errors import StarlingError
from starling.common.net.curve import load_allowed
from starling.common.net.hub import Hub, HubKeys, ReceivedMessage
from starling.common.observe.process import StopSignal, collect_seldom, end_process
from starling.common.service import ServiceArguments, serve
from starling.common.wire.messages import ReleaseLeases
from starling.controller.core.events import (
    Command,
    Event,
    Fetch,
    Fetched,
    FinishRun,
    Note,
    Received,
    ReplicaDisconnected,
    Send,
    StopRequested,
    Store,
    Stored,
    Ticked,
)
from starling.controller.core.machine import Controller
from starling.controller.data.load import RunData, load_data
from starling.controller.settings import ControllerProcess
from starling.controller.shell.journal.commit_queue import CommitQueue
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.journal.resume import JOURNAL, check_prompts, lost_lines, start_incarnation
from starling.controller.shell.loggers.fanout import LoggerFanout
from starling.controller.shell.loggers.fanout import makers as logger_makers
from starling.controller.shell.loggers.logger import RunInfo
from starling.controller.shell.outputs.append_file import AppendFile
from starling.controller.shell.outputs.samples import Samples
from starling.controller.shell.outputs.timelines import Timelines
from starling.controller.shell.outputs.trajectory_writer import TrajectoryFiles, TrajectoryWriter
from starling.controller.shell.recording.recorder import Recorder, RecordingPrompts
from starling.controller.shell.status import MetricsHistory, snapshot
from starling.controller.shell.ticks import TickSchedule

log = structlog.get_logger(__name__)

METRICS = "metrics.jsonl"
MAX_TOGETHER = 256
"""Events whose records one transaction may hold, and after which the clock is looked at."""
QUIET_NOTES = frozenset({"step", "trained", "answered", "published", "adopted", "offered", "state", "filtered"})
"""Notes that come with every step: recorded, and shown on the screen, but not logged."""


class RunFailedError(StarlingError):
    """The run ended without having done what it was to do."""


class Shell:
    """Turns frames and time into events, and commands into frames, records and lines of files."""

    def __init__(self, settings: ControllerProcess, arguments: ServiceArguments) -> None:
        """Read the journal and bind, so that replicas can connect while the data loads.

        Raises ConfigError when the run cannot be begun, or not taken up, in this folder.
        """
        network = settings.network
        self._settings, self._folder = settings, arguments.folder
        makers = logger_makers(settings.logging.loggers, run_info(settings, arguments.folder))
        self._plan = settings.plan()
        self._journal = Journal(self._folder / JOURNAL)
        try:
            self._past = start_incarnation(self._journal, settings.run.id, self._plan)
            key = arguments.key_file(network.curve)
            folder = arguments.folder / "keys"
            keys = HubKeys(key, load_allowed(folder), folder) if key is not None else None
            bind = f"tcp://{network.host}:{network.port}"
            self.hub = Hub(bind, settings.run.id, self._past.incarnation, keys)
        except BaseException:  # whatever it is: the next controller must find the journal unlocked
            self._journal.close()
            raise
        self._history = MetricsHistory(time.monotonic())
        self._metrics = AppendFile(self._folder / METRICS)
        told = self._history.read(self._folder / METRICS)
        for line in lost_lines(self._past.records, told):
            self._metrics.write(json.dumps({"time": round(time.time(), 4), **line}))
        self._samples = Samples(self._folder, settings.logging.samples_mb << 20)
        self._loggers = LoggerFanout(makers, settings.logging, self._folder, self._past.records)
        self._timelines = Timelines(self._folder)
        self._finish: FinishRun | None = None
        patience_s = settings.controller.journal_s
        self._durable = CommitQueue(self._journal, self._do, patience_s=patience_s, stalled=self._stalled)
        self._writing = TrajectoryWriter(TrajectoryFiles(self._folder, settings.run.id), self.hub.wake)
        self._loaded: RunData | None = None
        self._done: list[Fetched | Stored] = []
        """What was read and written for the core, which has not heard of it yet."""
        self._controller: Controller | None = None
        self._recorder: Recorder | None = None

    def run(self, stop: StopSignal) -> None:
        """Serve until the run is over. Raises RunFailedError if it failed."""
        self._durable.flush()  # that another incarnation has begun
        write_atomically(
            self._folder / "controller.json",
            json.dumps({"address": self.hub.address, "telemetry": self.hub.telemetry_address}),
        )
        try:
            self._controller = self._make_controller()
            self._serve(self._controller, stop)
        finally:
            self.hub.close()
            self._writing.close()
            self._journal.close()
            for lost in self._loggers.close():
                self._write_line("logger", lost)
            self._samples.close()
            self._metrics.close()
            if self._recorder is not None:
                self._recorder.close()
        self._timelines.write()
        assert self._finish is not None
        if not self._finish.ok:
            raise RunFailedError(self._finish.reason)

    def _make_controller(self) -> Controller:
        past = self._past
        self._loaded = loaded = load_data(self._settings)
        self._plan = loaded.plan
        check_prompts(past.records, loaded.plan)
        self._recorder = Recorder(
            self._folder / f"events-{past.incarnation}.rec",
            run=self._settings.run.id,
            incarnation=past.incarnation,
            plan=self._plan,
            past=past.records,
            held_out=loaded.held_out,
            cap_bytes=self._settings.controller.recording_mb << 20,
        )
        controller = Controller(
            self._plan,
            RecordingPrompts(loaded.prompts, "prompts", self._recorder),
            RecordingPrompts(loaded.examples, "examples", self._recorder),
            loaded.held_out,
            past=past.records,
            incarnation=past.incarnation,
        )
        if past.records:
            log.info("taken_up", incarnation=past.incarnation, version=controller.state.version)
        past.records.clear()  # what counts of it is in the core now
        return controller

    def _serve(self, controller: Controller, stop: StopSignal) -> None:
        ticks, told = TickSchedule(time.monotonic()), False
        while self._finish is None:
            num = self._hear(controller, ticks.left_s(time.monotonic()))
            if stop and not told:
                told = True
                self._take(controller, StopRequested(time.monotonic(), f"stopped by {stop.name}"), "signal")
            if ticks.is_due(time.monotonic(), has_more=num >= MAX_TOGETHER):
                self._take(controller, Ticked(time.monotonic()), "tick")
                self._show(controller)
                self._metrics.flush()
                self._samples.flush()
                self._loggers.look()
            self._settle(controller)
        self._show(controller)

    def _hear(self, controller: Controller, timeout_s: float) -> int:
        """Take in what has come, with one transaction for all that has come by its end. Returns how much it was."""
        num = 0
        while num < MAX_TOGETHER and self._finish is None:
            happened = self.hub.poll(timeout_s)
            for one in happened:
                now = time.monotonic()
                if isinstance(one, ReceivedMessage):
                    envelope = one.envelope
                    cause = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
                    event = Received(now, envelope.sender, envelope.incarnation, one.message, one.buffers)
                    self._take(controller, event, cause)
                else:
                    self._take(controller, ReplicaDisconnected(now, one.name), "lost")
            num += len(happened)
            if not happened or not self._durable.is_pending:
                break
            timeout_s = 0.0
        return num

    def _settle(self, controller: Controller) -> None:
        """Make durable what was decided, say what follows, and hand over what was read and written meanwhile."""
        self._durable.flush()
        self._done += [Stored(time.monotonic(), step) for step in self._writing.written()]
        while self._done:
            self._take(controller, self._done.pop(0), "files")
            self._durable.flush()

    def _take(self, controller: Controller, event: Event, cause: str) -> None:
        assert self._recorder is not None, "it is made before the controller"
        self._recorder.event(event)
        try:
            commands = controller.step(event)
        except Exception:  # raised again: what led to it has to be on disk, for it is the crash report
            self._recorder.flush()
            log.error("crash", recording=str(self._recorder.path), at=type(event).__name__, cause=cause)
            raise
        for command in commands:
            self._durable.take(command, cause)

    def _do(self, command: Command, cause: str) -> None:
        match command:
            case Send(peer=peer, message=ReleaseLeases(leases=leases)):
                self.hub.release(peer, leases)
            case Send(peer=peer, message=message, buffers=buffers):
                self.hub.send(peer, message, cause=cause, buffers=buffers)
            case Note(kind="samples" as kind, fields=fields):
                self._samples.write(fields["step"], fields["rows"])
                self._loggers.note(kind, fields)
            case Note(kind=kind, fields=fields):
                self._history.note(kind, fields)
                self._timelines.note(self._write_line(kind, fields))
                self._loggers.note(kind, fields)
                if kind not in QUIET_NOTES:
                    (log.warning if kind == "alarm" else log.info)(kind, **fields)
            case Fetch(step=step):
                assert self._loaded is not None, "it is there before the core"
                files = self._loaded.trajectories
                records = self._journal.fetch(step) if files is None else files.records(step)
                self._done.append(Fetched(time.monotonic(), step, records))
            case Store(step=step, groups=groups):
                self._writing.begin(step, groups)
            case FinishRun():
                self._finish = command
                log.info("finished", ok=command.ok, reason=command.reason)

    def _write_line(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Add a line to metrics.jsonl, and return it."""
        line = {"time": round(time.time(), 4), "kind": kind, **fields}
        self._metrics.write(json.dumps(line))
        return line

    def _stalled(self, left_s: float) -> None:
        """The disk of the journal is full: say so to whoever looks, since nothing else can be said."""
        if self._controller is None:
            return
        view = snapshot(self._controller.state, self._history, time.monotonic(), self.hub.dropped.total())
        waiting_for = f"room on the disk of the journal, for {left_s:.0f} s at most"
        self.hub.publish(msgspec.msgpack.encode(msgspec.structs.replace(view, waiting_for=waiting_for)))

    def _show(self, controller: Controller) -> None:
        view = snapshot(controller.state, self._history, time.monotonic(), self.hub.dropped.total())
        self.hub.publish(msgspec.msgpack.encode(view))


def run_info(settings: ControllerProcess, folder: Path) -> RunInfo:
    """Return what loggers know of the run."""
    return RunInfo(
        id=settings.run.id,
        name=settings.run.name,
        folder=folder,
        project=settings.logging.project,
        offline=settings.logging.offline,
        settings=settings.model_dump(mode="json"),
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller."""
    collect_seldom()
    return serve("controller", ControllerProcess, Shell, argv)


if __name__ == "__main__":
    end_process(main())

"""The controller process: ZeroMQ, the clock, the journal and the run's files around the pure core."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from starling.common.errors import ConfigError, RestartError, StarlingError, StoppedError, WireError
from starling.common.files import CONTROLLER_FILES, check_own, write_whole
from starling.common.net.curve import load_allowed
from starling.common.net.hub.hub import Hub, HubKeys, ReceivedMessage
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import StopSignal, collect_seldom, end_process
from starling.common.observe.profiling.profiler import Profiler
from starling.common.observe.terminal import one_line
from starling.common.observe.tracing.traces import open_traces
from starling.common.secret_settings import without_secrets
from starling.common.service import ServiceArguments, serve
from starling.common.wire.messages import Hello, ProfileReport, ReleaseLeases
from starling.common.wire.telemetry import RunSnapshot
from starling.controller.core.compaction import compact
from starling.controller.core.events import (
    CheckpointRead,
    Command,
    Event,
    Fetch,
    Fetched,
    FinishRun,
    Note,
    NotSent,
    Profiled,
    ProfileSelf,
    Received,
    ReplicaDisconnected,
    Send,
    StopRequested,
    Store,
    Stored,
    Ticked,
)
from starling.controller.core.groups.arrival import received
from starling.controller.core.groups.validation.recording import truncation_notice
from starling.controller.core.lifecycle.stages import Lifecycle
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import MetricsSummary, StateCompacted, StepCommitted
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.data.load import RunData, load_data
from starling.controller.data.trajectories import Trajectories
from starling.controller.settings import ControllerProcess
from starling.controller.shell.checkpoint import CheckpointReader, read_checkpoint
from starling.controller.shell.clocks import ReplicaClocks, skew_text
from starling.controller.shell.journal.commit_queue import CommitQueue
from starling.controller.shell.journal.journal import Journal, JournalFullError, StateTooLargeError
from starling.controller.shell.journal.resume import (
    JOURNAL,
    check_data,
    check_journal_is_whole,
    check_num_prompts,
    compact_long,
    missing_lines,
    start_incarnation,
)
from starling.controller.shell.loggers.fanout import LoggerFanout, PastSteps
from starling.controller.shell.loggers.fanout import makers as logger_makers
from starling.controller.shell.loggers.logger import RunInfo
from starling.controller.shell.notice_lines import NoticeLines
from starling.controller.shell.outputs.append_file import AppendFile, full_disk_text
from starling.controller.shell.outputs.samples import Samples
from starling.controller.shell.outputs.timelines import Timelines
from starling.controller.shell.outputs.trajectory_writer import TrajectoryFiles, TrajectoryWriter
from starling.controller.shell.recording.recorder import (
    Recorder,
    RecordingPrompts,
    recording_path,
    remove_old_recordings,
)
from starling.controller.shell.role_settings import RoleSettingsSource
from starling.controller.shell.run_traces import RunTraces
from starling.controller.shell.status import MetricsHistory, snapshot
from starling.controller.shell.ticks import TickSchedule

if TYPE_CHECKING:
    from starling.common.observe.metrics import Family
    from starling.common.observe.metrics import Samples as MetricSamples
    from starling.controller.shell.metrics.run_metrics import RunMetrics

log = structlog.get_logger(__name__)

METRICS = "metrics.jsonl"
OUTCOME = "outcome.json"
"""How the run has ended, from then until a controller is started again."""
CLOSE_S: Final = 60.0
"""How long it may take to close the loggers and files, at most about the default of `logging.close_s`, twice."""
MAX_BATCH = 256
"""Maximum number of messages that are handled between two commits and two looks at the clock."""
MAX_CLOCKS: Final = 8
"""Wrong clocks in a snapshot."""
QUIET_NOTES = frozenset(
    {"step", "trained", "step_repeated", "answered", "published", "adopted", "offered", "state", "filtered"}
)
"""Kinds of notes that come with every step. They go to metrics.jsonl and to the screen, not to the log."""


class RunFailedError(StarlingError):
    """The run ended before its goal."""


class Shell:
    """Converts messages and time to events, and commands to messages, journal records and lines of files."""

    def __init__(self, settings: ControllerProcess, arguments: ServiceArguments) -> None:
        """Read the journal and bind the socket, so that replicas can connect while the data loads.

        Raises ConfigError when the run cannot be started or resumed in this folder.
        """
        self._settings, self._folder = settings, arguments.folder
        if not self._folder.is_dir():
            raise ConfigError(f"--dir {self._folder} is not a folder: create it, or give the folder of a run")
        check_own(self._folder, CONTROLLER_FILES)
        makers = logger_makers(settings.logging.loggers, run_info(settings, arguments.folder))
        self._plan = settings.plan()
        _check_teachers(self._plan)
        self._journal = Journal(self._folder / JOURNAL, network_disk=settings.controller.network_disk)
        try:
            self._incarnation = start_incarnation(self._journal, settings.run.id, self._plan)
            self._history = MetricsHistory(time.monotonic())
            written = self._read_history()
            self.hub = self._open_hub(arguments)
        except BaseException:  # also when interrupted: the next controller must find the journal unlocked
            self._journal.close()
            raise
        self._metrics = AppendFile(self._folder / METRICS)
        self._samples = Samples(self._folder, settings.logging.samples_mb << 20)
        past = self._write_missing_lines(written)
        with _as_restart_error(self._folder):
            self._loggers = LoggerFanout(makers, settings.logging, self._folder, past)
        self._timelines = Timelines(self._folder)
        self._clocks = ReplicaClocks()
        self._notice_lines = NoticeLines()
        self._message_bytes: dict[str, int] = {}
        """Most bytes of a message with a group so far, by role."""
        self._finish: FinishRun | None = None
        self._commands = CommitQueue(
            self._journal,
            self._execute,
            full_timeout_s=settings.controller.journal_s,
            on_full=self._show_full_disk,
        )
        files = TrajectoryFiles(self._folder, settings.run.id)
        files.recover()
        self._trajectories = TrajectoryWriter(files, self.hub.wake)
        self._data: RunData | None = None
        traces = open_traces(settings.observe.traces, settings.run.id, "controller", "controller")
        self._traces = RunTraces(traces) if traces is not None else None
        self._profiler = Profiler("controller", self._folder, self._profiled, has_tensors=False, counts="")
        self._later_events: list[Fetched | Stored | CheckpointRead | NotSent | Profiled] = []
        """Steps that were read or written, the checkpoint, and messages that were not sent, that the core does not know
        of yet."""
        self._checkpoint: CheckpointReader | None = None
        self._controller: Controller | None = None
        self._recorder: Recorder | None = None
        self._notify = NotifySocket()
        self._run_metrics: RunMetrics | None = None
        """Of the HTTP endpoint; None without one."""
        # A metrics.jsonl that was cut is not as long as the summary says: the next one is made at once.
        self._compact_at = settings.controller.compact_records if past.size_bytes >= past.summed_up else 1
        """Records in the journal at which it is compacted."""

    def _compacted(self) -> StateCompacted | None:
        """Return the state that has replaced older records of the journal; None if none has."""
        return next((one for one in self._journal.records() if isinstance(one, StateCompacted)), None)

    def _read_history(self) -> set[tuple[str, int]]:
        """Read metrics.jsonl, and return which lines it has. Raises ConfigError if the journal has lost its end."""
        compacted = self._compacted()
        summary = compacted.metrics if compacted is not None else None
        written = self._history.read(self._folder / METRICS, summary)
        check_journal_is_whole(self._journal.path, self._journal.records(), written)
        return written

    def _open_hub(self, arguments: ServiceArguments) -> Hub:
        """Bind the socket for replicas and operators. Raises ConfigError."""
        network = self._settings.network
        key = arguments.key_file(network.curve)
        folder = arguments.folder / "keys"
        keys = HubKeys(key, load_allowed(folder), folder) if key is not None else None
        hub = Hub(f"tcp://{network.host}:{network.port}", self._settings.run.id, self._incarnation, keys)
        hub.settings_source = RoleSettingsSource(arguments.configs, self._settings).answer
        return hub

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the run is over. Raises RunFailedError if it failed."""
        self._notify = notify
        if notify.page is not None:
            self._run_metrics = self._make_metrics()
        self._commands.flush()  # the record of this incarnation
        with _as_restart_error(self._folder):
            (self._folder / OUTCOME).unlink(missing_ok=True)
            write_whole(
                self._folder / "controller.json",
                json.dumps({"address": self.hub.address, "telemetry": self.hub.telemetry_address}),
            )
        self._checkpoint = read_checkpoint(self._settings, self.hub.wake)
        try:
            self._controller = self._load_controller()
            self._serve(self._controller, stop)
        finally:
            notify.stopping("ends", CLOSE_S)
            self.hub.close()
            self._trajectories.close()
            self._journal.close()
            for losses in self._loggers.close():
                self._write_line("logger", losses)
            self._samples.close()
            self._metrics.close()
            if self._traces is not None:
                self._traces.close()
            if self._recorder is not None:
                self._recorder.close()
        self._timelines.write()
        assert self._finish is not None
        lifecycle = self._controller.state.lifecycle
        self._write_outcome(lifecycle)
        if notify.page is not None:
            notify.page.finish(self._run_samples(self._controller, self._snapshot(self._controller)))
        reason = one_line(self._finish.reason)
        if not self._finish.ok:
            raise RunFailedError(reason)
        code = self._settings.controller.stopped_exit_code
        if code and stop and lifecycle.stopping == _stopped_by(stop):
            raise StoppedError(f"the run was {reason}, and can be resumed", code)

    def _write_outcome(self, lifecycle: Lifecycle) -> None:
        """Write how the run has ended, for scripts: best effort, as the disk may be full."""
        assert self._controller is not None, "the run has been"
        fields = {
            "outcome": lifecycle.outcome,
            "reason": lifecycle.reason,
            "version": self._controller.state.version,
            "time": round(time.time(), 4),
        }
        with suppress(OSError):
            write_whole(self._folder / OUTCOME, json.dumps(fields))

    def _make_metrics(self) -> RunMetrics:
        """Return the metrics of the HTTP endpoint."""
        # Imported here: a controller without an endpoint does not load it.
        from starling.controller.shell.metrics.run_metrics import RunMetrics

        evaluation = self._history.evaluations[-1] if self._history.evaluations else {}
        metrics = RunMetrics(self._folder / JOURNAL, self._history.step, evaluation, self._incarnation)
        self._commands.on_commit = metrics.note_lag
        return metrics

    def _write_missing_lines(self, written: set[tuple[str, int]]) -> PastSteps:
        """Bring metrics.jsonl, which has the lines `written`, up to date with the journal. Returns the steps in it."""
        compacted = self._compacted()
        for kind, fields in missing_lines(self._journal.records(), written):
            self._history.note(kind, fields)
            self._write_line(kind, fields)
        steps = (one.step for one in self._journal.records() if isinstance(one, StepCommitted))
        version = compacted.version if compacted is not None else 0
        summary = compacted.metrics if compacted is not None else None
        path = self._folder / METRICS
        size_bytes = path.stat().st_size if path.exists() else 0
        summed_up = summary.size_bytes if summary is not None else 0
        return PastSteps(path, size_bytes, max(steps, default=version), summed_up, version)

    def _load_controller(self) -> Controller:
        self._data = data = load_data(self._settings)
        self._plan = replace(data.plan, reads_checkpoint=self._checkpoint is not None)
        read = check_data(self._journal.records(), data, accept=self._settings.controller.accept_changed_data)
        if read is not None:
            self._journal.append(read)
            self._commands.flush()
        metrics = self._metrics_summary()
        if metrics is not None and self._journal.num_uncompacted >= self._compact_at:
            prompts = RunPrompts(data.prompts, data.examples, data.held_out)
            compact_long(self._journal, ControllerState(self._plan, prompts, self._incarnation), data.read, metrics)
        entries = list(self._journal.read())
        remove_old_recordings(self._folder, self._incarnation)
        self._recorder = Recorder(
            recording_path(self._folder, self._incarnation),
            run=self._settings.run.id,
            incarnation=self._incarnation,
            plan=self._plan,
            past=entries,
            held_out=data.held_out,
            cap_bytes=self._settings.controller.recording_mb << 20,
        )
        controller = Controller(
            self._plan,
            RecordingPrompts(data.prompts, "prompts", self._recorder),
            RecordingPrompts(data.examples, "examples", self._recorder),
            data.held_out,
            journal=entries,
            incarnation=self._incarnation,
        )
        check_num_prompts(controller.state.buffer.num_admitted, self._plan)
        self._warn_of_truncation()
        if self._incarnation > 1:
            log.info("taken_up", incarnation=self._incarnation, version=controller.state.version)
        return controller

    def _warn_of_truncation(self) -> None:
        sampling = self._plan.sampling
        notice = truncation_notice(sampling, self._plan.kind)
        if notice:
            cut = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
            log.warning("truncated_sampling", **cut, text=notice)

    def _metrics_summary(self) -> MetricsSummary | None:
        """Return what metrics.jsonl says, durably, of all records so far; None while lines wait for space."""
        size_bytes = self._metrics.sync()
        return None if size_bytes is None else self._history.summary(size_bytes)

    def _compact_if_due(self, controller: Controller, *, has_more: bool) -> None:
        """Replace the records of the journal by the present state, once there are many.

        This takes some ten milliseconds, so it waits, within limits, until no message waits (`has_more`).
        """
        num_records = self._journal.num_uncompacted
        if num_records < self._compact_at * (4 if has_more else 1):
            return
        num_between = self._settings.controller.compact_records
        self._compact_at = num_records + num_between // 4 + 1  # the next attempt, if this one comes to nothing
        self._commands.flush()
        begun, record = time.monotonic(), compact(controller.state)
        metrics = self._metrics_summary() if record is not None else None
        if record is None or metrics is None:
            return
        try:
            assert self._data is not None, "the data is loaded before the core exists"
            self._journal.compact(msgspec.structs.replace(record, data=self._data.read, metrics=metrics))
        except JournalFullError:
            return  # the next commit reports it, and waits for space
        except StateTooLargeError as error:
            log.warning("not_compacted", reason=str(error))
            return
        self._compact_at = num_between
        log.info("compacted", num_records=num_records, seconds=round(time.monotonic() - begun, 4))

    def _serve(self, controller: Controller, stop: StopSignal) -> None:
        ticks, is_stopping = TickSchedule(time.monotonic()), False
        while self._finish is None:
            num = self._receive(controller, ticks.left_s(time.monotonic()))
            if stop and not is_stopping:
                is_stopping = True
                settings = self._settings.controller
                self._notify.stopping(_stopped_by(stop), settings.stop_s + settings.drain_s + CLOSE_S)
                self._handle(controller, StopRequested(time.monotonic(), _stopped_by(stop)), "signal")
            is_tick = ticks.is_due(time.monotonic(), has_more=num >= MAX_BATCH)
            if is_tick:
                self._handle(controller, Ticked(time.monotonic()), "tick")
                self._limit_messages(controller)
                self._check_clocks(controller)
                view = self._show(controller)
                self._write_notices(view)
                self._notify.turn(_line_of(view), samples=partial(self._run_samples, controller, view))
                self._metrics.flush()
                self._samples.flush()
                self._loggers.check()
                self._profiler.check()
            self._commit(controller, wait=not is_tick)
            self._compact_if_due(controller, has_more=num >= MAX_BATCH)
        self._show(controller)
        self._profiler.end()

    def _profiled(self, report: ProfileReport) -> None:
        self._later_events.append(Profiled(time.monotonic(), report))

    def _check_clocks(self, controller: Controller) -> None:
        members = controller.state.replicas.membership.members
        for name, ahead_s in self._clocks.new_faults(time.monotonic(), members):
            text = skew_text(name, ahead_s)
            log.warning("clock_skew", replica=name, host=members[name].host, seconds=round(ahead_s, 1), text=text)

    def _snapshot(self, controller: Controller) -> RunSnapshot:
        now = time.monotonic()
        waiting = filter(None, {self._metrics.problem: None, self._samples.problem: None})
        notices = (*self.hub.notices.texts(now), *self._clocks.faults()[:MAX_CLOCKS], *waiting)
        return snapshot(controller.state, self._history, now, self.hub.dropped.total(), notices)

    def _write_notices(self, view: RunSnapshot) -> None:
        """Make each new fault a line of metrics.jsonl. Faults have their own lines in the log."""
        for text in self._notice_lines.new(view.notices, time.monotonic()):
            self._write_line("notice", {"text": text})

    def _limit_messages(self, controller: Controller) -> None:
        """Bound the messages of rollouts and teachers by what a group of this run can have.

        An evaluation of an operator may have larger groups, which take far longer than a tick to generate. Those that
        come after its end are received and released: of messages that are dropped the sender would not hear.
        """
        model = controller.state.training.limits
        if model is None:
            return
        for role, num_bytes in controller.state.message_bytes().items():
            self._message_bytes[role] = max(num_bytes, self._message_bytes.get(role, 0))
            self.hub.limit_messages(role, self._message_bytes[role])

    def _receive(self, controller: Controller, timeout_s: float) -> int:
        """Handle the messages that have arrived, for one commit. Returns their number."""
        num = 0
        while num < MAX_BATCH and self._finish is None:
            arrivals = self.hub.poll(timeout_s)
            for one in arrivals:
                now = time.monotonic()
                if isinstance(one, ReceivedMessage):
                    envelope = one.envelope
                    if type(one.message) is Hello:
                        self._clocks.note(envelope.sender, envelope.incarnation, one.message, now, time.time())
                    cause = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
                    event = received(
                        controller.state, now, envelope.sender, envelope.incarnation, one.message, one.buffers
                    )
                    self._handle(controller, event, cause)
                    self.hub.charge(envelope.sender, time.monotonic() - now)
                else:
                    self._handle(controller, ReplicaDisconnected(now, one.name), "lost")
            num += len(arrivals)
            if not arrivals or not self._commands.is_pending:
                break
            timeout_s = 0.0
        return num

    def _commit(self, controller: Controller, *, wait: bool) -> None:
        """Commit records, carry out the commands that depend on them, and handle the files that are done.

        `wait`: leave records that are not urgent for a later commit, at the next tick at the latest.
        """
        if self._commands.is_urgent or not wait:
            self._commands.flush()
        self._later_events += [Stored(time.monotonic(), step) for step in self._trajectories.written()]
        digest = self._checkpoint.take(controller.state.weights.checkpoint) if self._checkpoint is not None else None
        if digest is not None:
            self._later_events.append(CheckpointRead(time.monotonic(), digest))
        while self._later_events:
            self._handle(controller, self._later_events.pop(0), "later")
            self._commands.flush()

    def _handle(self, controller: Controller, event: Event, cause: str) -> None:
        assert self._recorder is not None, "the recorder exists before the controller"
        self._recorder.event(event)
        if self._traces is not None and isinstance(event, Received):
            self._traces.received(event.sender, event.message)
        try:
            if self._profiler.active is None:
                commands = controller.step(event)
            else:
                with self._profiler.span(_event_name(event), cause=cause):
                    commands = controller.step(event)
        except Exception:  # raised again; the recording is the crash report
            self._recorder.flush()
            log.error("crash", recording=str(self._recorder.path), at=type(event).__name__, cause=cause)
            raise
        for command in commands:
            self._commands.add(command, cause)

    def _fetch(self, files: Trajectories | None, step: int) -> Fetched:
        """Read the groups of a step, from the journal unless the run trains from files."""
        if files is None:
            return Fetched(time.monotonic(), step, self._journal.fetch(step))
        try:
            return Fetched(time.monotonic(), step, files.entries(step))
        except ConfigError as error:
            return Fetched(time.monotonic(), step, (), str(error))

    def _execute(self, command: Command, cause: str) -> None:
        if self._traces is not None and isinstance(command, Send):
            self._traces.sent(command.peer, command.message)
        match command:
            case Send(peer=peer, message=ReleaseLeases(leases=leases)):
                self.hub.release(peer, leases)
            case Send(peer=peer, message=message, buffers=buffers):
                try:
                    self.hub.send(peer, message, cause=cause, buffers=buffers)
                except WireError as error:
                    lease = getattr(message, "lease", "")
                    log.error("message_too_large", peer=peer, lease=lease, reason=str(error))
                    self._later_events.append(NotSent(time.monotonic(), peer, lease, str(error)))
            case Note(kind="samples" as kind, fields=fields):
                self._samples.write(fields["step"], fields["rows"])
                self._loggers.note(kind, fields)
            case Note(kind=kind, fields=fields):
                self._history.note(kind, fields)
                self._timelines.note(self._write_line(kind, fields))
                self._loggers.note(kind, fields)
                if self._run_metrics is not None and self._controller is not None:
                    self._run_metrics.add(kind, fields, self._controller.state)
                if kind not in QUIET_NOTES:
                    (log.warning if kind == "alarm" else log.info)(kind, **fields)
            case Fetch(step=step):
                assert self._data is not None, "the data is loaded before the core exists"
                self._later_events.append(self._fetch(self._data.trajectories, step))
            case Store(step=step, groups=groups):
                self._trajectories.begin(step, groups)
            case ProfileSelf(order=order):
                self._profiler.arm(order)
            case FinishRun():
                self._finish = command
                log.info("finished", ok=command.ok, reason=command.reason)

    def _write_line(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Append a line to metrics.jsonl, and return it."""
        line = {"time": round(time.time(), 4), "kind": kind, **fields}
        self._metrics.write(json.dumps(line))
        return line

    def _show_full_disk(self, left_s: float) -> None:
        """Publish that the disk of the journal is full; no other message may leave until there is space."""
        what, controller = "waits for space on the disk of the journal", self._controller
        if controller is None:
            self._notify.turn(what, serves=False)
            return
        view = self._snapshot(controller)
        view = msgspec.structs.replace(
            view,
            waiting_for=f"space on the disk of the journal, for {left_s:.0f} s at most",
            notices=tuple(dict.fromkeys((*view.notices, full_disk_text(self._folder)))),
        )
        self._write_notices(view)
        self._notify.turn(what, samples=partial(self._run_samples, controller, view))
        self.hub.publish(msgspec.msgpack.encode(view))

    def _show(self, controller: Controller) -> RunSnapshot:
        """Publish the state of the run, and return it."""
        view = self._snapshot(controller)
        self.hub.publish(msgspec.msgpack.encode(view))
        return view

    def _run_samples(self, controller: Controller, view: RunSnapshot) -> MetricSamples:
        """Return the metrics of the HTTP endpoint."""
        assert self._run_metrics is not None, "asked for by the page of an endpoint"
        return self._run_metrics.samples(controller.state, view, time.monotonic(), self._commands.waiting_s)


def _line_of(view: RunSnapshot) -> Callable[[], str]:
    """Return what makes the state of the run in one line."""
    return lambda: (
        f"{view.phase}: version {view.version} of {view.last_step}, waits for {view.waiting_for or 'nothing'}"
    )


def _event_name(event: Event) -> str:
    """Return the name of an event in a profile."""
    return type(event.message).__name__ if isinstance(event, Received) else type(event).__name__


def _stopped_by(stop: StopSignal) -> str:
    """Return the reason of a stop by a signal."""
    return f"stopped by {stop.name}"


@contextmanager
def _as_restart_error(folder: Path) -> Iterator[None]:
    """Convert the error of a file that cannot be written at the start, mostly for a full disk, to one sentence."""
    try:
        yield
    except OSError as error:
        raise RestartError(
            f"{error.filename or folder} cannot be written: {error.strerror}; free some space, and start the run again"
        ) from None


def _check_teachers(plan: RunPlan) -> None:
    """Raise ConfigError if teachers could send different numbers of likeliest tokens, which no step can join."""
    if plan.has_teachers and plan.teacher_top_k is None:
        raise ConfigError(
            f"controller.num_teachers = {plan.num_teachers} needs controller.teacher_top_k: a step cannot be trained "
            "where one teacher sends another number than the others; set it to teacher.top_k of theirs"
        )


def run_info(settings: ControllerProcess, folder: Path) -> RunInfo:
    """Return the description of the run for loggers."""
    return RunInfo(
        id=settings.run.id,
        name=settings.run.name,
        folder=folder,
        project=settings.logging.project,
        offline=settings.logging.offline,
        settings=without_secrets(ControllerProcess, settings.model_dump(mode="json")),
    )


def _families() -> Sequence[Family]:
    """Return the metrics of the HTTP endpoint."""
    from starling.controller.shell.metrics.families import FAMILIES

    return FAMILIES


def main(argv: Sequence[str] | None = None) -> int:
    """Run the controller."""
    collect_seldom()
    return serve("controller", ControllerProcess, Shell, argv, families=_families)


if __name__ == "__main__":
    end_process(main())

"""Supervisor of the processes of one attempt at a recipe, from the first start to the last exit.

A process that dies during the run is restarted, the controller too: it reads its journal, and the replicas, which kept
working, find it at the same address. A process that exits because of a wrong setting is not: it would do so again.

| process                   | killed, exit code 75 | exit code 1                   | exit code 2 (a wrong setting) |
|---------------------------|----------------------|-------------------------------|-------------------------------|
| controller                | restarted            | the run failed, as it reports | the run fails                 |
| any replica               | restarted            | restarted                     | the run fails                 |
| making the model's folder | the run fails        | the run fails                 | the run fails                 |

With exit code 75 a process asks for its restart, such as the controller after an I/O error of its journal.

The controller runs on this machine. Replicas are placed by a launcher (`launch.launcher`), by default on this machine
too; one that its engine lost, such as with its node, is restarted as one that was killed.

A process that died `launch.max_restarts` times within `launch.restart_window_s` is not restarted: the run continues
without a rollout or a teacher while there is another one, and fails without any other process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from types import FrameType

from starling.cli.launch.interface import EXIT_S, Ended, Launcher, LaunchError, LaunchSite
from starling.cli.launch.launchers import make_launcher
from starling.cli.recipe.schema import MODEL_FOLDER, Recipe
from starling.cli.run.attempt import OBSERVER, Attempt, iter_metrics
from starling.cli.run.page import NAME as PAGE
from starling.cli.run.page import RunPage
from starling.cli.run.placements import first_placements, placement_of
from starling.cli.run.processes import ServiceProcess, ServiceProcesses
from starling.cli.run.replicas import Replica, Replicas, missing, unneeded
from starling.cli.run.restarts import Restarts
from starling.cli.run.screen import Screen, make_screen
from starling.common.counts import counted
from starling.common.errors import ConfigError, StarlingError
from starling.common.kinds import RunKind
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.observe.process import EXIT_RESTART, EXIT_USAGE, REPEATABLE_STOP_SIGNAL, STOP_S
from starling.common.wire.telemetry import RunSnapshot

POLL_S = 0.1
READ_BYTES_PER_S = 1e6
"""Least speed at which a controller reads an old journal, which was never compacted, and metrics.jsonl."""
DOES_NOT_LISTEN = "the controller did not listen"
REMEDY = "raise network.connect_s if the machine is busy or its disk is slow"
REPLACEABLE = ("policy", "rollout", "teacher")
"""Roles whose replicas can replace each other."""
ENDING = ("draining", "over")
"""Phases of a run in which nothing is restarted."""


def kept_at_stop(kind: RunKind) -> str:
    """Return what happens to the work in progress when a run is stopped."""
    if kind.serves_requests:
        return "requests in progress get no answer"
    return "the active step, then a checkpoint" if kind.trains else "answered prompts are kept"


def start_limit_s(attempt: Attempt, connect_s: float) -> float:
    """Return how long the controller may take until it listens, in seconds.

    `connect_s`, as for a replica that is started by hand, and the time to read its journal and its metrics before.
    """
    files = [path for path in (attempt.journal, attempt.metrics) if path.exists()]
    return connect_s + sum(path.stat().st_size for path in files) / READ_BYTES_PER_S


class ProcessFailedError(StarlingError):
    """The run failed; the text names the process and shows its last lines."""


class InterruptedRunError(StarlingError):
    """The run was interrupted by a second Ctrl-C, or before there was anything to save."""


class Supervisor:
    """Starts and watches the processes of one attempt."""

    def __init__(self, recipe: Recipe, attempt: Attempt) -> None:
        """Prepare; nothing is started yet. Raises ConfigError when the attempt's folder is damaged."""
        attempt.check_folders()
        self.recipe, self.attempt = recipe, attempt
        self.screen: Screen = make_screen(recipe.launch.screen, recipe, attempt.folder)
        self.children = ServiceProcesses(attempt.logs, recipe.launch.num_threads, self.screen.line)
        self.replicas = Replicas()
        self._page = RunPage(attempt, self.children, self.screen.say)
        site = LaunchSite(recipe, attempt, self.children, self.screen.say)
        self._launcher: Launcher = make_launcher(recipe.launch.launcher, site)
        self._restarts = Restarts(recipe.launch.max_restarts, recipe.launch.restart_window_s)
        self._phase = ""
        self._joined: set[str] = set()
        self._interrupts = 0
        self._stop_by: float | None = None
        self._stopping = False  # the present controller has received the signal
        self._watch: TelemetrySubscriber | None = None
        self._listen_by = 0.0

    def run(self) -> None:
        """Run to the end. Raises ProcessFailedError, or InterruptedRunError after a second Ctrl-C.

        Raises ConfigError when another process runs this attempt.
        """
        lock = self.attempt.acquire()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self._interrupt) for number in numbers}
        try:
            with self.screen:
                try:
                    self._start()
                    self._supervise()
                except ProcessFailedError:
                    self.children.kill(spare_writers=True)
                    self._await_writes()
                    raise
        finally:
            self._page.close()
            self._launcher.close()
            self.children.kill()
            self._stop_watching()
            os.close(lock)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def kill_one(self, role: str) -> str:
        """SIGKILL the last running process of `role`, as a test of the others. Returns its name."""
        child = self.children.of(role)[-1]
        os.kill(child.process.pid, signal.SIGKILL)
        return child.name

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._interrupts > 0

    def stop(self) -> None:
        """Stop the run gracefully, as Ctrl-C does."""
        self._interrupts += 1

    def on_poll(self) -> None:
        """Hook for subclasses, called a few times a second."""

    # --- start -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        recipe, folder = self.recipe, self.attempt.folder
        names = [f"{role}-{i}" for role, num in recipe.replicas.items() for i in range(num)]
        self.attempt.prepare(recipe, names)
        self.attempt.address.unlink(missing_ok=True)  # of an earlier controller
        common = ["--config", str(self.attempt.config), "--dir", str(folder)]
        # Given when the run is resumed, when the configuration is written already.
        accepts = ["--controller.accept-changed-data=true"] if recipe.controller.accept_changed_data else []
        # A signal that stops this run comes from here, and is no failure.
        own = ["--controller.stopped-exit-code=0"] if recipe.controller.stopped_exit_code else []
        self.children.start("controller", "controller", [*common, *accepts, *own])
        address = self._await_address(self._make_model())
        for placement in first_placements(recipe, self.attempt, address):
            self._launcher.start(placement)
            self.replicas.add(Replica(placement))
        if recipe.launch.dashboard:
            self._page.start(recipe.launch.dashboard_port)
        self._watch_controller()

    def _make_model(self) -> ServiceProcess | None:
        """Start a process that makes the model's folder, for [model.scratch]: this process has to stay responsive."""
        if self.recipe.model.scratch is None:
            return None
        arguments = ["scratch", str(self.attempt.recipe), str(self.attempt.folder / MODEL_FOLDER)]
        return self.children.start("model", "model", arguments, module="starling.cli.main")

    def _await_address(self, model: ServiceProcess | None) -> str:
        """Wait until the controller listens and the model's folder is there. Returns the controller's address."""
        limit_s = start_limit_s(self.attempt, self.recipe.network.connect_s)
        deadline = time.monotonic() + limit_s
        while not self.attempt.address.exists() or (model is not None and model.code is None):
            for child in self.children.all:
                if child.code is not None and (child.code != 0 or child is not model):
                    raise ProcessFailedError(self._report(child.name, child.ending()))
            if self._interrupts:
                raise InterruptedRunError("stopped before the run began; there is nothing to save")
            if time.monotonic() > deadline:
                does = "the model's folder was not made" if self.attempt.address.exists() else DOES_NOT_LISTEN
                raise ProcessFailedError(f"the run could not begin: {does} within {limit_s:g} s; {REMEDY}")
            time.sleep(0.02)
        if model is not None and model.code != 0:
            raise ProcessFailedError(self._report(model.name, model.ending()))
        address: str = self.attempt.read_address()["address"]
        self._address, self._port = address, address.rpartition(":")[2]
        return address

    # --- watch -----------------------------------------------------------------------------------------------------

    @property
    def _controller(self) -> ServiceProcess:
        return self.children.all[0]

    def _supervise(self) -> None:
        while not self._is_over:
            self._look()
            self._page.look()
            self._check_stop()
            self._look_at_processes()
            if not self._is_over:
                self._look_at_replicas()
            self.on_poll()
        self._conclude()

    def _look_at_processes(self) -> None:
        """Handle the exits of the processes that are no replicas, the controller first, and restart it when due."""
        for child in self.children.all:
            is_other = child.name in self.replicas or child.name == PAGE
            if child.code is not None and not child.reported and not is_other and not self._is_over:
                child.reported = True
                self._process_ended(child)
        if self._controller.due is not None and self._controller.due <= time.monotonic():
            # The replicas know it by its port.
            self.children.restart(self._controller, "--network.port", self._port)
            limit_s = start_limit_s(self.attempt, self.recipe.network.connect_s)
            self._stopping, self._listen_by = False, time.monotonic() + limit_s

    def _look_at_replicas(self) -> None:
        """Handle the ends of replicas, and start again those that are due."""
        for replica in self._newly_ended():
            self._replica_ended(replica)
        for replica in self.replicas:
            if replica.due is not None and replica.due <= time.monotonic():
                self._joined.discard(replica.name)
                self._place(replica)

    def _scale(self, snapshot: RunSnapshot) -> None:
        """Place the replicas that the run lacks, as the controller says, and end those that no controller drains."""
        for name in snapshot.draining:
            if name in self.replicas:
                self.replicas[name].is_drained = True
        members = {replica.name for replica in snapshot.replicas} - set(snapshot.draining)
        for role, num in snapshot.desired.items():
            for replica in unneeded(self.replicas, members, role, num):
                replica.is_drained, replica.due = True, None
                self._launcher.stop(replica.name)
            for name in missing(self.replicas, members, role, num):
                replica = Replica(placement_of(self.recipe, self.attempt, self._address, role, name))
                self.replicas.add(replica)
                self.screen.say(f"{name} is placed: {num} of its role are desired")
                self._place(replica)

    def _newly_ended(self) -> list[Replica]:
        """Return the replicas that have ended since the last call, after all of them are marked so."""
        newly = [(self.replicas[ended.name], ended) for ended in self._launcher.poll() if ended.name in self.replicas]
        for replica, ended in newly:
            replica.ended = ended
        return [replica for replica, _ in newly]

    def _place(self, replica: Replica) -> None:
        """Start a replica during the run; when the launcher cannot, that counts as a death."""
        replica.ended, replica.due = None, None
        try:
            if self.recipe.network.curve:
                self.attempt.add_key(replica.name)
            self._launcher.start(replica.placement)
        except (LaunchError, ConfigError) as error:
            replica.ended = Ended(replica.name, None, f"could not be started ({error})")
            self._replica_ended(replica)

    @property
    def _is_over(self) -> bool:
        """The controller has exited, and is not restarted."""
        return self._controller.reported and self._controller.due is None

    def _look(self) -> None:
        """Show the controller's newest snapshot; after a restart of the controller, connect to its new address."""
        if self._watch is not None:
            snapshot = self._watch.latest(POLL_S)
            if snapshot is not None:
                self._phase = snapshot.phase
                self._joined |= {replica.name for replica in snapshot.replicas}
                self.screen.show(snapshot)
                if (snapshot.desired or snapshot.draining) and self._phase not in ENDING and not self.stopping:
                    self._scale(snapshot)
            return
        time.sleep(POLL_S)
        if self._controller.due is not None:
            return
        if self.attempt.address.exists():
            self._watch_controller()
        elif self._controller.code is None and time.monotonic() > self._listen_by:
            limit_s = start_limit_s(self.attempt, self.recipe.network.connect_s)
            raise ProcessFailedError(f"after its restart {DOES_NOT_LISTEN} within {limit_s:g} s; {REMEDY}")

    def _watch_controller(self) -> None:
        addresses = self.attempt.read_address()
        self._watch = TelemetrySubscriber(
            addresses["telemetry"], self.attempt.key(OBSERVER) if self.recipe.network.curve else None
        )

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def _check_stop(self) -> None:
        if self._interrupts == 0:
            return
        if self._interrupts > 1:
            raise InterruptedRunError("killed by a second Ctrl-C; nothing was saved")
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + self.recipe.launch.stop_s
            self.screen.say(f"stopping gracefully: {kept_at_stop(self.recipe.kind)}; Ctrl-C again kills")
        # Only a controller that listens has taken over the signal.
        if not self._stopping and self._watch is not None:
            self._stopping = True
            self._controller.process.send_signal(REPEATABLE_STOP_SIGNAL)
        if now > self._stop_by:
            raise ProcessFailedError(f"the run did not stop gracefully within {self.recipe.launch.stop_s:g} s")

    # --- ends and restarts -----------------------------------------------------------------------------------------

    def _process_ended(self, child: ServiceProcess) -> None:
        """Handle the exit of a process that is no replica. Raises ProcessFailedError when the run failed with it."""
        code = child.code
        assert code is not None
        if child is self._controller:
            if (code < 0 or code == EXIT_RESTART) and self._phase not in ENDING:
                child.due = self._restart_at(child.name, child.ending())
            if child.due is not None:
                self._stop_watching()
                self.attempt.address.unlink(missing_ok=True)
        elif code != 0 and self._phase in ENDING:
            self.screen.say(f"{child.name} {child.ending()}; the run is ending without it")
        elif code != 0:
            self._fail(child.name, child.ending())

    def _replica_ended(self, replica: Replica) -> None:
        """Handle the end of a replica. Raises ProcessFailedError when the run has failed with it."""
        ended = replica.ended
        assert ended is not None
        if replica.is_drained:
            self.screen.say(f"{replica.name} was drained")
            return
        if ended.code == 0:
            return
        if self._phase in ENDING:
            replica.spared = True
            self.screen.say(f"{replica.name} {ended.reason}; the run is ending without it")
            return
        if ended.code != EXIT_USAGE:
            replica.due = self._restart_at(replica.name, ended.reason)
            if replica.due is not None:
                return
        was_killed = ended.code is None or ended.code < 0 or ended.code == EXIT_RESTART
        if was_killed and replica.role in REPLACEABLE and self.replicas.placed(replica.role):
            replica.spared = True
            self.screen.say(f"{replica.name} {ended.reason}; the others take over its work")
            return
        self._fail(replica.name, ended.reason)

    def _fail(self, name: str, ending: str) -> None:
        """Raise ProcessFailedError for the end of `name`, unless the controller ends: then it says why."""
        self._await_controller(1.0)
        if self._controller.code is None:
            raise ProcessFailedError(self._report(name, ending))

    def _await_controller(self, timeout_s: float) -> None:
        """Wait for the controller to exit: a replica that leaves because the run failed is not the cause."""
        deadline = time.monotonic() + timeout_s
        while self._controller.code is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _restart_at(self, name: str, ending: str) -> float | None:
        """Return when `name` is restarted (monotonic seconds), after a backoff; None when it died too often."""
        now = time.monotonic()
        delay_s = self._restarts.delay_s(name, now)
        if delay_s is None:
            return None
        self.screen.say(
            f"{name} {ending}; restarting it in {delay_s:g} s "
            f"({self._restarts.count(name)} of {self.recipe.launch.max_restarts} times)"
        )
        return now + delay_s

    def _conclude(self) -> None:
        """Handle the final exit of the controller, with the run or by a failure."""
        controller = self._controller
        self._page.close()
        self._await_writes()
        self._newly_ended()
        if controller.code != 0:
            # A replica's own error explains more than the controller's report of its loss.
            failed = [replica for replica in self.replicas if replica.has_failed] if controller.code == 1 else []
            cause = failed[0] if failed else controller
            raise ProcessFailedError(self._report(cause.name, cause.ending()))
        saved = iter_metrics(self.attempt.metrics, "step", "checkpoint")
        if self._interrupts and self.recipe.kind.trains and not any(saved):
            raise InterruptedRunError("stopped before the first step; there is nothing to save")
        for child in self.children.running():
            if child.name not in self._joined:  # restarted too late to join: no message would end it
                child.process.kill()
        left = self._await_ends(0.0 if self._interrupts else self._launcher.leave_s)
        if left and not self._interrupts:
            are = "are" if left[1:] else "is"
            self.screen.say(f"{', '.join(left)} did not exit after the run, and {are} killed")

    def _await_ends(self, timeout_s: float) -> list[str]:
        """Wait until all processes and replicas have ended, at most `timeout_s` and until a Ctrl-C.

        Returns the names of the others.
        """
        deadline, num_before = time.monotonic() + timeout_s, self._interrupts
        say_at = time.monotonic() + EXIT_S
        while True:
            self._newly_ended()
            running = {child.name for child in self.children.running()}
            left = [*running, *(one.name for one in self.replicas.placed() if one.name not in running)]
            now = time.monotonic()
            if not left or now > deadline or self._interrupts > num_before:
                return left
            if now > say_at:
                say_at, names = deadline, ", ".join(left)
                self.screen.say(f"the run is over; waiting at most {deadline - now:.0f} s for {names} to exit")
            time.sleep(0.05)

    def _await_writes(self) -> None:
        """Wait for policies that still write a state or a checkpoint. Raises InterruptedRunError after Ctrl-C twice."""
        now = time.monotonic()
        deadline, has_said = now + self.recipe.policy.saving.patience_s + STOP_S, False
        while writers := [child.name for child in self.children.of("policy") if child.is_writing]:
            now = time.monotonic()
            if now > deadline:
                return
            if not has_said:
                has_said = True
                self.screen.say(
                    f"{', '.join(writers)} {'are' if writers[1:] else 'is'} still writing a state or a checkpoint; "
                    f"the limit is {deadline - now:.0f} s (policy.saving.patience_s); Ctrl-C twice kills"
                )
            if self._interrupts > 1:
                raise InterruptedRunError("killed by a second Ctrl-C; what was being written is not complete")
            time.sleep(POLL_S)

    def _report(self, name: str, ending: str) -> str:
        """Return why the run failed with the end of `name`, with the last lines of its log if they are here."""
        count = self._restarts.count(name)
        ending = f"{name} {ending}" + (f" after {counted(count, 'restart')}" if count else "")
        child = self.children.named(name)
        if child is None:
            return ending
        if child.reader is not None:
            child.reader.join(1.0)
        log = self.attempt.logs / f"{name}.log"
        lines = [line for line in child.last_lines if line.strip()]
        prefixes = (f"starling {name}: ", "starling: ")
        sentence = next((line for line in reversed(lines) if line.startswith(prefixes)), None)
        if sentence is not None:
            return f"{ending}: {sentence.partition(': ')[2]}\n  its log: {log}"
        shown = "\n".join(f"  | {line}" for line in lines[-15:])
        return f"{ending}; its last lines:\n{shown}\n  its log: {log}"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
            if self.stopping:  # the kernel and the shell both send it: no second Ctrl-C
                return
        self.stop()


def _leave_terminal() -> None:
    """Discard further output to a terminal that is gone, where writing fails."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)

"""Supervisor of the processes of one attempt at a recipe, from the first start to the last exit.

A process that dies during the run is restarted, the controller too: it reads its journal, and the replicas, which kept
working, find it at the same address. A process that exits because of a wrong setting is not: it would do so again.

| process                   | killed, exit code 75 | exit code 1                   | exit code 2 (a wrong setting) |
|---------------------------|----------------------|-------------------------------|-------------------------------|
| controller                | restarted            | the run failed, as it reports | the run fails                 |
| any replica               | restarted            | restarted                     | the run fails                 |
| making the model's folder | the run fails        | the run fails                 | the run fails                 |

With exit code 75 a process asks for its restart, such as the controller after an I/O error of its journal.

A process that died `launch.max_restarts` times within `launch.restart_window_s` is not restarted: the run continues
without a rollout or a teacher while there is another one, and fails without any other process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import stat
import time
from types import FrameType

from starling.cli.recipe.schema import MODEL_FOLDER, Recipe
from starling.cli.run.attempt import OBSERVER, Attempt, iter_metrics
from starling.cli.run.gpus import devices_of
from starling.cli.run.processes import FORKED, ServiceProcess, ServiceProcesses
from starling.cli.run.restarts import Restarts
from starling.cli.run.screen import Screen, make_screen
from starling.common.counts import counted
from starling.common.errors import StarlingError
from starling.common.kinds import RunKind
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.observe.process import EXIT_RESTART, EXIT_USAGE, REPEATABLE_STOP_SIGNAL, STOP_S

POLL_S = 0.1
START_S = 60.0
"""Longest start of a controller, besides the time to read what earlier incarnations have left."""
READ_BYTES_PER_S = 1e6
"""Least speed at which a controller reads an old journal, which was never compacted, and metrics.jsonl."""
LEAVE_S = 5.0
REPLACEABLE = ("policy", "rollout", "teacher")
"""Roles whose replicas can replace each other."""
ONCE = ("model", "harness")
"""Processes that are not restarted."""
ENDING = ("draining", "over")
"""Phases of a run in which nothing is restarted."""


def kept_at_stop(kind: RunKind) -> str:
    """Return what happens to the work in progress when a run is stopped."""
    if kind.serves_requests:
        return "requests in progress get no answer"
    return "the active step, then a checkpoint" if kind.trains else "answered prompts are kept"


def start_limit_s(attempt: Attempt) -> float:
    """Return how long the controller may take until it listens; it reads its journal and its metrics before."""
    files = [path for path in (attempt.journal, attempt.metrics) if path.exists()]
    return START_S + sum(path.stat().st_size for path in files) / READ_BYTES_PER_S


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
        names = [(role, f"{role}-{i}") for role, num in recipe.replicas.items() for i in range(num)]
        self.attempt.prepare(recipe, [name for _, name in names])
        self.attempt.address.unlink(missing_ok=True)  # of an earlier controller
        common = ["--config", str(self.attempt.config), "--dir", str(folder)]
        # Given when the run is resumed, when the configuration is written already.
        accepts = ["--controller.accept-changed-data=true"] if recipe.controller.accept_changed_data else []
        self.children.start("controller", "controller", [*common, *accepts])
        address = self._await_address(self._make_model())
        # Those of the fork server come last: the start of the first one waits until the server has imported everything.
        for role, name in sorted(names, key=lambda one: one[0] in FORKED):
            devices = _devices(recipe, role, name)
            arguments = [*common, "--name", name, "--controller", address, *self._nodes_of(role, common, name, address)]
            self.children.start(name, role, arguments, environment=devices)
        self._watch_controller()

    def _nodes_of(self, role: str, common: list[str], name: str, address: str) -> list[str]:
        """Return the flags of a replica's first node, if it has several, and say how the others are started."""
        launch = self.recipe.launch
        of_role = {
            "policy": (launch.policy_nodes, launch.policy_rdzv),
            "rollout": (launch.rollout_nodes, launch.rollout_rdzv),
        }
        num, rdzv = of_role.get(role, (1, ""))
        if num == 1:
            return []
        command = ["starling", role, *common, "--name", name, "--controller", address]
        nodes = f"--nnodes {num} --node-rank {{}} --rdzv {rdzv}"
        self.screen.say(
            f"{name} waits for {counted(num - 1, 'node')}; on each host: {shlex.join(command)} {nodes.format('I')} "
            f"--network.host ITS_ADDRESS, with I = 1{'' if num == 2 else f' to {num - 1}'}"
        )
        return nodes.format(0).split()

    def _make_model(self) -> ServiceProcess | None:
        """Start a process that makes the model's folder, for [model.scratch]: this process has to stay responsive."""
        if self.recipe.model.scratch is None:
            return None
        arguments = ["scratch", str(self.attempt.recipe), str(self.attempt.folder / MODEL_FOLDER)]
        return self.children.start("model", "model", arguments, module="starling.cli.main")

    def _await_address(self, model: ServiceProcess | None) -> str:
        """Wait until the controller listens and the model's folder is there. Returns the controller's address."""
        limit_s = start_limit_s(self.attempt)
        deadline = time.monotonic() + limit_s
        while not self.attempt.address.exists() or (model is not None and model.code is None):
            for child in self.children.all:
                if child.code is not None and (child.code != 0 or child is not model):
                    raise ProcessFailedError(self._report(child))
            if self._interrupts:
                raise InterruptedRunError("stopped before the run began; there is nothing to save")
            if time.monotonic() > deadline:
                raise ProcessFailedError(
                    f"the run could not begin: the controller did not listen within {limit_s:.0f} s"
                )
            time.sleep(0.02)
        if model is not None and model.code != 0:
            raise ProcessFailedError(self._report(model))
        address: str = self.attempt.read_address()["address"]
        self._port = address.rpartition(":")[2]
        return address

    # --- watch -----------------------------------------------------------------------------------------------------

    @property
    def _controller(self) -> ServiceProcess:
        return self.children.all[0]

    def _supervise(self) -> None:
        while not self._is_over:
            self._look()
            self._check_stop()
            for child in self.children.all:
                if child.code is not None and not child.reported and not self._is_over:
                    child.reported = True
                    self._ended(child)
            for child in self.children.all:
                if child.due is not None and child.due <= time.monotonic():
                    self._start_again(child)
            self.on_poll()
        self._conclude()

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
            return
        time.sleep(POLL_S)
        if self._controller.due is not None:
            return
        if self.attempt.address.exists():
            self._watch_controller()
        elif self._controller.code is None and time.monotonic() > self._listen_by:
            limit_s = start_limit_s(self.attempt)
            raise ProcessFailedError(f"the controller was restarted and did not listen within {limit_s:.0f} s")

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

    def _ended(self, child: ServiceProcess) -> None:
        """Handle the exit of a process. Raises ProcessFailedError when the run has failed with it."""
        code = child.code
        assert code is not None
        if child is self._controller:
            if (code < 0 or code == EXIT_RESTART) and self._phase not in ENDING:
                self._restart_later(child)
            return
        if code == 0:
            return
        if self._phase in ENDING:
            child.spared = True
            self.screen.say(f"{child.name} {child.ending()}; the run is ending without it")
            return
        if child.role not in ONCE and code != EXIT_USAGE and self._restart_later(child):
            return
        if (code < 0 or code == EXIT_RESTART) and child.role in REPLACEABLE and self.children.of(child.role):
            child.spared = True
            self.screen.say(f"{child.name} {child.ending()}; the others take over its work")
            return
        self._await_controller(1.0)
        if self._controller.code is None:
            raise ProcessFailedError(self._report(child))

    def _await_controller(self, timeout_s: float) -> None:
        """Wait for the controller to exit: a replica that leaves because the run failed is not the cause."""
        deadline = time.monotonic() + timeout_s
        while self._controller.code is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _restart_later(self, child: ServiceProcess) -> bool:
        """Schedule a restart of `child` after a backoff. Returns False when it died too often."""
        now = time.monotonic()
        delay_s = self._restarts.delay_s(child.name, now)
        if delay_s is None:
            return False
        if child is self._controller:
            self._stop_watching()
            self.attempt.address.unlink(missing_ok=True)
        self.screen.say(
            f"{child.name} {child.ending()}; restarting it in {delay_s:g} s "
            f"({self._restarts.count(child.name)} of {self.recipe.launch.max_restarts} times)"
        )
        child.due = now + delay_s
        return True

    def _start_again(self, child: ServiceProcess) -> None:
        if child is not self._controller:
            self._joined.discard(child.name)
            self.children.restart(child)
            return
        # The replicas know it by its port.
        self.children.restart(child, "--network.port", self._port)
        self._stopping, self._listen_by = False, time.monotonic() + start_limit_s(self.attempt)

    def _conclude(self) -> None:
        """Handle the final exit of the controller, with the run or by a failure."""
        controller = self._controller
        self._await_writes()
        if controller.code != 0:
            # A replica's own error explains more than the controller's report of its loss.
            failed = [c for c in self.children.all[1:] if c.code not in (0, None) and not c.spared]
            raise ProcessFailedError(self._report(failed[0] if failed and controller.code == 1 else controller))
        saved = iter_metrics(self.attempt.metrics, "step", "checkpoint")
        if self._interrupts and self.recipe.kind.trains and not any(saved):
            raise InterruptedRunError("stopped before the first step; there is nothing to save")
        for child in self.children.running():
            if child.name not in self._joined:  # restarted too late to join: no message would end it
                child.process.kill()
        left = self.children.wait(0.0 if self._interrupts else LEAVE_S)
        if left and not self._interrupts:
            self.screen.say(f"{', '.join(child.name for child in left)} did not exit after the run, and is killed")

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

    def _report(self, child: ServiceProcess) -> str:
        if child.reader is not None:
            child.reader.join(1.0)
        log = self.attempt.logs / f"{child.name}.log"
        lines = [line for line in child.last_lines if line.strip()]
        prefixes = (f"starling {child.name}: ", "starling: ")
        sentence = next((line for line in reversed(lines) if line.startswith(prefixes)), None)
        count = self._restarts.count(child.name)
        ending = f"{child.name} {child.ending()}" + (f" after {counted(count, 'restart')}" if count else "")
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


def _devices(recipe: Recipe, role: str, name: str) -> dict[str, str]:
    """Return the environment with the GPUs of a replica; empty for one that sees all."""
    launch = recipe.launch
    if role == "policy":
        return devices_of(name, launch.gpus_per_policy)
    if role == "rollout":
        return devices_of(name, launch.gpus_per_rollout, launch.num_policies * launch.gpus_per_policy)
    return {}


def _leave_terminal() -> None:
    """Discard further output to a terminal that is gone, where writing fails."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)

"""`starling run`: one attempt at a recipe, from the first process to the last.

A policy, controller or reward service that dies ends the run as a failure. A rollout that is killed does not, while
another one runs: what it had in hand is generated again. One that ends by an error of its own does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from starling.cli.children import Child, Children
from starling.cli.recipe import MODEL_FOLDER, Recipe, resolved, to_toml
from starling.cli.screen import Screen, make_screen
from starling.common.errors import ConfigError, StarlingError
from starling.common.net.curve import make_keys
from starling.common.net.watch import Watch

POLL_S = 0.1
START_S = 60.0
LEAVE_S = 5.0
OBSERVER = "observer-0"


class RunFailedError(StarlingError):
    """The run ended as a failure; the text names the process and shows its last lines."""


class InterruptedRunError(StarlingError):
    """The run was cut off by a second Ctrl-C, or before there was anything to end in order."""


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt at a recipe."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe as it was given, all files and flags in one: `starling run` takes it again."""
        return self.folder / "recipe.toml"

    @property
    def config(self) -> Path:
        """What the services read: the recipe with the run's id and the model's folder."""
        return self.folder / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: steps, adoptions, evaluations, failures."""
        return self.folder / "metrics.jsonl"

    @classmethod
    def create(cls, recipe: Recipe) -> Attempt:
        """Make the folder of the next attempt."""
        parent = recipe.run.folder / recipe.run.name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            taken = [int(p.name.partition("-")[2]) for p in parent.glob("attempt-*") if p.name[8:].isdigit()]
            folder = parent / f"attempt-{max(taken, default=0) + 1}"
            folder.mkdir()
        except OSError as error:
            raise ConfigError(f"cannot make a folder in {parent}: {error.strerror}; set run.folder") from None
        return cls(folder.absolute())


class Supervisor:
    """Starts and watches the processes of one attempt."""

    def __init__(self, recipe: Recipe, attempt: Attempt) -> None:
        """Prepare; nothing is started yet."""
        self.recipe, self.attempt = recipe, attempt
        self.screen: Screen = make_screen(recipe.launch.screen, recipe, attempt.folder)
        self.children = Children(attempt.folder / "logs", recipe.launch.num_threads, self.screen.line)
        self._interrupts = 0
        self._stop_by: float | None = None
        self._watch: Watch | None = None

    def run(self) -> None:
        """Run to the end. Raises RunFailedError, or InterruptedRunError after a second Ctrl-C."""
        previous = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self.screen:
                self._start()
                self._supervise()
        finally:
            self.children.kill()
            if self._watch is not None:
                self._watch.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def kill_one(self, role: str) -> str:
        """SIGKILL the last running process of `role`, as a test of the others. Returns its name."""
        child = self.children.of(role)[-1]
        os.kill(child.process.pid, signal.SIGKILL)
        return child.name

    def on_poll(self) -> None:
        """Do nothing; a subclass may look in, a few times a second."""

    # --- start -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        recipe, folder = self.recipe, self.attempt.folder
        replicas = [("policy", 1), ("rollout", recipe.launch.num_rollouts), ("reward", recipe.launch.num_rewards)]
        if not recipe.plan().needs_rollouts:
            replicas = [("policy", 1)]
        names = [(role, f"{role}-{i}") for role, num in replicas for i in range(num)]
        make_keys(folder / "keys", [name for _, name in names] + [OBSERVER])
        self.attempt.recipe.write_text(to_toml(recipe))
        self.attempt.config.write_text(to_toml(resolved(recipe, folder)))
        common = ["--config", str(self.attempt.config), "--dir", str(folder)]
        self.children.start("controller", "controller", common)
        addresses = self._await_addresses(self._make_model())
        for role, name in names:
            self.children.start(name, role, [*common, "--name", name, "--controller", addresses["address"]])
        key = folder / "keys" / f"{OBSERVER}.json" if recipe.network.curve else None
        self._watch = Watch(addresses["telemetry"], key)

    def _make_model(self) -> Child | None:
        """Have a process make the model's folder, if there is one to make; this one has to stay responsive."""
        if self.recipe.model.scratch is None:
            return None
        arguments = ["scratch", str(self.attempt.recipe), str(self.attempt.folder / MODEL_FOLDER)]
        return self.children.start("model", "model", arguments, module="starling.cli.main")

    def _await_addresses(self, model: Child | None) -> dict[str, str]:
        """Wait until the controller listens and the model's folder is there."""
        path, deadline = self.attempt.folder / "controller.json", time.monotonic() + START_S
        while not path.exists() or (model is not None and model.code is None):
            for child in self.children.all:
                if child.code not in (None, 0):
                    raise RunFailedError(self._report(child))
            if self._interrupts:
                raise InterruptedRunError("stopped before the run had begun; there is nothing to save")
            if time.monotonic() > deadline:
                raise RunFailedError(f"the run could not begin: the controller did not listen within {START_S:.0f} s")
            time.sleep(0.02)
        if model is not None and model.code != 0:
            raise RunFailedError(self._report(model))
        addresses: dict[str, str] = json.loads(path.read_text())
        return addresses

    # --- watch -----------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        controller = self.children.all[0]
        while controller.code is None:
            assert self._watch is not None
            snapshot = self._watch.latest(POLL_S)
            if snapshot is not None:
                self.screen.show(snapshot)
            self._check_stop(controller)
            for child in self.children.all[1:]:
                if child.code is not None and not child.reported:
                    child.reported = True
                    self._ended(child, controller)
            self.on_poll()
        if controller.code != 0:
            # A replica's own error explains more than the controller's report that it is gone.
            failed = [c for c in self.children.all[1:] if c.code not in (0, None) and not c.spared]
            raise RunFailedError(self._report(failed[0] if failed and controller.code == 1 else controller))
        if self._interrupts and not read_metrics(self.attempt.metrics, "checkpoint"):
            raise InterruptedRunError("stopped before the first step was made; there is nothing to save")
        left = self.children.wait(0.0 if self._interrupts else LEAVE_S)
        if left and not self._interrupts:
            self.screen.say(f"{', '.join(child.name for child in left)} did not leave after the run, and is killed")

    def _check_stop(self, controller: Child) -> None:
        if self._interrupts == 0:
            return
        if self._interrupts > 1:
            raise InterruptedRunError("killed by a second Ctrl-C; nothing was saved")
        now = time.monotonic()
        if self._stop_by is None:
            self._stop_by = now + self.recipe.launch.stop_s
            self.screen.say("stopping in order: the step in hand, then a checkpoint; Ctrl-C again kills")
            controller.process.send_signal(signal.SIGTERM)
        elif now > self._stop_by:
            raise RunFailedError(f"the run did not stop in order within {self.recipe.launch.stop_s:g} s")

    def _ended(self, child: Child, controller: Child) -> None:
        """A replica ended while the controller runs: at the end of the run, killed, or failed."""
        code = child.code
        assert code is not None
        if code == 0:
            return
        if code < 0 and child.role == "rollout" and self.children.of("rollout"):
            child.spared = True
            self.screen.say(f"{child.name} {child.ending()}; the others take over what it had")
            return
        # Give the controller a moment: a replica that leaves because the run failed is not why it failed.
        deadline = time.monotonic() + 1.0
        while controller.code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if controller.code is None:
            raise RunFailedError(self._report(child))

    def _report(self, child: Child) -> str:
        if child.reader is not None:
            child.reader.join(1.0)
        log = self.attempt.folder / "logs" / f"{child.name}.log"
        lines = [line for line in child.last_lines if line.strip()]
        said = (f"starling {child.name}: ", "starling: ")
        sentence = next((line for line in reversed(lines) if line.startswith(said)), None)
        if sentence is not None:
            return f"{child.name} {child.ending()}: {sentence.partition(': ')[2]}\n  its log: {log}"
        shown = "\n".join(f"  | {line}" for line in lines[-15:])
        return f"{child.name} {child.ending()}; its last lines:\n{shown}\n  its log: {log}"

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += 1


def read_metrics(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of these kinds; all without any."""
    if not path.exists():
        return []
    with path.open() as file:
        lines = [json.loads(line) for line in file if line.endswith("\n")]
    return [line for line in lines if not kinds or line["kind"] in kinds]


def is_terminal() -> bool:
    """Say whether standard output is a terminal."""
    return sys.stdout.isatty()

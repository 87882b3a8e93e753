"""A controller as a process of its own, the services that join it, and its telemetry: without torch, and cheap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from starling.common.net.keyring import make_keys
from starling.common.net.telemetry import TelemetrySubscriber
from starling.common.wire.telemetry import RunSnapshot

PATIENCE_S = 300.0
CONFIG = """
[run]
id = "run-1"
name = "lone"

[network]
connect_s = 60.0

[data]
source = "{folder}/prompts.jsonl"
format = "{{question}}>"

[controller]
start_s = 3000.0

[reward]
num_workers = 1

[[reward.scorers]]
name = "prefix_match"
"""


class LoneController:
    """A controller that waits for a policy which never comes, in a folder that looks like that of an attempt."""

    def __init__(self, folder: Path, *names: str) -> None:
        """Make the folder with its keys, for services of these names too."""
        folder.mkdir(parents=True)
        self.folder, self.config = folder, folder / "config.toml"
        self.config.write_text(CONFIG.format(folder=folder))
        (folder / "prompts.jsonl").write_text('{"question": "1", "answer": "2"}\n' * 8)
        make_keys(folder / "keys", [*names, "observer-0", "operator-0"])
        # Only `starling run` writes the settings in full; commands look for these.
        self.config.write_text(self.config.read_text().replace("connect_s", "curve = true\nconnect_s"))
        self.log = folder / "controller.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the controller, and wait until it listens."""
        (self.folder / "controller.json").unlink(missing_ok=True)
        self.process = self._run("starling.controller.shell.main", self.log, "--dir", str(self.folder))
        wait_until((self.folder / "controller.json").exists, lambda: self.log.read_text())

    def kill(self) -> None:
        """Kill the controller."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def address(self, what: str = "address") -> str:
        """Return where it listens, or publishes its telemetry."""
        found: str = json.loads((self.folder / "controller.json").read_text())[what]
        return found

    def reward(self, name: str, *more: str, before: str = "") -> tuple[subprocess.Popen[bytes], Path]:
        """Start a reward service; see `join`."""
        return self.join("reward", name, *more, before=before)

    def join(
        self, role: str, name: str, *more: str, key: Path | None = None, before: str = "", log: Path | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a service. Returns its log too, which is `log` if given.

        `key`: its key file, if that is another one; `before`: run in its process before anything is imported.
        """
        module = "starling.rollout.shell.teacher" if role == "teacher" else f"starling.{role}.shell.main"
        log = log or self.folder / f"{name}-{len(self.processes)}.log"
        arguments = ["--controller", self.address(), "--dir", str(self.folder), "--name", name, *more]
        arguments += [] if key is None else ["--key", str(key)]
        return self._run(module, log, *arguments, before=before), log

    def _run(self, module: str, log: Path, *arguments: str, before: str = "") -> subprocess.Popen[bytes]:
        code = f"{before}\nfrom {module} import main\nraise SystemExit(main())"
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(self.config), *arguments],
                stdout=file,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def wait_for_snapshot(self, holds: Callable[[RunSnapshot], object]) -> RunSnapshot:
        """Return the first snapshot for which `holds` is true."""
        subscriber = TelemetrySubscriber(self.address("telemetry"), self.folder / "keys/observer-0.json")
        try:
            end, snapshot = time.monotonic() + PATIENCE_S, None
            while snapshot is None or not holds(snapshot):
                assert time.monotonic() < end, f"{snapshot}\n{self.log.read_text()}"
                snapshot = subscriber.latest(1.0) or snapshot
            return snapshot
        finally:
            subscriber.close()


@contextmanager
def lone_controller(folder: Path, *names: str) -> Iterator[LoneController]:
    """Start a controller, and end it and the services that were started with it."""
    controller = LoneController(folder, *names)
    try:
        controller.start()
        yield controller
    finally:
        end(controller.processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill processes that still run."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(PATIENCE_S)


def wait_until(holds: Callable[[], object], report: Callable[[], str]) -> None:
    """Wait until `holds` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, report()
        time.sleep(0.05)

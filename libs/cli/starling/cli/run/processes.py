"""Child processes of a run on this machine: start, log files, exit codes; none outlives the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TextIO

from starling.cli.run.environment import of_fork_server, of_services
from starling.cli.run.forkserver import ForkedProcess, Forks
from starling.cli.services import SERVICES
from starling.common.files import open_own
from starling.common.observe.parent import die_with_parent
from starling.common.observe.terminal import printable
from starling.common.settings import child_environment

KEPT_LINES = 30
LINE_CHARS = 1 << 16
"""A longer line of a process is written as several."""
WRITE_BEGUN, WRITE_ENDED = "write_begun", "write_ended"
"""Log events of a policy that begins to write a state or a checkpoint, and that has ended it."""
FORKED = ("policy", "rollout", "teacher")
"""Roles whose processes import torch and transformers. They load models from a local folder, so the Hugging Face hub is
switched off for them."""


@dataclass
class ServiceProcess:
    """One process of the run."""

    name: str
    role: str
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Variables besides those of all processes."""
    process: subprocess.Popen[str] | ForkedProcess
    command: tuple[str, ...] = ()
    """Instead of the module: a command that is no service, such as ssh to one."""
    stdin: bytes = b""
    """What such a command reads first; its stdin stays open."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None
    reported: bool = False
    """Its exit has been handled."""
    is_writing: bool = False
    """It has logged that it writes a state or a checkpoint."""
    due: float | None = None
    """When it is restarted (monotonic seconds), after it died."""

    @property
    def code(self) -> int | None:
        """Return its exit code, or None while it runs; -n when signal n killed it."""
        return self.process.poll()

    def write(self, data: bytes) -> None:
        """Write to the stdin of a `command`; one that has ended is not told."""
        stream = getattr(self.process, "stdin", None)
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.write(data.decode())
                stream.flush()

    def close_stdin(self) -> None:
        """Close the stdin of a `command`, by which it knows that nothing follows."""
        stream = getattr(self.process, "stdin", None)
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()

    def ending(self) -> str:
        """Return how it ended in words: ``was killed by SIGKILL``."""
        code = self.code
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


class ServiceProcesses:
    """All processes of one run."""

    def __init__(self, logs: Path, num_threads: int, on_line: Callable[[str, str], None]) -> None:
        """Write log files to `logs`, and call `on_line(name, line)` for every line."""
        self._logs, self._on_line = logs, on_line
        self._environment = of_services(num_threads)
        self._forks = Forks(of_fork_server())
        self.all: list[ServiceProcess] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        role: str,
        arguments: Sequence[str],
        module: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> ServiceProcess:
        """Start `module`, by default that of the service `role`, as `name`; `environment` comes on top."""
        module, more = module or SERVICES[role], dict(environment or {})
        child = ServiceProcess(name, role, module, tuple(arguments), more, self._begin(role, module, arguments, more))
        self._read(child)
        self.all.append(child)
        return child

    def start_command(self, name: str, role: str, command: Sequence[str], stdin: bytes) -> ServiceProcess:
        """Start a command that is no service of this machine, which reads `stdin`, and then its end."""
        child = ServiceProcess(
            name, role, "", (), {}, self._spawn(command, self._environment, reads=True), tuple(command), stdin
        )
        self._tell(child)
        self._read(child)
        self.all.append(child)
        return child

    def restart(self, child: ServiceProcess, *more: str) -> None:
        """Restart a process that has exited, with its former arguments and `more`."""
        assert child.code is not None, f"{child.name} still runs"
        if child.command:
            child.process = self._spawn(child.command, self._environment, reads=True)
            self._tell(child)
        else:
            child.process = self._begin(child.role, child.module, (*child.arguments, *more), child.environment)
        child.reported, child.due, child.is_writing = False, None, False
        self._read(child)

    def _begin(
        self, role: str, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str] | ForkedProcess:
        variables = {**self._environment, **environment}
        if role in FORKED:
            return self._forks.start(module, arguments, variables)
        return self._spawn((sys.executable, "-m", module, *arguments), variables)

    def _tell(self, child: ServiceProcess) -> None:
        """Write the first input of a command, in a thread: it may read late, or never."""
        threading.Thread(target=child.write, args=(child.stdin,), name=f"stdin-{child.name}", daemon=True).start()

    def _read(self, child: ServiceProcess) -> None:
        output = child.process.stdout
        assert output is not None
        child.reader = threading.Thread(
            target=self._listen, args=(child, output), name=f"log-{child.name}", daemon=True
        )
        child.reader.start()

    def _spawn(
        self, command: Sequence[str], environment: Mapping[str, str], *, reads: bool = False
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE if reads else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=child_environment(**environment),
            # A session of its own: Ctrl-C reaches the supervisor only, which then stops the run gracefully.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def of(self, role: str) -> list[ServiceProcess]:
        """Return the running processes of a role."""
        return [child for child in self.all if child.role == role and child.code is None]

    def named(self, name: str) -> ServiceProcess | None:
        """Return the process `name`, if it was ever started."""
        return next((child for child in self.all if child.name == name), None)

    def running(self) -> list[ServiceProcess]:
        """Return the running processes."""
        return [child for child in self.all if child.code is None]

    def wait(self, timeout_s: float) -> list[ServiceProcess]:
        """Wait until all have exited, at most `timeout_s`. Returns those still running."""
        deadline = time.monotonic() + timeout_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.running()

    def kill(self, names: Collection[str] | None = None, *, spare_writers: bool = False) -> None:
        """Kill the running processes, or those of `names`, and wait for their exit.

        `spare_writers`: not those that write a checkpoint.
        """
        named = self.all if names is None else [child for child in self.all if child.name in names]
        killed = [child for child in named if not (spare_writers and child.is_writing)]
        for child in killed:
            if child.code is None:
                child.process.kill()
        for child in killed:
            child.process.wait(10)
            if child.reader is not None:
                child.reader.join(2)

    def _listen(self, child: ServiceProcess, output: IO[str]) -> None:
        file: TextIO | None = None
        with output:
            for line in map(printable, iter(partial(output.readline, LINE_CHARS), "")):
                # A full disk must not end this thread: the process would block on a full pipe.
                with contextlib.suppress(OSError):
                    file = file or _open_log(self._logs / f"{child.name}.log")
                    file.write(line)
                child.last_lines.append(line.rstrip("\n"))
                if WRITE_BEGUN in line or WRITE_ENDED in line:
                    child.is_writing = WRITE_BEGUN in line
                self._on_line(child.name, line.rstrip("\n"))
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()


def _open_log(path: Path) -> TextIO:
    """Open a log file to append to it. Raises OSError."""
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", buffering=1)

"""Replica processes for tests: forked from a warm fork server, or started anew.

A process that is forked has torch, transformers and the services imported already, as those of a supervisor have, which
saves most of its start. `fresh` starts `python -m` instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fake_hub import DEADLINE_S, RUN, FakeHub

from starling.cli.run.forkserver import ForkedProcess, Forks

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
"""Configuration of a model that loads immediately."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class ForkedReplica:
    """A forked process with the methods of `subprocess.Popen` that the tests use; its output counts as errors."""

    def __init__(self, process: ForkedProcess) -> None:
        self._process = process
        self._output: list[str] = []
        self._reader = threading.Thread(target=lambda: self._output.extend(process.stdout), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.send_signal(15)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int | None:
        return self._process.wait(timeout)

    def wait_for_output(self, text: str) -> str:
        """Wait until `text` is in the output of the running process; return all of it."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in "".join(self._output):
            assert self.returncode is None, "".join(self._output)
            assert time.monotonic() < deadline, "".join(self._output)
            time.sleep(0.02)
        return "".join(self._output)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._reader.join(timeout)
        if self._reader.is_alive() or self._process.wait(timeout) is None:
            raise subprocess.TimeoutExpired("forked replica", timeout)
        return "", "".join(self._output)


Replica = ForkedReplica | subprocess.Popen[str]


@contextmanager
def replica(hub: FakeHub, name: str, folder: Path, *flags: str, fresh: bool = False) -> Iterator[Replica]:
    """Start a replica whose role is the prefix of `name`; kill it at the end if it still runs."""
    role = name.partition("-")[0]
    module = "starling.rollout.shell.teacher" if role == "teacher" else f"starling.{role}.shell.main"
    arguments = ["--name", name, "--controller", hub.address, "--dir", str(folder)]
    arguments += ["--run.id", RUN, "--network.curve", "false", *flags]
    process = _start(module, arguments) if fresh else _fork(module, arguments)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def exit_code(process: Replica) -> int | None:
    """Wait for the end of a process, and return its exit code."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors, errors
    return process.returncode


def _start(module: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})


def _fork(module: str, arguments: Sequence[str]) -> ForkedReplica:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")  # or the fork would import pytest's main module
    try:
        return ForkedReplica(_fork_server().start(module, arguments, {}))
    finally:
        sys.modules["__main__"] = main


@cache
def _fork_server() -> Forks:
    return Forks(ENVIRONMENT)

"""End of a run while its policy writes to a storage that hangs: every end waits, but for a second Ctrl-C."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from system_runs import Command, make_workdir, num_steps, run, run_concurrently, sentence

from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.storage import Storage

pytestmark = pytest.mark.system

ENDLESS = 100_000


@contextmanager
def s3_server() -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """Serve S3 with one bucket; yields the process, which can be suspended, and the options of its clients."""
    import s3fs

    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+", line)))
            threading.Thread(target=server.stderr.read, daemon=True).start()  # an unread pipe would block the server
            options = {"key": "testing", "secret": "testing", "endpoint_url": address}
            s3fs.S3FileSystem(**options).mkdir("bucket")
            yield server, options
        finally:
            server.kill()


@dataclass(frozen=True)
class WritingRun:
    """A run whose policy writes a state to a storage that hangs."""

    folder: Path
    command: Command
    policy: psutil.Process
    server: subprocess.Popen[str]
    storage: Storage

    def await_policy(self) -> None:
        """Wait until the run waits for the policy."""
        self.command.wait_for_output("policy-0 is still writing a state or a checkpoint")
        assert self.policy.is_running()

    def assert_completes(self, code: int) -> None:
        """Resume the storage, and assert that the run ends with `code` and a complete state."""
        self.server.send_signal(signal.SIGCONT)
        assert self.command.wait() == code, self.command.transcript()
        states = [path for path in self.storage.fs.find(self.storage.root) if path.endswith("state.json")]
        assert states, f"the state that was being written is complete\n{self.command.transcript()}"
        assert find_state(f"s3://{states[0].rpartition('/')[0]}", self.storage.fs.storage_options).state.version >= 2


@contextmanager
def run_during_a_write(folder: Path, **changes: dict[str, Any]) -> Iterator[WritingRun]:
    """Start a run, and suspend its storage during a save; `changes` override keys of the recipe."""
    with s3_server() as (server, options):
        saving = {"folder": "s3://bucket/runs", "storage_options": options}
        # The interval of saves is longer than the run: only the signal and the stop ask for a state.
        controller = {"drain_s": 1.0, "save_every": ENDLESS, **changes.pop("controller", {})}
        tables = {"run": {"kind": "sft"}, "evaluation": {}, "sft": {"num_steps": ENDLESS}, **changes}
        make_workdir(folder, **tables, controller=controller, policy={"saving": saving})
        with run(folder) as command:
            command.wait_until(lambda: num_steps(folder) >= 2, "two steps")
            server.send_signal(signal.SIGSTOP)
            policy = command.process_titled("policy-0")
            policy.send_signal(signal.SIGUSR1)
            command.wait_for_output("write_begun")
            yield WritingRun(folder, command, policy, server, Storage("s3://bucket/runs", options))


def write_outlives_the_controller(folder: Path) -> None:
    with run_during_a_write(folder, controller={"stop_s": 2.0}) as writing:
        writing.policy.suspend()  # as busy with a long step
        writing.command.interrupt()
        writing.await_policy()
        writing.policy.resume()
        writing.assert_completes(1)


def write_outlives_the_time_to_stop(folder: Path) -> None:
    with run_during_a_write(folder, launch={"stop_s": 1.0}) as writing:
        writing.command.interrupt()
        writing.await_policy()
        writing.assert_completes(1)
        assert writing.command.errors.startswith("starling: the run did not stop gracefully within 1 s")


def write_outlives_a_failed_service(folder: Path) -> None:
    reinforcement = {"run": {"kind": "rl"}, "sft": {"num_steps": 2}, "rl": {"num_steps": ENDLESS}}
    with run_during_a_write(folder, **reinforcement, launch={"max_restarts": 0}) as writing:
        writing.command.wait_for_output("joined", "replica=reward-0")
        writing.command.process_titled("reward-0").kill()
        writing.await_policy()
        writing.assert_completes(1)
        assert sentence(writing.command).startswith("reward-0 was killed by SIGKILL")


def sigterm_to_all_processes_stops_gracefully(folder: Path) -> None:
    # As systemd and Slurm send it: to the supervisor, its fork server and every service at once.
    with run_during_a_write(folder) as writing:
        for process in writing.command.processes():
            process.terminate()
        writing.command.wait_for_output("write_awaited")
        writing.assert_completes(0)
        assert writing.command.errors == ""
        assert f"stopped at step {num_steps(folder)} of " in writing.command.output


def second_ctrl_c_kills(folder: Path) -> None:
    with run_during_a_write(folder, controller={"stop_s": 2.0}) as writing:
        writing.command.interrupt()
        writing.await_policy()
        writing.command.interrupt()
        assert writing.command.wait() == 130, writing.command.transcript()
    assert sentence(writing.command).startswith(
        "killed by a second Ctrl-C; what was being written is not complete, and `starling"
    )


@pytest.mark.campaign
def test_end_of_a_run_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    scenarios = (write_outlives_the_controller, sigterm_to_all_processes_stops_gracefully)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))


@pytest.mark.campaign
def test_run_that_fails_or_is_killed_waits_for_a_write_or_says_what_is_incomplete(tmp_path: Path) -> None:
    scenarios = (write_outlives_the_time_to_stop, write_outlives_a_failed_service, second_ctrl_c_kills)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))

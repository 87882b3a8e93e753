"""End of a run while its policy still writes to a storage that hangs: the run waits, and Ctrl-C twice does not."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from system_runs import Command, attempt, make_workdir, num_steps, run, run_concurrently, sentence

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


@contextmanager
def run_that_fails_during_a_write(folder: Path) -> Iterator[tuple[Command, subprocess.Popen[str], Storage]]:
    """Yield a run that was stopped while its storage hung, and whose controller has given up."""
    with s3_server() as (server, options):
        saving = {"folder": "s3://bucket/runs", "storage_options": options}
        # The interval of saves is longer than the run: only the signal and the stop ask for a state.
        controller = {"stop_s": 2.0, "drain_s": 1.0, "save_every": ENDLESS}
        changes = {"run": {"kind": "sft"}, "evaluation": {}, "sft": {"num_steps": ENDLESS}}
        make_workdir(folder, **changes, controller=controller, policy={"saving": saving})
        with run(folder) as command:
            command.wait_until(lambda: num_steps(folder) >= 2, "two steps")
            server.send_signal(signal.SIGSTOP)
            policy = command.process_titled("policy-0")
            policy.send_signal(signal.SIGUSR1)
            made = num_steps(folder)
            command.wait_until(lambda: num_steps(folder) > made + 1, "steps while the state is written")
            command.interrupt()
            command.wait_for_output("policy-0 is still writing a state or a checkpoint")
            assert policy.is_running()
            yield command, server, Storage("s3://bucket/runs", options)


def write_is_completed(folder: Path) -> None:
    with run_that_fails_during_a_write(folder) as (command, server, storage):
        server.send_signal(signal.SIGCONT)
        assert command.wait() == 1, command.transcript()
        log = (attempt(folder) / "logs" / "policy-0.log").read_text()
        assert re.search(r"write_awaited .*the state of version \d+", log), log
        states = [path for path in storage.fs.find(storage.root) if path.endswith("state.json")]
        assert states, "the state that was being written is complete"
        assert find_state(f"s3://{states[0].rpartition('/')[0]}", storage.fs.storage_options).state.version >= 2


def second_ctrl_c_kills(folder: Path) -> None:
    with run_that_fails_during_a_write(folder) as (command, _, _):
        command.interrupt()
        assert command.wait() == 130, command.transcript()
    assert sentence(command).startswith(
        "killed by a second Ctrl-C; what was being written is not complete, and `starling"
    )


def test_end_of_a_run_waits_for_a_write_in_progress(tmp_path: Path) -> None:
    scenarios = (write_is_completed, second_ctrl_c_kills)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))

"""Runs whose weights are copied into memory of the device, or page-locked memory, while training waits."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest
from system_runs import attempt, make_workdir, metrics, run, run_concurrently, starling_command


def published(folder: Path, policy: str, *flags: str) -> None:
    with run(make_workdir(folder), "--policy.snapshots", policy, *flags) as command:
        assert command.wait() == 0, command.transcript()
    log = (attempt(folder) / "logs" / "policy-0.log").read_text()
    assert re.findall(r" snapshots +place=(\w+)", log) == [policy], log
    adopted = metrics(folder, "adopted")
    assert len(adopted) > 1, "versions after the first"
    assert all(line["attested"] for line in adopted)


@pytest.mark.campaign
@pytest.mark.system
def test_run_publishes_by_any_policy_of_snapshots(tmp_path: Path) -> None:
    """`device` is a second allocator on a CPU, whose memory can be reached by its interface only."""
    run_concurrently(
        partial(published, tmp_path / "device", "device"),
        partial(published, tmp_path / "pinned", "pinned"),
    )


@pytest.mark.system
@pytest.mark.campaign
def test_colocated_run_publishes_from_memory_of_the_device(tmp_path: Path) -> None:
    published(tmp_path, "device", "--launch.colocate", "true")


@pytest.mark.campaign
@pytest.mark.system
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can take the right to lock memory from root")
def test_policy_that_may_lock_no_memory_ends_at_the_start(tmp_path: Path) -> None:
    prefix = ("prlimit", "--memlock=0", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    flags = ("--policy.snapshots", "pinned")
    folder = make_workdir(tmp_path)
    with starling_command(folder, "run", "tiny.toml", *flags, name="run", prefix=prefix) as command:
        assert command.wait() == 1, command.transcript()
    assert "policy-0 exited with code 2: policy.snapshots = 'pinned': " in command.errors
    assert "bytes cannot be locked into memory" in command.errors
    assert "restarting" not in command.transcript(), "the next attempt would fail, too"
    assert not metrics(folder, "published")

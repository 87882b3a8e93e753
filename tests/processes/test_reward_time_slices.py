"""Time slices of the reward service's threads and workers, as the kernel reports them."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from test_reward_hostile import HTTP, ask, service
from test_reward_http import eventually

from starling.reward.score.workers.time_slice import SHORT_S

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
HAS_SLICES = tuple(map(int, platform.release().split(".")[:2])) >= (6, 12)
SCORER = """
[[reward.scorers]]
name = "{folder}/ends.py:ends"
tasks = ["ends"]
retries = 0
num_workers = 1
"""
ENDS = """
import os


def ends(completion, reference, prompt_text, metadata):
    os._exit(3)
"""


def slice_s(thread: int) -> float:
    """Return the slice of a thread, in seconds: `sched_runtime` of sched_getattr(2)."""
    attributes = ctypes.create_string_buffer(56)
    assert ctypes.CDLL(None).syscall(SCHED_GETATTR, thread, attributes, 56, 0) == 0
    runtime: int = struct.unpack_from("=Q", attributes, 24)[0]
    return runtime / 1e9


def worker_slices(process: psutil.Process) -> set[float]:
    """Return the slices of the processes below a service which are there now, without those that end meanwhile."""
    return set(slices(child.pid for child in process.children(recursive=True) if "worker" in child.name()))


def slices(threads: Iterable[int]) -> Iterable[float]:
    for thread in threads:
        if psutil.pid_exists(thread):
            yield slice_s(thread)


@pytest.mark.skipif(SCHED_GETATTR is None or not HAS_SLICES, reason="the kernel has no slices of ordinary threads")
def test_only_workers_that_are_replaced_often_lose_the_short_slice(tmp_path: Path) -> None:
    ordinary_s = slice_s(0)
    assert ordinary_s > SHORT_S
    (tmp_path / "ends.py").write_text(ENDS)
    with service(tmp_path, HTTP + SCORER.format(folder=tmp_path)) as (process, client):
        assert {slice_s(thread.id) for thread in process.threads()} == {SHORT_S}
        assert worker_slices(process) == {SHORT_S}
        for _ in range(4):
            assert ask(client, "ends", "abc")["statuses"] == ["reward_error"]
        assert eventually(lambda: client.send("GET", "/readyz").status == 200)
        assert eventually(lambda: worker_slices(process) == {SHORT_S, ordinary_s})
        assert ask(client, "honest", "abc")["rewards"] == [1.0]

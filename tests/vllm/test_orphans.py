"""vLLM's processes end when their replica is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from engines import DEADLINE_S, checkpoint, engine_driver, has_avx512

from starling.rollout.engine.vllm.processes import engine_processes, shared_memory


def replica(folder: Path, pipe: Connection) -> None:
    with engine_driver(folder, vllm={"tensor_parallel_size": 2}):
        ours = engine_processes()
        pipe.send(([process.pid for process in ours], shared_memory(ours)))
        pipe.recv()  # never ends by itself


@pytest.mark.campaign
def test_engine_processes_end_with_their_replica(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", "llama", 0)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=replica, args=(folder, theirs))
    process.start()
    try:
        assert mine.poll(2 * DEADLINE_S)
        pids, files = mine.recv()
        left = [psutil.Process(pid) for pid in pids]
        assert len(left) >= 3  # vLLM's engine process and two workers
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + DEADLINE_S
        while left := [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < end, left
            psutil.wait_procs(left, 0.2)
        files = {file for file in files if file.name.startswith("vllm_")}  # Python's tracker removes others
        assert bool(files) == has_avx512()  # without it vLLM's workers on a CPU communicate by gloo
        assert not [file for file in files if file.exists()]
    finally:
        process.kill()
        process.join(DEADLINE_S)

"""The processes of an engine, and what they leave behind."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Final

import psutil  # which vLLM brings

from starling.common.settings import environment_variable

PYTHONS: Final = "psm_"
OURS: Final = (PYTHONS, "vllm_")
"""How the names of vLLM's begin; weights may be read from files of others."""
ENGINE_NAME: Final = "EngineCore"
"""What vLLM calls the one process that is a child of ours."""


def engine_processes() -> set[psutil.Process]:
    """Return the processes of all engines that this process has started, those that they started included."""
    found: set[psutil.Process] = set()
    for child in multiprocessing.active_children():
        if child.name.startswith(ENGINE_NAME) and child.pid is not None:
            try:
                process = psutil.Process(child.pid)
                found |= {process, *process.children(recursive=True)}
            except psutil.NoSuchProcess:
                pass
    return found


def kill_processes(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Kill what is left of `processes`, and wait for it, `timeout_s` at most.

    A process is known by its number and the time at which it began: another one with its number is left alone.
    """
    left = [process for process in processes if process.is_running()]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout_s)


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the files of shared memory by which these processes of vLLM's talk to each other."""
    found: set[Path] = set()
    for process in processes:
        try:
            found |= {Path(part.path) for part in process.memory_maps()}
        except psutil.NoSuchProcess:
            pass
    return {file for file in found if file.parent == SHARED_MEMORY and file.name.startswith(OURS)}


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove files that vLLM leaves when its processes are killed, and some of which it always leaves."""
    for file in files:
        if file.exists():
            file.unlink()
            if file.name.startswith(PYTHONS):  # else Python's tracker, which outlives them, would miss it at the end
                resource_tracker.unregister(f"/{file.name}", "shared_memory")


# JOINED from starling.rollout.engine.vllm.watch: No process of an engine outlives its replica, however that
# ends: vLLM's own process would wait for ever.  What it starts ends with it, but it is a child of the
# replica's without any code of ours. So each worker watches the replica, from before it loads anything, and
# ends the process above it, too.

SHARED_MEMORY: Final = Path("/dev/shm")
REPLICA: Final = "STARLING_VLLM_REPLICA"
"""In the environment of the engine's processes: the process id of the replica."""


def end_with_replica() -> None:
    """Have a thread wait for the end of the replica; returns at once."""
    replica = environment_variable(REPLICA)
    if replica is not None:
        threading.Thread(target=_await_end, args=(int(replica), os.getppid()), name="watch", daemon=True).start()


def _await_end(replica: int, parent: int) -> None:
    try:
        handle = os.pidfd_open(replica)
        select.select([handle], [], [])  # readable once it has ended
    except ProcessLookupError:
        pass
    meeting = environment_variable("VLLM_DIST_IDENT")  # by which workers on CPUs name the memory that they share
    for file in SHARED_MEMORY.glob(f"{meeting}-*") if meeting else ():
        file.unlink(missing_ok=True)
    if parent != replica and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

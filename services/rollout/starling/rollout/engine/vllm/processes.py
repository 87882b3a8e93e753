"""Processes of a vLLM engine: finding and killing them, removing their shared memory, and ending them with the replica.

vLLM's scheduler process is a child of the replica that runs no code of Starling, and it does not end by itself when the
replica is killed. So each worker watches the replica, from before it loads anything, and kills that process as well.
"""

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

SHARED_MEMORY: Final = Path("/dev/shm")
REPLICA: Final = "STARLING_VLLM_REPLICA"
"""Environment variable of the engine's processes: the process id of the replica."""
PULLS: Final = "STARLING_VLLM_PULLS"
"""Environment variable of workers that are not on the replica's host: the socket for the messages of their pulls."""
SERVED_AT: Final = "STARLING_VLLM_SERVED_AT"
"""As well: the address of their own host, at which they serve weights to others."""
OFFER_KEY: Final = "STARLING_VLLM_OFFER_KEY"
"""Environment variable of workers whose engine is on several hosts: the key of sealed offers, in hexadecimal digits."""
PYTHON_PREFIX: Final = "psm_"
VLLM_PREFIXES: Final = (PYTHON_PREFIX, "vllm_")
"""Prefixes of vLLM's files in shared memory; other files there may be buffers of weight transports."""
ENGINE_NAME: Final = "EngineCore"
"""vLLM's name for the child process that runs its scheduler."""


def engine_processes() -> set[psutil.Process]:
    """Return the processes of all engines that this process has started, with their descendants."""
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
    """Kill those of `processes` that still run, and wait for them, `timeout_s` at most.

    psutil identifies a process by its id and start time, so a reused process id is left alone.
    """
    left = [process for process in processes if process.is_running()]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(left, timeout_s)


def shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared memory files through which these vLLM processes communicate."""
    found: set[Path] = set()
    for process in processes:
        try:
            found |= {Path(part.path) for part in process.memory_maps()}
        except psutil.NoSuchProcess:
            pass
    return {file for file in found if file.parent == SHARED_MEMORY and file.name.startswith(VLLM_PREFIXES)}


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove the shared memory files that vLLM leaves behind, always or when its processes are killed."""
    for file in files:
        if file.exists():
            file.unlink()
            if file.name.startswith(PYTHON_PREFIX):  # else Python's resource tracker reports it as leaked at exit
                resource_tracker.unregister(f"/{file.name}", "shared_memory")


def end_with_replica() -> None:
    """Start a thread that kills this worker and vLLM's scheduler process when the replica ends."""
    replica = environment_variable(REPLICA)
    if replica is not None:
        threading.Thread(target=_await_end, args=(int(replica), os.getppid()), name="watch", daemon=True).start()


def _await_end(replica: int, parent: int) -> None:
    try:
        handle = os.pidfd_open(replica)
        select.select([handle], [], [])  # readable once the replica has ended
    except ProcessLookupError:
        pass
    group = environment_variable("VLLM_DIST_IDENT")  # prefix of the shared memory of workers on CPUs
    for file in SHARED_MEMORY.glob(f"{group}-*") if group else ():
        file.unlink(missing_ok=True)
    if parent != replica and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

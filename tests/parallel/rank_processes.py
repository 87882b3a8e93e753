"""Ranks of a mesh as forked processes, connected by gloo over the loopback interface."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

DEADLINE_S = 600.0
"""For all ranks together, on a busy machine."""
COLLECTIVE_S = 60.0
"""For one collective: ranks that wait for a dead one fail."""


def run_ranks(num_ranks: int, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `target(rank, *arguments)` returns in each of `num_ranks` processes with a default process group.

    Raises:
        AssertionError: a rank raised, died, or the deadline passed; all of them are then killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        return _run_all([(rank, num_ranks, store, target, arguments) for rank in range(num_ranks)])


def run_replicas(num_replicas: int, num_ranks: int, target: Callable[..., Any], *arguments: Any) -> list[list[Any]]:
    """Return what `target(rank, replica, *arguments)` returns in each rank of each replica; see `run_ranks`.

    Each replica has a default process group of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = _run_all(
            [
                (rank, num_ranks, Path(folder) / f"store-{replica}", target, (replica, *arguments))
                for replica in range(num_replicas)
                for rank in range(num_ranks)
            ]
        )
    return [found[first : first + num_ranks] for first in range(0, len(found), num_ranks)]


def _run_all(ranks: list[tuple[int, int, Path, Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return the results of processes; for what they do see `_run`."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in ranks:
        pipe, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, *rank), daemon=True)
        process.start()
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
    try:
        return _results(pipes)
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
            process.join()


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    ends = monotonic() + DEADLINE_S
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, ends - monotonic()))
        assert ready, f"after {DEADLINE_S:.0f} s, {len(waiting)} of {len(pipes)} ranks have not ended"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                succeeded, result = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} has died") from None
            assert succeeded, f"rank {rank}:\n{result}"
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _run(
    pipe: Connection, rank: int, num_ranks: int, store: Path, target: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        pipe.send((True, target(rank, *arguments)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:  # the test raises it
        pipe.send((False, traceback.format_exc()))
        raise
    finally:
        pipe.close()
        # Without the handlers of the test process, whose copy this is.
        os._exit(0)

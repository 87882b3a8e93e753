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

DEADLINE_S = 120.0
"""For all ranks together, on a busy machine."""
COLLECTIVE_S = 60.0
"""For one collective: ranks that wait for a dead one fail."""


def run_ranks(num_ranks: int, target: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what `target(rank, *arguments)` returns in each of `num_ranks` processes with a default process group.

    Raises:
        AssertionError: a rank raised, died, or the deadline passed; all of them are then killed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            pipe, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, num_ranks, Path(folder) / "store", theirs, target, arguments), daemon=True
            )
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
    rank: int, num_ranks: int, store: Path, pipe: Connection, target: Callable[..., Any], arguments: tuple[Any, ...]
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

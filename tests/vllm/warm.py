"""Forked engine processes: a fork server imports vLLM once, instead of every process that the tests start.

Importing vLLM takes 8 s of CPU time per process. `test_service.py`, `test_orphans.py` and the fixture `cold_processes`
start processes without the fork server, as in production. Processes on GPUs always start that way.

Forked engine processes are killed when an engine is closed, without the 2 s in which they could exit by themselves.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from vllm.platforms import current_platform

from starling.rollout.engine.vllm import async_llm, cpu, launch

HERE = Path(__file__).parent
GET_CONTEXT = "vllm.v1.engine.utils.get_mp_context"
"""Function with which vLLM starts the process of an engine."""
SHUTDOWN_S = async_llm.SHUTDOWN_S


class WarmProcess(ForkServerProcess):
    """A process of the fork server with the environment of the process that starts it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class WarmContext(ForkServerContext):
    """Starts processes as forks of the fork server."""

    Process = WarmProcess


@contextmanager
def warm_processes() -> Iterator[None]:
    """Make vLLM fork its processes from a fork server that has imported what `preloaded.py` lists."""
    if not current_platform.is_cpu():
        yield
        return
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    context = WarmContext()
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        with launch.with_environment(launch.ENVIRONMENT | cpu.ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}):
            patch.setenv("PYTHONPATH", path)
            forkserver.ensure_running()
        patch.undo()
        patch.setattr(GET_CONTEXT, lambda: context)
        patch.setattr(async_llm, "SHUTDOWN_S", 0.0)
        yield


@contextmanager
def cold_processes() -> Iterator[None]:
    """Make vLLM spawn its processes, as in production."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GET_CONTEXT, lambda: multiprocessing.get_context("spawn"))
        patch.setattr(async_llm, "SHUTDOWN_S", SHUTDOWN_S)
        yield


def process_context() -> BaseContext:
    """Return the context for other processes of the tests."""
    return WarmContext() if current_platform.is_cpu() else multiprocessing.get_context("spawn")

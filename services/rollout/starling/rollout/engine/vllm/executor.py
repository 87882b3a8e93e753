"""The process between the replica and several workers, where there is one: vLLM's scheduler lives in it.

vLLM asks there, too, how large media may be, and lets nobody in but by the class of its executor, which that process
imports. For a single worker it is the worker's own process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from starling.rollout.engine.vllm import multimodal as media

media.take_prepared_prompts()


class WorkerProcesses(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's own, by a name that brings this module along."""


def executor_class(config: Any) -> type[Executor]:
    """Return the class of the executor for vLLM's `config`."""
    found = Executor.get_class(config)
    return WorkerProcesses if found is MultiprocExecutor else found

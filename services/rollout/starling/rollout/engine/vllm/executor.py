"""Executor class that brings Starling's multimodal processor into vLLM's scheduler process.

vLLM's scheduler looks up the sizes of media, too. With several workers it runs in a process of its own, and the only
code of ours that this process imports is the module of the executor class. With one worker it is the worker's process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from starling.rollout.engine.vllm import multimodal

multimodal.take_prepared_prompts()


class WorkerProcesses(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor for several workers, under a name whose import loads this module."""


def executor_class(config: Any) -> type[Executor]:
    """Return the class of the executor for vLLM's `config`."""
    found = Executor.get_class(config)
    return WorkerProcesses if found is MultiprocExecutor else found

"""Processes that hold the parts of a vLLM model like vLLM's workers, without an engine."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.update(
    GLOO_SOCKET_IFNAME="lo",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs

DEADLINE_S = 120


def engine_config(folder: Path, tp: int, pp: int, whole_experts: bool = False, **others: Any) -> VllmConfig:
    """Return vLLM's configuration for these arguments."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "enable_expert_parallel": whole_experts,
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 32,
        "distributed_executor_backend": "mp",
        **others,
    }
    return EngineArgs(**arguments).create_engine_config()


def in_workers(
    check: Callable[[int, Path, VllmConfig], None], config: VllmConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `check` with each rank, `folder` and `config` in its own process; all must succeed."""
    group = f"starling-test-{os.getpid()}-{folder.name}"
    monkeypatch.setenv("VLLM_DIST_IDENT", group)
    context = multiprocessing.get_context("fork")
    workers = []
    for rank in range(config.parallel_config.world_size):
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_run, args=(check, rank, folder, config, theirs), daemon=True)
        worker.start()
        theirs.close()
        workers.append((worker, mine))
    try:
        for rank, (_, answer) in enumerate(workers):
            assert answer.poll(DEADLINE_S), f"worker {rank} did not answer within {DEADLINE_S} s"
            if error := answer.recv():
                pytest.fail(f"worker {rank}: {error}")
    finally:
        for worker, answer in workers:
            worker.kill()
            worker.join()
            answer.close()
        for left in Path("/dev/shm").glob(f"{group}-*"):  # vLLM does not remove them
            left.unlink()


def _run(
    check: Callable[[int, Path, VllmConfig], None], rank: int, folder: Path, config: VllmConfig, answer: Connection
) -> None:
    parallel = config.parallel_config
    try:
        with set_current_vllm_config(config):
            init_distributed_environment(parallel.world_size, rank, f"file://{folder}/meeting", 0, "gloo")
            initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
            torch.set_default_dtype(config.model_config.dtype)
            check(rank, folder, config)
        answer.send("")
    except BaseException:  # noqa: BLE001 - all that went wrong is for the parent to show
        answer.send(traceback.format_exc())
    finally:
        answer.close()
        os._exit(0)  # threads of the process groups must not keep the process alive

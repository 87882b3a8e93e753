"""How vLLM is told of quantised weights, and what it calls their parts.

It reads of the model's configuration which layers are quantised and how, as if a checkpoint in that form were there.
The names below are those of its parameters as it makes them, before it packs them for its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.common.errors import ConfigError
from starling.rollout.engine.base import EngineSpec
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.parameters import ParameterPart
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.layouts.weights import Config
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import QuantFormat
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, QuantRecipe, linear_weights

WEIGHTS: Final = {"type": "float", "symmetric": True, "dynamic": False}
ACTIVATIONS: Final = {"type": "float", "symmetric": True, "dynamic": True, "num_bits": 8}


class VllmFormat(msgspec.Struct, frozen=True, kw_only=True):
    """One value of `weights.quantise` in vLLM."""

    weights: dict[str, Any]
    """What compressed-tensors says of the weights; empty where the form is one of ModelOpt's."""
    activations: dict[str, Any] | None = None
    """The same of activations; None to multiply with those that there are."""
    layout: str = ""
    """compressed-tensors' name for how codes and scales are stored."""
    algorithm: str = ""
    """ModelOpt's name for the form."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Ends of names that travel, and what vLLM calls them."""
    scheme: str = ""
    """vLLM's class that knows what GPUs it takes."""

    def config(self, kept: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint in this form; `kept` are modules that are not quantised."""
        ignore = sorted(kept)
        if self.algorithm:
            return {"quant_method": "modelopt", "quant_algo": self.algorithm, "group_size": 16, "ignore": ignore}
        group = {
            "targets": ["Linear"],
            "weights": WEIGHTS | self.weights,
            "input_activations": self.activations,
            "format": self.layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "ignore": ignore,
            "config_groups": {"group_0": group},
        }

    def parameter(self, name: str) -> str:
        """Return vLLM's name for what travels as `name`."""
        for end, instead in self.renamed:
            if name.endswith(end):
                return name.removesuffix(end) + instead
        return name


_LAYERS: Final = "vllm.model_executor.layers.quantization"
_SCHEMES: Final = f"{_LAYERS}.compressed_tensors.schemes"
VLLM_FORMATS: Final = {
    "fp8_row": VllmFormat(
        weights={"num_bits": 8, "strategy": "channel"},
        activations=ACTIVATIONS | {"strategy": "token"},
        layout="float-quantized",
        scheme=f"{_SCHEMES}:CompressedTensorsW8A16Fp8",
    ),
    "fp8_block": VllmFormat(
        weights={"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        activations=ACTIVATIONS | {"strategy": "group", "group_size": 128},
        layout="float-quantized",
        renamed=(("weight_scale_inv", "weight_scale"),),
        scheme=f"{_SCHEMES}:CompressedTensorsW8A16Fp8",
    ),
    "mxfp8": VllmFormat(
        weights={"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        layout="mxfp8-quantized",
        scheme=f"{_SCHEMES}:CompressedTensorsW8A8Mxfp8",
    ),
    "mxfp4": VllmFormat(
        weights={"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        layout="mxfp4-pack-quantized",
        renamed=(("weight", "weight_packed"),),
        scheme=f"{_SCHEMES}:CompressedTensorsW4A4Mxfp4",
    ),
    # ModelOpt's, as it multiplies with the tensor's scale: compressed-tensors divides by its inverse, which is rounded.
    # Of four-bit activations nothing is said: theirs would need a scale that is measured beforehand.
    "nvfp4": VllmFormat(weights={}, algorithm="W4A16_NVFP4", scheme=f"{_LAYERS}.modelopt:ModelOptNvFp4Config"),
}
"""By `weights.quantise`. GPUs that have no FP8 multiply codes of eight bits by the kernels for weights alone."""


def recipe_of(form: str) -> QuantRecipe:
    """Return what a policy does for `weights.quantise`, and what vLLM's workers receive."""
    return linear_weights(form, FUSED_BY_VLLM)


def overrides(spec: EngineSpec) -> dict[str, Any]:
    """Return what vLLM is to read in place of the model's configuration; empty for weights as the policy has them.

    Raises:
        WeightsError: there is no table of the model's tensors.
    """
    form = spec.weights.quantise
    if not form:
        return {}
    recipe, model = recipe_of(form), model_of(_config(spec.path), spec.model.dtype)
    weights = [weight.spec for weight in model.weights if weight.spec.name.endswith(".weight")]
    kept = {spec.name.removesuffix(".weight") for spec in weights if recipe.format_of(spec) is None}
    return {"quantization_config": VLLM_FORMATS[form].config(kept)}


def check_format(spec: EngineSpec) -> None:
    """Check that vLLM can hold the weights as `weights.quantise` says.

    Raises:
        ConfigError: naming the setting, and what does not fit.
        WeightsError: there is no table of the model's tensors.
    """
    form = spec.weights.quantise
    if spec.rollout.load_weights:
        raise ConfigError(
            f"weights.quantise = {form!r} is for weights that a policy quantises, and vllm is to load those of "
            "model.path (rollout.load_weights); leave weights.quantise empty, or set rollout.engine = 'transformers'"
        )
    config = _config(spec.path)
    if "kv_lora_rank" in config:
        raise ConfigError(
            f"weights.quantise = {form!r}: vllm makes further weights of those of latent attention when it loads them, "
            "which an adoption in codes would not renew; leave weights.quantise empty, or set rollout.engine = "
            "'transformers'"
        )
    _check_device(form, has_experts=model_of(config, spec.model.dtype).num_experts > 0)
    if form == "nvfp4" and spec.model.dtype == "float32":
        raise ConfigError(
            "weights.quantise = 'nvfp4' on vllm computes in bfloat16 only; set model.dtype = 'bfloat16', or "
            "another form"
        )
    settings = spec.rollout.vllm
    for rank in range(settings.tensor_parallel_size * settings.pipeline_parallel_size):
        _check_groups(spec, config, rank)


def _check_groups(spec: EngineSpec, config: Config, rank: int) -> None:
    """Check that no group of elements with one scale is cut, and that each of a fused parameter begins with one."""
    settings, form = spec.rollout.vllm, spec.weights.quantise
    table = worker_table(
        config,
        rank,
        tp=settings.tensor_parallel_size,
        pp=settings.pipeline_parallel_size,
        whole_experts=bool(settings.engine_args.get("enable_expert_parallel")) and settings.tensor_parallel_size > 1,
        dtype=spec.model.dtype,
    )
    recipe, tensors = recipe_of(form), {tensor.name: tensor for tensor in table.tensors}
    for parameter in table.parameters:
        for part in parameter.parts:
            tensor = tensors[part.tensor]
            found = recipe.format_of(tensor)
            if found is None or _is_whole(part, tensor, found, fused=len(parameter.parts) > 1):
                continue
            raise ConfigError(
                f"weights.quantise = {form!r} has one scale of {found.rows} x {found.columns} elements, and worker "
                f"{rank} of vllm would hold {' x '.join(map(str, part.box.size))} of {tensor.name}; choose another "
                "form, or a smaller rollout.vllm.tensor_parallel_size"
            )


def _is_whole(part: ParameterPart, tensor: TensorSpec, form: QuantFormat, *, fused: bool) -> bool:
    """Return whether a part holds whole groups; the last rows of a tensor, with nothing behind them, may be fewer."""
    (row, column), (rows, columns) = part.box.offset[-2:], part.box.size[-2:]
    ends = not fused and row + rows == tensor.shape[-2]
    step = form.columns or 1
    return not (row % form.rows or (rows % form.rows and not ends) or column % step or columns % step)


def _check_device(form: str, *, has_experts: bool) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        if has_experts:
            raise ConfigError(
                f"weights.quantise = {form!r}: vLLM's build for CPUs computes with no routed experts in codes; leave "
                "weights.quantise empty, or set rollout.engine = 'transformers'"
            )
        return
    module, _, name = VLLM_FORMATS[form].scheme.partition(":")
    least = int(getattr(import_module(module), name).get_min_capability())
    capability = current_platform.get_device_capability()
    if capability is not None and capability.to_int() < least:
        raise ConfigError(
            f"weights.quantise = {form!r} needs a GPU of compute capability {least / 10} for vllm, and this one has "
            f"{capability.to_int() / 10}; leave weights.quantise empty, or set rollout.engine = 'transformers'"
        )


def _config(path: Path) -> Config:
    config: Config = json.loads((path / "config.json").read_text())
    return config

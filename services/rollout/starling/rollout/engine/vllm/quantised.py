"""Quantisation configs for vLLM, and the parameter names that it uses.

vLLM learns from the `quantization_config` of the model's configuration which layers are quantised and how, as for a
quantised checkpoint. The parameter names are those before vLLM packs the parameters for its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import msgspec

from starling.common.errors import ConfigError
from starling.rollout.engine.base import EngineSpec
from starling.weightsync.layouts.families import FAMILIES
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import ParameterPart, in_terms_of
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.layouts.weights import Config
from starling.weightsync.plan.layout import TensorSpec
from starling.weightsync.quantise.formats import QuantFormat
from starling.weightsync.quantise.recipe import FUSED_BY_VLLM, QuantRecipe, linear_weights

if TYPE_CHECKING:  # they import vLLM
    from starling.weightsync.vllm.quantised import QuantisedModel
    from starling.weightsync.vllm.recorded import PublishedModel

WEIGHTS: Final = {"type": "float", "symmetric": True, "dynamic": False}
ACTIVATIONS: Final = {"type": "float", "symmetric": True, "dynamic": True, "num_bits": 8}


EXPERTS: Final = (r"re:.*\.experts\..*",)
"""All routed experts: vLLM names their tensors otherwise in each family."""
EXPERTS_OF_MODELOPT: Final = ("*.experts", "*.experts.*")


class VllmFormat(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's description of one value of `weights.quantise`."""

    weights: dict[str, Any]
    """The weights in the terms of compressed-tensors; empty for formats of ModelOpt."""
    activations: dict[str, Any] | None = None
    """The activations in the same terms; None if they are not quantised."""
    layout: str = ""
    """compressed-tensors' name of the storage format of codes and scales."""
    algorithm: str = ""
    """ModelOpt's name of the format."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Suffixes of transferred tensor names, and vLLM's suffixes for them."""
    scheme: str = ""
    """Import path of vLLM's class that states the required compute capability."""

    def config(self, unquantised: Iterable[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint in this format; `unquantised` are modules to leave out.

        So are routed experts: policies publish those of a layer as one tensor, which recipes do not quantise.
        """
        ignore = [*sorted(unquantised), *(EXPERTS_OF_MODELOPT if self.algorithm else EXPERTS)]
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
        """Return vLLM's name of the transferred tensor `name`."""
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
    # ModelOpt's format multiplies by the tensor's scale; compressed-tensors divides by its inverse, which is rounded.
    # Activations stay unquantised: four-bit ones would need a calibrated scale.
    "nvfp4": VllmFormat(weights={}, algorithm="W4A16_NVFP4", scheme=f"{_LAYERS}.modelopt:ModelOptNvFp4Config"),
}
"""By `weights.quantise`. On GPUs without FP8, vLLM uses weight-only kernels for eight-bit codes."""


def recipe_of(format_name: str) -> QuantRecipe:
    """Return the recipe by which the policy quantises and vLLM's workers receive, for `weights.quantise`."""
    return linear_weights(format_name, FUSED_BY_VLLM)


def published_model(full: PublishedModel, format_name: str) -> QuantisedModel:
    """Return what a policy publishes of the model `full`, for `weights.quantise`."""
    from starling.weightsync.vllm.quantised import QuantisedModel

    return QuantisedModel(full, recipe_of(format_name), VLLM_FORMATS[format_name].parameter)


def overrides(spec: EngineSpec) -> dict[str, Any]:
    """Return the overrides of the model's configuration for vLLM; empty if the weights are not quantised."""
    format_name = spec.weights.quantise
    if not format_name:
        return {}
    model = published_model(_model(spec), format_name)
    return {"quantization_config": VLLM_FORMATS[format_name].config(model.unquantised_modules())}


def check_format(spec: EngineSpec) -> None:
    """Check that vLLM supports `weights.quantise` for this model and device.

    Raises:
        ConfigError: naming the setting, and the reason.
    """
    format_name = spec.weights.quantise
    if spec.rollout.load_weights:
        raise ConfigError(
            f"weights.quantise = {format_name!r} is for weights that a policy quantises, and vllm would load those of "
            "model.path (rollout.load_weights); leave weights.quantise empty, or set rollout.engine = 'transformers'"
        )
    config: Config = json.loads((spec.path / "config.json").read_text())
    if "kv_lora_rank" in config:
        raise ConfigError(
            f"weights.quantise = {format_name!r}: vllm derives further weights from those of latent attention when it "
            "loads them, which an adoption of quantised weights would not update; leave weights.quantise empty, or set "
            "rollout.engine = 'transformers'"
        )
    _check_device(format_name)
    if format_name == "nvfp4" and spec.model.dtype == "float32":
        raise ConfigError(
            "weights.quantise = 'nvfp4' on vllm computes in bfloat16 only; set model.dtype = 'bfloat16', or "
            "another format"
        )
    settings = spec.rollout.vllm
    if config.get("model_type") in FAMILIES:
        for rank in range(settings.tensor_parallel_size * settings.pipeline_parallel_size):
            _check_groups(spec, config, rank)


def _check_groups(spec: EngineSpec, config: Config, rank: int) -> None:
    """Check that no worker boundary or part of a fused parameter splits a group of elements that share a scale.

    Workers check it, too, by what is recorded; where there is a table it is known before vLLM starts.
    """
    settings, format_name = spec.rollout.vllm, spec.weights.quantise
    canonical = worker_table(
        config,
        rank,
        tp=settings.tensor_parallel_size,
        pp=settings.pipeline_parallel_size,
        whole_experts=bool(settings.engine_args.get("enable_expert_parallel")) and settings.tensor_parallel_size > 1,
        dtype=spec.model.dtype,
    )
    table = in_terms_of(canonical, transformers_table(config, spec.model.dtype))
    recipe, tensors = recipe_of(format_name), {tensor.name: tensor for tensor in table.tensors}
    for parameter in table.parameters:
        for part in parameter.parts:
            tensor = tensors[part.tensor]
            found = recipe.format_of(tensor)
            if found is None or _is_whole(part, tensor, found, fused=len(parameter.parts) > 1):
                continue
            raise ConfigError(
                f"weights.quantise = {format_name!r} has one scale of {found.rows} x {found.columns} elements, and "
                f"worker {rank} of vllm would hold {' x '.join(map(str, part.box.size))} of {tensor.name}; choose "
                "another format, or a smaller rollout.vllm.tensor_parallel_size"
            )


def _is_whole(part: ParameterPart, tensor: TensorSpec, quant_format: QuantFormat, *, fused: bool) -> bool:
    """Return whether a part consists of whole scale groups; the last group of rows of a tensor may be smaller."""
    (row, column), (rows, columns) = part.box.offset[-2:], part.box.size[-2:]
    ends = not fused and row + rows == tensor.shape[-2]
    step = quant_format.columns or 1
    return not (row % quant_format.rows or (rows % quant_format.rows and not ends) or column % step or columns % step)


def _check_device(format_name: str) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return
    module, _, name = VLLM_FORMATS[format_name].scheme.partition(":")
    least = int(getattr(import_module(module), name).get_min_capability())
    capability = current_platform.get_device_capability()
    if capability is not None and capability.to_int() < least:
        raise ConfigError(
            f"weights.quantise = {format_name!r} needs a GPU of compute capability {least / 10} for vllm, and this one "
            f"has {capability.to_int() / 10}; leave weights.quantise empty, or set rollout.engine = 'transformers'"
        )


def _model(spec: EngineSpec) -> PublishedModel:
    """Return the outline of the model that the policy publishes."""
    import torch

    from starling.weightsync.vllm.recorded import PublishedModel

    return PublishedModel(spec.path, getattr(torch, spec.model.dtype), trusted=spec.model.trust_remote_code)

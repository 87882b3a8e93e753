"""LoRA adapters in training: initial values from a file, the merged model, and peft's file format."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.model.load import all_tensors
from starling.weightsync.tensors.adapters import ADAPTER, adapted_layers, base_name, is_adapted, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_TRAINED: Final = "modules_to_save"
"""peft's name for the modules that are trained in full."""
_PREFIX: Final = "base_model.model."
"""Prefix of parameter names in peft's files."""
ADAPTERS_FILE: Final = "adapter_model.safetensors"
"""Name of the file of adapters in peft's format."""


def export_model(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of `model` with its adapters merged, under the names of a model without adapters.

    One layer at a time is merged, into a copy: `model` does not change by a bit. Merged layers move to the CPU at once,
    so the device needs memory for one more layer and not for a second model.
    """
    once = all_tensors(model)  # without the other names of tied weights
    weights = {
        base_name(name): tensor for name, tensor in model.state_dict().items() if name in once and not is_adapter(name)
    }
    for name, layer in adapted_layers(model) if is_adapted(model) else ():
        if name.endswith(".base_layer"):
            continue  # merged with the layer that contains it
        merged = _merged(layer).state_dict()
        weights.update({f"{base_name(name)}.{key}": tensor.cpu() for key, tensor in merged.items()})
    return weights


def merged_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors in whose places those of `export_model` are, by its names, before anything is merged.

    These are base weights, and the weights of modules that are trained in full.
    """
    found, trained = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in all_tensors(model).items():
        before, saved, after = name.partition(f".{_TRAINED}.{ADAPTER}.")
        if saved:
            trained[f"{before}.{after}"] = tensor
        elif not is_adapter(name):
            found[base_name(name)] = tensor
    return found | trained


def save_adapters(model: torch.nn.Module, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters of `model` into `folder` in peft's format: `PeftModel.from_pretrained` loads them.

    `weights` are copies of them by parameter name, which training does not change meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = _weights(model, weights)
    weights = {f"{_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    save_file(weights, folder / ADAPTERS_FILE, metadata={"format": "pt"})
    save_adapter_config(model, folder)


def save_adapter_config(model: torch.nn.Module, folder: Path) -> None:
    """Write the configuration of the adapters of `model` into `folder`, as peft expects it beside their weights."""
    config = copy.deepcopy(_config(model))
    config.inference_mode = True
    config.save_pretrained(str(folder))


def names_in_file(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that `save_adapters` gives to `tensors`, the adapters of `model`, by their own."""
    own = {id(tensor): name for name, tensor in tensors.items()}
    return {own[id(tensor)]: f"{_PREFIX}{name}" for name, tensor in _weights(model, tensors).items()}


def load_adapters(model: torch.nn.Module, folder: Path) -> None:
    """Load adapters in peft's format from `folder` into those of `model`, in place.

    Raises:
        ConfigError: there are none, they cannot be read, or their layers, rank or scale differ.
    """
    from peft import PeftConfig

    for name in ("adapter_config.json", ADAPTERS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"model.lora.adapter = {str(folder)!r} has no {name}: give a folder written by peft")
    try:
        saved, found = PeftConfig.from_pretrained(str(folder)), load_file(folder / ADAPTERS_FILE)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"the adapters in {folder} cannot be read ({reason}): give another folder") from error
    config = _config(model)
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"):
        in_folder, in_settings = getattr(saved, key, None), getattr(config, key)
        if in_folder != in_settings:
            raise ConfigError(
                f"the adapters in {folder} have {key} = {in_folder}, and [model.lora] {in_settings}: make them equal"
            )
    _fill(_weights(model), {name.removeprefix(_PREFIX): tensor for name, tensor in found.items()}, folder)


def _fill(live: dict[str, Tensor], weights: dict[str, Tensor], folder: Path) -> None:
    for name in sorted(live.keys() | weights.keys()):
        saved, own = weights.get(name), live.get(name)
        if saved is None or own is None or saved.shape != own.shape:
            raise ConfigError(
                f"the adapters in {folder} are of other layers than those of [model.lora]; the first difference: {name}"
            )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])


def _merged(layer: Any) -> torch.nn.Module:
    """Return a layer without an adapter that computes the same as `layer`."""
    if hasattr(layer, _TRAINED):
        trained: torch.nn.Module = layer.modules_to_save[ADAPTER]
        return trained
    copied = copy.deepcopy(layer)
    for _, part in adapted_layers(copied):
        part.merge()
    base: torch.nn.Module = copied.get_base_layer()
    return base


def _weights(model: torch.nn.Module, copies: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the parameters of the adapters, or `copies`, by their names in peft's files without the prefix."""
    from peft import get_peft_model_state_dict

    weights: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=copies, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return weights


def _config(model: torch.nn.Module) -> Any:
    return model.peft_config[ADAPTER]  # type: ignore[index]

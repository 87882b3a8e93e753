"""Loading a Hugging Face model for generation, and the names of its live weights."""

from __future__ import annotations

from pathlib import Path

import torch

from starling.algo.architecture import auto_class, random_model, turn_off_router_logits
from starling.algo.outline import cheap_outlines
from starling.common.settings import LoraSettings
from starling.rollout.engine.embedded.quantised import quantise_linears
from starling.rollout.engine.model_config import read_config, unloadable_folder
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.adapters import add_adapters, published_tensors


def build_model(
    path: str | Path,
    *,
    dtype: str,
    device: str = "auto",
    weights: bool,
    lora: LoraSettings | None = None,
    quantise: str = "",
    trust_remote_code: bool = False,
) -> torch.nn.Module:
    """Build the language model of folder `path`, with its vision tower if it has one, ready to generate.

    Args:
        path: a folder with `config.json` and, if `weights`, the weight files.
        dtype: element type of the weights, by its name in torch.
        device: their device; ``auto`` takes a GPU if there is one.
        weights: load the weights; otherwise they are initialised at random, until the policy's are adopted.
        lora: adapters to add; the base weights are then loaded in any case. The adapters are not merged: merging would
            round them to the element type of the base, and an adoption would have to compute instead of copy.
        quantise: the format of the linear layers, by its name in `quantise.FORMATS`; empty for `dtype`.
        trust_remote_code: run Python code from the folder.

    Raises:
        ConfigError: the folder, its configuration or its weights are missing or unreadable, or do not fit `lora` or
            `quantise`.
    """
    folder, element = Path(path), getattr(torch, dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = read_config(folder, trust_remote_code=trust_remote_code)
    turn_off_router_logits(config)
    model: torch.nn.Module
    try:
        if weights or lora is not None:
            with cheap_outlines():
                model = auto_class(config).from_pretrained(
                    folder, config=config, dtype=element, local_files_only=True, trust_remote_code=trust_remote_code
                )
        else:
            with torch.device(device):
                model = random_model(auto_class(config), config, element, trust_remote_code=trust_remote_code)
    except Exception as error:  # the user's folder: transformers and the folder's own code may raise anything
        raise unloadable_folder(folder, error, trust_remote_code) from error
    if lora is not None:
        add_adapters(model, lora, seed=0)  # replaced by the policy's at the first adoption
    model = model.to(device).eval().requires_grad_(False)
    if quantise:
        quantise_linears(model, linear_weights(quantise))
    return model


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model` by name, each tied tensor once.

    The names are those of `model.named_parameters()`, as in the policy; of an adapted model only the adapters.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return published_tensors(model, tensors)

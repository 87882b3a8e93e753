"""Making a model for generation out of a Hugging Face folder, and naming its live weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from starling.common.errors import ConfigError


def build_model(path: str | Path, *, dtype: str, device: str = "auto", weights: bool) -> torch.nn.Module:
    """Build the causal language model described in folder `path`, ready to generate.

    Args:
        path: a folder with `config.json` and, where `weights`, the weight files.
        dtype: element type of the weights, by its name in torch.
        device: where they live; ``auto`` takes a GPU where there is one.
        weights: load them; otherwise they are initialised at random, to be overwritten by the policy's.

    Raises:
        ConfigError: the folder, its configuration or its weights are missing or unreadable.
    """
    folder, element = Path(path), getattr(torch, dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(path)!r} does not exist; give a folder in Hugging Face form")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(path)!r} has no config.json; give a folder in Hugging Face form")
    model: torch.nn.Module
    try:
        if weights:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=element, local_files_only=True)
        else:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=element)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise ConfigError(f"model folder {str(path)!r} cannot be loaded: {reason}") from error
    return model.to(device).eval().requires_grad_(False)


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model` by name, each tied tensor once.

    The names are those of `model.named_parameters()`, as the policy lists them.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return tensors


def end_token_ids(tokenizer: Any, path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's and those of `generation_config.json` in folder `path`.

    The defaults of a model's configuration class are left out on purpose: they name tokens of another vocabulary.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if (Path(path) / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(str(path)).eos_token_id
        found.update([declared] if isinstance(declared, int) else declared or [])
    return tuple(sorted(found))


def context_length(config: Any) -> int | None:
    """Return the most positions that the configuration declares, or None where it declares none."""
    declared = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(declared) if declared else None

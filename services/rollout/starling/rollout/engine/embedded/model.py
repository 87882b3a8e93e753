"""Making a model for generation out of a Hugging Face folder, and naming its live weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from starling.algo.architecture import auto_class, most_tokens, remedy
from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.rollout.engine.embedded.quantised import quantise_linears
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
    """Build the language model described in folder `path`, with its vision where it has it, ready to generate.

    Args:
        path: a folder with `config.json` and, where `weights`, the weight files.
        dtype: element type of the weights, by its name in torch.
        device: where they live; ``auto`` takes a GPU where there is one.
        weights: load them; otherwise they are initialised at random, to be overwritten by the policy's.
        lora: the adapters to put into it. They stay apart from the weights, which are loaded: merged ones would be
            rounded to the element type of the weights, and an adoption would have to compute instead of copy.
        quantise: the format in which it holds its linear layers, by its name in `quantise.FORMATS`; empty for `dtype`.
        trust_remote_code: run Python code that lies in the folder.

    Raises:
        ConfigError: the folder, its configuration or its weights are missing or unreadable, or not made for `lora` or
            `quantise`.
    """
    folder, element = Path(path), getattr(torch, dtype)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = read_config(folder, trust_remote_code=trust_remote_code)
    model: torch.nn.Module
    try:
        auto = auto_class(config)
        if weights or lora is not None:
            model = auto.from_pretrained(
                folder, config=config, dtype=element, local_files_only=True, trust_remote_code=trust_remote_code
            )
        else:
            with torch.device(device):
                model = auto.from_config(config, dtype=element, trust_remote_code=trust_remote_code)
    except Exception as error:  # The folder is the user's, and its loaders and its own code raise anything.
        raise _unloadable(folder, error, trust_remote_code) from error
    if lora is not None:
        add_adapters(model, lora, seed=0)  # the policy's take their place
    model = model.to(device).eval().requires_grad_(False)
    if quantise:
        quantise_linears(model, linear_weights(quantise))
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of the model in `folder`, as transformers reads it.

    Raises:
        ConfigError: the folder or its configuration is missing or unreadable.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist; give a folder in Hugging Face form")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(folder)!r} has no config.json; give a folder in Hugging Face form")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # as above
        raise _unloadable(folder, error, trust_remote_code) from error


def _unloadable(folder: Path, error: Exception, trust_remote_code: bool) -> ConfigError:
    reason = str(error).split("\n", 1)[0].rstrip(".") + remedy(folder, trust_remote_code)
    return ConfigError(f"model folder {str(folder)!r} cannot be loaded: {reason}")


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model` by name, each tied tensor once.

    The names are those of `model.named_parameters()`, as the policy lists them; of an adapted model those of adapters.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return published_tensors(model, tensors)


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


def max_trainable_length(config: Any, wanted: int | None) -> int | None:
    """Return the most tokens of a sequence that is to be trained: `wanted`, else what the model allows.

    Raises:
        ConfigError: `wanted` is more than the policy could train.
    """
    limit = most_tokens(config)
    if wanted is None or limit is None:
        return wanted or limit
    if wanted > limit:
        raise ConfigError(
            f"rollout.max_model_len = {wanted} is more than the {limit} tokens of a sequence that the policy can train "
            "(the model's context, or the window that its layers attend to): lower it"
        )
    return wanted

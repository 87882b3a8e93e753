"""Load a causal language model, and name its tensors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from starling.common.errors import ConfigError

if TYPE_CHECKING:
    # Importing transformers takes seconds, so this module does it when it loads a model.
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def load_model(
    folder: Path,
    *,
    init: Literal["pretrained", "random"] = "pretrained",
    seed: int = 0,
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the causal language model of a Hugging Face folder, ready to train on the CPU.

    The model is in evaluation mode for good: dropout would make the trainer's log-probabilities differ from those of
    the rollout, and importance ratios differ from 1 for no reason.

    Args:
        folder: holds ``config.json`` and, unless `init` is ``"random"``, weights.
        init: take the weights of the folder, or draw them from the configuration; weights that are there stay unused.
        seed: decides random weights, whatever was drawn before; the global generator is left as it was.
        dtype: element type of all weights, by its name in torch.
        trust_remote_code: run Python code that lies in the folder.

    Raises:
        ConfigError: the folder is missing or unusable; the text names it and the remedy.
    """
    _check_folder(folder, init)
    element = getattr(torch, dtype)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if init == "random":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = AutoModelForCausalLM.from_config(config, dtype=element, trust_remote_code=trust_remote_code)
        else:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=element,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            _check_complete(folder, info["missing_keys"], info["mismatched_keys"])
    except ConfigError:
        raise
    except Exception as error:  # The folder is the user's, and its loaders raise anything.
        raise ConfigError(f"the model in {folder} cannot be loaded: {_sentence(error)}") from error
    return cast(PreTrainedModel, model.eval())


def place(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move `model` to `device`; ``auto`` takes a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return cast(PreTrainedModel, model.to(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device = {device!r} cannot be used: {_sentence(error)}") from error


def count_parameters(config: dict[str, Any]) -> int:
    """Count the parameters of the causal language model that a Hugging Face configuration describes; makes no model.

    Args:
        config: what its ``config.json`` holds; `model_type` names the architecture.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in model.parameters())


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` that never changes: the reference of a KL term."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    reference.zero_grad(set_to_none=True)
    return reference


def longest_sequence(model: PreTrainedModel) -> int | None:
    """Return the most tokens of a sequence that training can take, None for no limit.

    It is the context of the model or, where layers attend to a window or a chunk only, the size of that: up to it they
    attend to everything, as the masks of packed rows say.

    Raises:
        ConfigError: some layers carry a state along the row, which no mask can keep from leaking between sequences.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    others = set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}
    if others or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{config.model_type} has layers that are not attention ({', '.join(sorted(others)) or 'recurrent'}): "
            "sequences packed into one row would leak through them, so choose a model of attention layers"
        )
    limits = [getattr(config, "max_position_embeddings", None)]
    if not kinds or "sliding_attention" in kinds:
        limits.append(getattr(config, "sliding_window", None))
    if "chunked_attention" in kinds:
        limits.append(getattr(config, "attention_chunk_size", None))
    return min((limit for limit in limits if limit), default=None)


def pair_cost(model: PreTrainedModel) -> float:
    """Return the cost of a query-key pair against that of a cell; see `starling.algo.packing.PAIR_COST`."""
    hidden_size: int = model.config.get_text_config().hidden_size
    return 1.0 / (6.0 * hidden_size)


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what makes up a weight version: parameters and persistent buffers, by Hugging Face name.

    Tied weights occur once, under the name that `named_parameters` gives them. The tensors are the model's own,
    detached: they change with every step.
    """
    saved = model.state_dict(keep_vars=True).keys()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return named


def _check_folder(folder: Path, init: str) -> None:
    if not folder.is_dir():
        raise ConfigError(f"the model folder {folder} does not exist: give the path of a Hugging Face model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"the model folder {folder} has no config.json: it is not a Hugging Face model folder")
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): write it anew") from error
    if init != "random" and not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ConfigError(
            f"the model folder {folder} has a config.json but no weights: "
            'add model.safetensors, or set init = "random" to start from random weights'
        )


def _check_complete(folder: Path, missing: set[str], mismatched: set[str]) -> None:
    """Refuse weights that do not fill the model: the loader would leave the rest at random."""
    absent = sorted(str(name) for name in missing) or sorted(str(name) for name in mismatched)
    if absent:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json: {len(absent)} tensors are missing or of another "
            f"shape, the first is {absent[0]}"
        )


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no further reason given'}"

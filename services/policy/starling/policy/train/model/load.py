"""Causal language models: loading, placement, freezing, and the tensors of a weight version."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from starling.algo.architecture import auto_class, context_length, random_model, remedy, turn_off_router_logits
from starling.algo.outline import cheap_outlines
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.model_folder import check_indexes
from starling.weightsync.tensors.adapters import published_tensors

if TYPE_CHECKING:
    # Importing transformers takes seconds, so this module imports it when it loads a model.
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
    scores: bool = False,
) -> PreTrainedModel:
    """Load the language model of a Hugging Face folder, vision tower included, for training on the CPU.

    The model stays in evaluation mode: with dropout the trainer's log-probabilities would differ from the rollout's,
    and importance ratios from 1.

    Args:
        folder: holds ``config.json`` and, unless `init` is ``"random"``, weights.
        init: load the weights of the folder, or draw random ones from the configuration.
        seed: of random weights, independent of earlier draws; the global generator is left unchanged.
        dtype: element type of all weights, by its name in torch.
        trust_remote_code: run Python code from the folder.
        scores: load it as a model that scores sequences with one number instead; a folder without a layer `score`
            gets a random one, by `seed`.

    Raises:
        ConfigError: the folder is missing or unusable; the text names it and the remedy.
    """
    check_folder(folder, init)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _load(folder, getattr(torch, dtype), trust_remote_code, random=init == "random", scores=scores)
    except ConfigError:
        raise
    except Exception as error:  # The folder is the user's, and its loaders raise anything.
        raise unloadable(folder, error, trust_remote_code) from error
    return model.eval()


def place(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Move `model` to `device`; ``auto`` uses a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    return cast(PreTrainedModel, model.to(find_device(device)))


def find_device(device: str) -> torch.device:
    """Return the device of that name; ``auto`` is a GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device = {device!r} cannot be used: {_sentence(error)}") from error


def use_liger(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Replace norms, rotary embeddings and gated layers of `model` by Liger's fused kernels, in place.

    `device`: of a model without memory, once it has some.

    Liger's fused losses are not used: they would replace the model's forward pass, and Starling has its own losses.

    Raises:
        ConfigError: `model` is not on a CUDA device, Liger is not installed, or does not support such a model.
    """
    check_liger(model.config.model_type, device or model.device)
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def check_liger(kind: str, device: torch.device) -> None:
    """Raise ConfigError unless Liger can serve a model of type `kind`, as its config.json has it, on `device`."""
    if device.type != "cuda":
        raise ConfigError(
            f"policy.liger = true needs a CUDA device, and the model is on {device}: remove it, or set model.device"
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        raise ConfigError("policy.liger = true needs Liger: install starling-policy[liger]") from None
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"policy.liger = true, and Liger has no kernels for a {kind}: remove it")


def outline(
    folder: Path, *, dtype: str = "float32", trust_remote_code: bool = False, scores: bool = False
) -> PreTrainedModel:
    """Return the model of a Hugging Face folder without memory for its parameters: their names and shapes.

    Arguments and errors are those of `load_model`; weights are not needed.
    """
    check_folder(folder, "random")
    try:
        with torch.device("meta"):
            return _load(folder, getattr(torch, dtype), trust_remote_code, random=True, scores=scores)
    except Exception as error:  # The folder is the user's, and its loaders raise anything.
        raise unloadable(folder, error, trust_remote_code) from error


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters whose names match one of `patterns` from training.

    They are still published: a rollout needs them, and with deltas they cost nothing after the first version.

    Raises:
        ConfigError: a pattern is not a regular expression, or matches no name.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            found = [parameter for name, parameter in named.items() if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"policy.frozen has {pattern!r}, which is not a regular expression: {error}") from None
        if not found:
            raise ConfigError(
                f"policy.frozen has {pattern!r}, which matches the name of no parameter; "
                f"the first of {len(named)} is {next(iter(named))}"
            )
        for parameter in found:
            parameter.requires_grad_(False)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` without gradients: the reference of a KL term."""
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    reference.zero_grad(set_to_none=True)
    return reference


def longest_sequence(model: PreTrainedModel) -> int | None:
    """Return the maximum length of a training sequence in tokens, None for no limit."""
    return context_length(model.config)


def version_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a weight version: parameters and persistent buffers, by Hugging Face name.

    For a model with adapters these are the adapters' tensors: all others are the same in every version. Tied weights
    occur once, under the name that `named_parameters` gives them. The tensors are the model's own, detached: they
    change with every step.
    """
    return published_tensors(model, all_tensors(model))


def all_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of `model` by its own names, detached, tied ones once."""
    saved = model.state_dict(keep_vars=True).keys()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return named


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool, *, random: bool, scores: bool) -> PreTrainedModel:
    """Return the model of `folder`, with `random` weights or its own; see `load_model`. Raises any exception."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    turn_off_router_logits(config)
    if scores:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if scores else auto_class(config)
    if random:
        model = random_model(kind, config, dtype, trust_remote_code=trust_remote_code)
    else:
        with cheap_outlines():
            model, info = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        absent = {name for name in info["missing_keys"] if not (scores and name.startswith("score."))}
        check_complete(folder, absent, info["mismatched_keys"])
        _check_tied(folder, model)
    return cast(PreTrainedModel, model)


def check_folder(folder: Path, init: str) -> None:
    """Raise ConfigError unless `folder` has a configuration and, unless `init` is ``"random"``, weights."""
    if not folder.is_dir():
        raise ConfigError(f"the model folder {folder} does not exist: give the path of a Hugging Face model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"the model folder {folder} has no config.json: it is not a Hugging Face model folder")
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): replace it") from error
    if init != "random":
        check_indexes(folder)
    if init != "random" and not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise ConfigError(
            f"the model folder {folder} has a config.json but no weights: "
            'add model.safetensors, or set init = "random" to start from random weights'
        )


def unloadable(folder: Path, error: Exception, trust_remote_code: bool = True) -> ConfigError:
    """Return the error for a loader that has failed; with a remedy where that did not run the folder's code."""
    return ConfigError(f"the model in {folder} cannot be loaded: {_sentence(error)}{remedy(folder, trust_remote_code)}")


def check_complete(folder: Path, missing: set[str], mismatched: set[str]) -> None:
    """Refuse weights that do not fill the model: the loader would leave the others random."""
    absent = sorted(str(name) for name in missing) or sorted(str(name) for name in mismatched)
    if absent:
        raise ConfigError(
            f"the weights in {folder} do not fit its config.json: {counted(len(absent), 'tensor')} missing or of "
            f"another shape, such as {absent[0]}"
        )


def _check_tied(folder: Path, model: PreTrainedModel) -> None:
    """Refuse two different tensors where the configuration ties them: `from_pretrained` leaves both then, but vLLM and
    rollouts that start without weights have one, so that they would sample from another model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if parameters.get(target) is not parameters.get(source):
            raise unequal_ties(folder, target, source)


def unequal_ties(folder: Path, target: str, source: str) -> ConfigError:
    """Return the error for weights with two different tensors that the configuration ties."""
    return ConfigError(
        f"the weights in {folder} have {target} and another {source}, and its config.json ties them: set "
        f"tie_word_embeddings = false there, or remove {target} from the weights"
    )


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no further reason given'}"

"""Files of weights in a model folder that vLLM would load in place of those that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.files import open_regular

_SINGLE: Final = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights, in the order in which transformers looks for them, each before its index."""
_INDEX: Final = ".index.json"
_STATES: Final = ("training_args.bin", "optimizer.bin")
"""Ends of names that vLLM leaves out: states of trainers."""


def check_weight_files(folder: Path) -> None:
    """Refuse a folder of which vLLM would load other weights than transformers, and so the policy, does.

    vLLM loads all files of a format, or those of its index, and transformers one file before an index: another file
    there would replace the weights of vLLM only.

    Raises:
        ConfigError: the text names a file.
    """
    try:
        differing = sorted(_of_transformers(folder) ^ _of_vllm(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the index of the weights in {folder} cannot be read ({error!s:.200}): replace it") from None
    if differing:
        raise ConfigError(
            f"of transformers and vllm only one would load {folder / differing[0]!s:.300}, so that their models would "
            "differ; leave only the model's weights in the folder, or set rollout.engine = 'transformers'"
        )


def _of_transformers(folder: Path) -> set[str]:
    """Return the names of the files that transformers loads. Source: `_get_resolved_checkpoint_files`."""
    named = _json(folder / "config.json").get("transformers_weights")
    candidates = [named] if named else [name + ending for name in _SINGLE for ending in ("", _INDEX)]
    name = next((name for name in candidates if (folder / name).is_file()), "")
    if name.endswith(_INDEX):
        return _indexed(folder / name)
    return {name, *(path.name for path in folder.glob("adapter_config.json"))} - {""}  # it also loads an adapter


def _of_vllm(folder: Path) -> set[str]:
    """Return the names of the files that vLLM loads. Source: `DefaultModelLoader._prepare_weights`."""
    found = {path.name for path in folder.glob("*.safetensors")}
    if found:
        index = folder / (_SINGLE[0] + _INDEX)
        return found & _indexed(index) if index.is_file() else found
    return {path.name for path in folder.glob("*.bin") if not path.name.endswith(_STATES)}


def _indexed(index: Path) -> set[str]:
    return {str(name) for name in _json(index)["weight_map"].values()}


def _json(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded

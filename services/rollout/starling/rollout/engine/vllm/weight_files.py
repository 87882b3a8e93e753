"""Files of weights in a model folder that vLLM would load in place of those that transformers loads."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
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
    there would replace the weights of vLLM only. Of a tensor that several files have, each takes the last one, in an
    order of its own.

    Raises:
        ConfigError: the text names a file.
    """
    try:
        loaded = _of_vllm(folder)
        differing = sorted(_of_transformers(folder) ^ loaded)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"the index of the weights in {folder} cannot be read ({error!s:.200}): replace it") from None
    if differing:
        raise ConfigError(
            f"of transformers and vllm only one would load {folder / differing[0]!s:.300}, so that their models would "
            "differ; leave only the model's weights in the folder, or set rollout.engine = 'transformers'"
        )
    if not _have_one_order(loaded):
        _check_tensors(folder, sorted(loaded))


def _have_one_order(names: Collection[str]) -> bool:
    """Return whether both load the files in one order. transformers: `get_checkpoint_shard_files`, by their names;
    vLLM: `_natural_sort_key`, and `.bin` in that of the file system."""
    natural = sorted(names, key=lambda name: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", name)])
    is_sorted = all(name.endswith(".safetensors") for name in names)
    return len(names) < 2 or (is_sorted and natural == sorted(names))


def _check_tensors(folder: Path, names: Sequence[str]) -> None:
    """Refuse a tensor that is in several of the files. Raises ConfigError."""
    file_of: dict[str, str] = {}
    for name in names:
        try:
            tensors = _tensors_in(folder / name)
        except Exception as error:  # the readers of a user's files raise anything
            raise ConfigError(
                f"the weights in {folder / name} cannot be read ({error!s:.200}): replace them"
            ) from error
        for tensor in tensors:
            other = file_of.setdefault(tensor, name)
            if other != name:
                raise ConfigError(
                    f"{folder / name} and {other} both have {tensor:.200}, of which transformers and vllm would load "
                    "different ones; remove one of them, or set rollout.engine = 'transformers'"
                )


def _tensors_in(path: Path) -> list[str]:
    """Return the names of the tensors in a file of weights."""
    if path.name.endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    import torch

    return list(torch.load(path, map_location="meta", weights_only=True))


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
    found = {path.name for path in folder.glob("[!.]*.safetensors")}
    if found:
        index = folder / (_SINGLE[0] + _INDEX)
        return found & _indexed(index) if index.is_file() else found
    return {path.name for path in folder.glob("[!.]*.bin") if not path.name.endswith(_STATES)}


def _indexed(index: Path) -> set[str]:
    return {str(name) for name in _json(index)["weight_map"].values()}


def _json(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded

"""Write a model in Hugging Face form: what `transformers` loads, and whoever serves or evaluates it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from starling.policy.train.folder import whole_folder
from starling.policy.train.lora import save_adapters
from starling.policy.train.storage import Storage
from starling.weightsync.layouts.adapters import is_adapted, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

SHARD_MB = 5000
"""Most MiB of one file of weights, where nobody says otherwise."""
_LAST = "config.json"
"""Without this file a folder is no model: it is sent last to where a folder cannot come into being at once."""


class Saveable(Protocol):
    """A tokenizer or processor: anything that writes itself into a folder."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the files of `self` into `save_directory`."""


def save_hf(
    model: PreTrainedModel,
    tokenizer: Saveable | None,
    folder: Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
    shard_mb: int = SHARD_MB,
) -> None:
    """Write `model` and `tokenizer` into `folder`, all or nothing.

    Args:
        model: tells the architecture; its weights, too, without `weights`.
        tokenizer: written beside it.
        folder: replaced, if it is there.
        weights: by the names of `starling.policy.train.model.tensors`; copies, while `model` goes on. Of a model with
            adapters those alone, which peft reads, or all merged.
        shard_mb: most MiB of one file of weights.

    Raises:
        ConfigError: as `whole_folder`.
    """
    with whole_folder(folder) as temporary:
        _write(model, tokenizer, temporary, weights, shard_mb)


def export_hf(
    model: PreTrainedModel,
    tokenizer: Saveable | None,
    storage: Storage,
    name: str,
    *,
    weights: Mapping[str, Tensor],
    shard_mb: int = SHARD_MB,
) -> str:
    """Write the folder `name` of `storage` as `save_hf` does. Returns where it is.

    Elsewhere than on a local disk the files are written to a temporary folder first, then sent; ``config.json`` is the
    last, and of a folder that is replaced the first to go. So what has that file is whole.

    Raises:
        ConfigError: it cannot be written.
    """
    with storage.explained("written", name):  # a tokenizer tells of a full disk by an exception that is no OSError
        if storage.is_local:
            save_hf(model, tokenizer, Path(storage.path(name)), weights=weights, shard_mb=shard_mb)
        else:
            with tempfile.TemporaryDirectory(prefix="starling-export-") as temporary:
                _write(model, tokenizer, Path(temporary), weights, shard_mb)
                storage.send(Path(temporary), name, last=_LAST)
    return storage.url(name)


def _write(
    model: PreTrainedModel,
    tokenizer: Saveable | None,
    folder: Path,
    weights: Mapping[str, Tensor] | None,
    shard_mb: int,
) -> None:
    if is_adapted(model) and (weights is None or all(map(is_adapter, weights))):
        save_adapters(model, folder, weights)
    else:
        state = None if weights is None else dict(weights)
        model.save_pretrained(str(folder), state_dict=state, max_shard_size=f"{shard_mb}MB")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))

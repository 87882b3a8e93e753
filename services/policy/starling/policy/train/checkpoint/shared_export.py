"""Export of a model whose parts are on several ranks: each writes its boxes into the files, and nothing is gathered.

The files are those that transformers' `save_pretrained` would write from whole tensors, byte for byte. Rank 0 creates
them, with their headers and all the space that they need; then all ranks map them and copy.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from starling.common.errors import ConfigError, WeightsError
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.model.load import version_tensors
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import Parameter, shards_of, whole
from starling.weightsync.layouts.safetensors import Entries, HeaderEntry, make_header
from starling.weightsync.plan.layout import ITEM_BYTES, TensorSpec
from starling.weightsync.tensors.views import array_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_INDEX: Final = "model.safetensors.index.json"
_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class ModelOutline:
    """A whole model without its values."""

    tensors: Mapping[str, Tensor]
    """Of a version, on `meta`, in the order of `version_tensors`."""
    num_parameters: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelOutline:
        """Return the outline of a model that is whole."""
        tensors = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in version_tensors(model).items()
        }
        return cls(tensors, model.num_parameters(), model.dtype)


class SharedWeights(Protocol):
    """Weights on several ranks, which write them together."""

    def write(self, folder: Path, shard_mb: int) -> None:
        """Write everything that `save_pretrained` writes into `folder`; `shard_mb`: maximum MiB of a file."""


ExportedWeights = Mapping[str, Tensor] | SharedWeights
"""Tensors by name, in host memory, or what several ranks write."""


class ExportFiles:
    """The files of an export, and the place of each tensor in them."""

    def __init__(self, model: PreTrainedModel, outline: ModelOutline, shard_mb: int) -> None:
        """Plan them, equally on each rank.

        Args:
            model: of this rank, for its architecture.
            outline: of the whole model.
            shard_mb: maximum MiB of a file.

        Raises:
            ConfigError: the parameters of this model are parts of other tensors in a checkpoint, in a way that is not
                known.
        """
        from huggingface_hub import split_state_dict_into_shards_factory
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._outline = model, outline
        tensors = {name: tensor for name, tensor in outline.tensors.items() if name not in _ignored(model)}
        saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
        self._specs = {name: _spec(name, tensor) for name, tensor in saved.items()}
        own = {name: _spec(name, tensor) for name, tensor in tensors.items()}
        self._parameters = (
            {name: whole(name, spec.shape, spec.dtype) for name, spec in own.items()}
            if own == self._specs
            else _parameters(model, outline, own, self._specs)
        )
        # As `save_pretrained` splits them; its own function does not see which tensors on `meta` share memory.
        split: Any = split_state_dict_into_shards_factory(
            saved,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=f"{shard_mb}MB",
        )
        self._files: dict[str, tuple[bytes, Entries]] = {
            file: make_header((self._specs[name] for name in names), {"format": "pt"})
            for file, names in split.filename_to_tensors.items()
        }
        self._index = b""
        if split.is_sharded:
            sizes = {"total_parameters": outline.num_parameters, **split.metadata}
            index = {"metadata": sizes, "weight_map": split.tensor_to_filename}
            self._index = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"

    def create(self, folder: Path) -> None:
        """Create the files, and write everything but the tensors; on one rank. Raises OSError."""
        self._save_config(folder)
        for file, (header, entries) in self._files.items():
            size_bytes = max((entry.offset_bytes + entry.size_bytes for entry in entries), default=len(header))
            descriptor = os.open(folder / file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                # Without this, a full disk would kill the process at a write to the mapping.
                os.posix_fallocate(descriptor, 0, size_bytes)
                os.pwrite(descriptor, header, 0)
            finally:
                os.close(descriptor)
        if self._index:
            (folder / _INDEX).write_bytes(self._index)

    def write(self, folder: Path, parts: Mapping[str, Part]) -> None:
        """Copy `parts`, by name of the parameter, into the files. Raises ConfigError if they cannot be written."""
        index = {name: number for number, name in enumerate(self._specs)}
        names = list(self._specs)
        maps = {file: _map(folder / file) for file in self._files}
        places = {entry.spec.name: (file, entry) for file, (_, entries) in self._files.items() for entry in entries}
        for name, part in parts.items():
            if name not in self._parameters:
                continue
            local = part.local.contiguous()
            shards = shards_of(self._parameters[name], index, storage=name, strides=local.stride(), held=part.held)
            for shard in shards:
                file, entry = places[names[shard.tensor]]
                offset = shard.offset_bytes // ITEM_BYTES[entry.spec.dtype]
                source = array_of(local.as_strided(shard.box.size, shard.strides, local.storage_offset() + offset))
                region = tuple(
                    slice(start, start + size) for start, size in zip(shard.box.offset, shard.box.size, strict=True)
                )
                _array(maps[file], entry)[region] = source
        for mapped in maps.values():
            mapped.flush()

    def _save_config(self, folder: Path) -> None:
        before = self._model.config.dtype
        self._model.save_pretrained(str(folder), state_dict={})
        self._model.config.dtype = before
        for stray in folder.glob("model*.safetensors*"):
            stray.unlink()
        path, dtype = folder / _CONFIG, str(self._outline.dtype).removeprefix("torch.")
        config = json.loads(path.read_text())
        if config.get("dtype") != dtype:  # it has that of this rank's parameters, which may be masters
            config["dtype"] = dtype
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _ignored(model: PreTrainedModel) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def _parameters(
    model: PreTrainedModel, outline: ModelOutline, own: Mapping[str, TensorSpec], saved: Mapping[str, TensorSpec]
) -> dict[str, Parameter]:
    """Return the parameters of `model`, in terms of the tensors that a checkpoint has."""
    remedy = "save a state, and export that with `starling export`"
    try:
        table = transformers_table(model.config.to_dict(), str(outline.dtype).removeprefix("torch."))
    except WeightsError as error:
        raise ConfigError(f"{type(model).__name__} cannot be exported by several ranks: {error} Or {remedy}") from error
    listed = {spec.name: spec for spec in table.tensors if not spec.same_as}
    parameters = {parameter.name: parameter for parameter in table.parameters}
    missing = sorted((saved.keys() ^ listed.keys()) | (own.keys() - parameters.keys()))
    if missing or any(saved[name] != spec for name, spec in listed.items()):
        name = missing[0] if missing else next(name for name, spec in listed.items() if saved[name] != spec)
        raise ConfigError(f"{type(model).__name__} cannot be exported by several ranks, because of {name}: {remedy}")
    return parameters


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be mapped by a rank ({error}): check the disk") from error


def _array(mapped: mmap.mmap, entry: HeaderEntry) -> np.ndarray[Any, Any]:
    return np.ndarray(entry.spec.shape, f"u{ITEM_BYTES[entry.spec.dtype]}", mapped, entry.offset_bytes)

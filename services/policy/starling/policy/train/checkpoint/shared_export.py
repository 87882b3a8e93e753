"""Export of a model whose parts are on several ranks: each writes its boxes into the files, and nothing is gathered.

The files are those that transformers' `save_pretrained` would write from whole tensors, or peft's of adapters, byte for
byte. Rank 0 creates them, with their headers and all the space that they need; then all ranks map them and copy.
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
from starling.policy.train.model.lora import ADAPTERS_FILE, merged_tensors, names_in_file, save_adapter_config
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import Parameter, shards_of, whole
from starling.weightsync.layouts.safetensors import Entries, HeaderEntry, make_header
from starling.weightsync.plan.layout import ITEM_BYTES, TensorSpec
from starling.weightsync.tensors.adapters import is_adapted
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
    adapters: Mapping[str, str]
    """Names of `tensors` in peft's files; empty without adapters."""
    merged: Mapping[str, Tensor]
    """The tensors of the model with its adapters merged, likewise; those of a version without adapters."""
    saved: Mapping[str, Tensor]
    """What a checkpoint has in place of `merged`, on `meta`: names are looked up by a class that sharding changes."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelOutline:
        """Return the outline of a model that is whole."""
        tensors = _on_meta(version_tensors(model))
        if not is_adapted(model):
            return cls(tensors, model.num_parameters(), model.dtype, {}, tensors, _saved(model, tensors))
        merged = _on_meta(merged_tensors(model))
        return cls(
            tensors, model.num_parameters(), model.dtype, names_in_file(model, tensors), merged, _saved(model, merged)
        )


def _on_meta(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}


class SharedWeights(Protocol):
    """Weights on several ranks, which write them together."""

    def write(self, folder: Path, shard_mb: int) -> None:
        """Write everything that `save_pretrained` writes into `folder`; `shard_mb`: maximum MiB of a file."""


ExportedWeights = Mapping[str, Tensor] | SharedWeights
"""Tensors by name, in host memory, or what several ranks write."""


class ExportFiles:
    """The files of an export, and the place of each tensor in them."""

    def __init__(self, model: PreTrainedModel, outline: ModelOutline, shard_mb: int, *, merged: bool = False) -> None:
        """Plan them, equally on each rank.

        Args:
            model: of this rank, for its architecture.
            outline: of the whole model.
            shard_mb: maximum MiB of a file of a model.
            merged: export a model with adapters merged, instead of the adapters.

        Raises:
            ConfigError: the parameters of this model are parts of other tensors in a checkpoint, in a way that is not
                known.
        """
        self._model, self._outline = model, outline
        self._files: dict[str, tuple[bytes, Entries]]
        self._specs: dict[str, TensorSpec]
        self._parameters: dict[str, Parameter]
        self._index = b""
        self._only_adapters = bool(outline.adapters) and not merged
        if self._only_adapters:
            self._plan_adapters()
        else:
            self._plan_model(shard_mb)

    def _plan_adapters(self) -> None:
        """Plan the files of adapters alone."""
        own = {name: _spec(name, tensor) for name, tensor in self._outline.tensors.items()}
        listed = self._outline.adapters
        self._parameters = {name: whole(listed[name], spec.shape, spec.dtype) for name, spec in own.items()}
        self._specs = {listed[name]: _spec(listed[name], tensor) for name, tensor in self._outline.tensors.items()}
        self._files = {ADAPTERS_FILE: make_header(self._specs.values(), {"format": "pt"})}

    def _plan_model(self, shard_mb: int) -> None:
        """Plan the files of a model."""
        from huggingface_hub import split_state_dict_into_shards_factory

        model, outline = self._model, self._outline
        tensors = {name: tensor for name, tensor in outline.merged.items() if name not in _ignored(model)}
        saved = dict(outline.saved)
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
        self._files = {
            file: make_header((self._specs[name] for name in names), {"format": "pt"})
            for file, names in split.filename_to_tensors.items()
        }
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
        if self._only_adapters:
            save_adapter_config(self._model, folder)
            return
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


def _saved(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that `save_pretrained` writes for `tensors` of a model that is whole."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = _ignored(model)
    saved: dict[str, Tensor] = revert_weight_conversion(
        model, {name: tensor for name, tensor in tensors.items() if name not in ignored}
    )
    return saved


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

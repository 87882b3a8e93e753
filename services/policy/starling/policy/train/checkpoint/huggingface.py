"""Models in Hugging Face format: checkpoints during a run, and the export of a saved state."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from starling.algo.diffusion.folder import INDEX, load_transformer, read_pipeline
from starling.common.errors import ConfigError
from starling.common.folder_digests import check_digests, write_digests
from starling.common.ids import whole_number
from starling.common.settings import ModelSettings
from starling.policy.train.checkpoint.header import CHECKPOINTS, STATES, VerifiedState, find_state, newest_state
from starling.policy.train.checkpoint.pipeline import PipelineFiles, is_of_diffusers, save_transformer
from starling.policy.train.checkpoint.shared_export import ExportedWeights
from starling.policy.train.checkpoint.state import TRAINER, WEIGHTS, SavedState
from starling.policy.train.checkpoint.storage import Storage, whole_folder
from starling.policy.train.model.load import load_model, version_tensors
from starling.policy.train.model.lora import export_model, save_adapters
from starling.weightsync.tensors.adapters import add_adapters, is_adapted, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

SHARD_MB = 5000
"""Default maximum size of one file of weights, in MiB."""
PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Image and video processor settings. The policy creates no processor, so these files are copied unchanged."""
EMA = "ema:"
"""Prefix of the EMA weights among the tensors of a trainer, followed by the parameter's name."""
CHECKPOINT: Final = "step-"
"""Prefix of a checkpoint's name, followed by its version."""
_LAST: Final = "config.json"
"""Without this file a folder is not a model: it is written last where a folder cannot be renamed into place."""
_COMPLETE: Final = frozenset({_LAST, INDEX})
"""Such files of models and of pipelines of diffusers."""


class Saveable(Protocol):
    """A tokenizer or processor: anything that writes itself into a folder."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the files of `self` into `save_directory`."""


def save_hf(
    model: PreTrainedModel,
    tokenizer: Saveable | None,
    folder: Path,
    *,
    weights: ExportedWeights | None = None,
    shard_mb: int = SHARD_MB,
) -> None:
    """Write `model` and `tokenizer` into `folder`, all or nothing.

    Args:
        model: its architecture and, without `weights`, its weights.
        tokenizer: written into the same folder.
        folder: replaced, if it exists.
        weights: by the names of `version_tensors`, copied, because training may change those of `model`. For a model
            with adapters either the adapters, in peft's format, or all weights merged. Or weights on several ranks.
        shard_mb: maximum MiB of one file of weights.

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
    weights: ExportedWeights,
    shard_mb: int = SHARD_MB,
    temporary: Path | None = None,
) -> str:
    """Write the folder `name` of `storage` like `save_hf`. Returns its URL.

    Unless the storage is a local disk, the files are written to a new folder, below `temporary`, and then copied;
    ``config.json``, or ``model_index.json`` of a pipeline, is copied last, and removed first from a folder that is
    replaced. So a folder with that file is complete.

    Raises:
        ConfigError: it cannot be written.
    """
    with storage.explained("written", name):  # a tokenizer's exception for a full disk is not an OSError
        if storage.is_local:
            save_hf(model, tokenizer, Path(storage.path(name)), weights=weights, shard_mb=shard_mb)
        else:
            with tempfile.TemporaryDirectory(prefix="starling-export-", dir=temporary) as folder:
                _write(model, tokenizer, Path(folder), weights, shard_mb)
                storage.send(Path(folder), name, last=INDEX if is_of_diffusers(model) else _LAST)
    return storage.url(name)


def _write(
    model: PreTrainedModel,
    tokenizer: Saveable | None,
    folder: Path,
    weights: ExportedWeights | None,
    shard_mb: int,
) -> None:
    if weights is not None and not isinstance(weights, Mapping):
        weights.write(folder, shard_mb)
    elif is_adapted(model) and (weights is None or all(map(is_adapter, weights))):
        save_adapters(model, folder, weights)
        if is_of_diffusers(model):  # adapters alone are no pipeline
            tokenizer = None
    elif is_of_diffusers(model):
        save_transformer(model, folder, weights, shard_mb)
    else:
        state = None if weights is None else dict(weights)
        model.save_pretrained(str(folder), state_dict=state, max_shard_size=f"{shard_mb}MB")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
    write_digests(folder)


class TokenizerFiles:
    """Tokenizer and processor files, which make an export a complete model folder."""

    def __init__(self, tokenizer: Saveable, folder: Path) -> None:
        """`folder`: of the model that is trained, with its processor files."""
        self._tokenizer, self._folder = tokenizer, folder

    def save_pretrained(self, save_directory: str) -> None:
        """Write all files into `save_directory`."""
        self._tokenizer.save_pretrained(save_directory)
        for name in PROCESSOR_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, Path(save_directory, name))


@dataclass(frozen=True)
class ExportedModel:
    """Origin of an exported model."""

    version: int
    url: str
    """Of its state or checkpoint."""


def export_newest(
    source: str,
    out: Path,
    settings: ModelSettings,
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    ema: bool = False,
    shard_mb: int = SHARD_MB,
) -> ExportedModel:
    """Write the newest model of `source` into `out`: a checkpoint that is newer than all states, else a state.

    Args:
        source: a run's folder, or as for `find_state`.
        out: replaced, if it exists.
        settings: as for `export_state`.
        options: for fsspec.
        seed: as for `export_state`.
        ema: write the EMA weights. Checkpoints have none, so only states count.
        shard_mb: maximum MiB of one file; a checkpoint is copied as it is.

    Raises:
        ConfigError: there is neither, or as `export_state`.
    """
    storage = Storage(source, options)
    checkpoints = storage.below(CHECKPOINTS)
    version = -1 if ema else newest_checkpoint(checkpoints)
    state = find_state(source, options) if version < 0 else newest_state(storage.below(STATES))
    if state is not None and state.state.version >= version:
        export_state(state, out, settings, seed=seed, ema=ema, shard_mb=shard_mb)
        return ExportedModel(state.state.version, state.url)
    name = f"{CHECKPOINT}{version}"
    with whole_folder(out) as temporary:
        checkpoints.fetch(temporary, name)
        check_digests(temporary, source=checkpoints.url(name))
    return ExportedModel(version, checkpoints.url(name))


def newest_checkpoint(checkpoints: Storage) -> int:
    """Return the version of the newest complete checkpoint in a folder of checkpoints, -1 if there is none."""
    numbers = [name.removeprefix(CHECKPOINT) for name in checkpoints.names() if name.startswith(CHECKPOINT)]
    versions = sorted((version for version in map(whole_number, numbers) if version >= 0), reverse=True)
    complete = (
        version for version in versions if not _COMPLETE.isdisjoint(checkpoints.names(f"{CHECKPOINT}{version}"))
    )
    return next(complete, -1)


def export_state(
    found: VerifiedState,
    out: Path,
    settings: ModelSettings,
    *,
    seed: int = 0,
    ema: bool = False,
    shard_mb: int = SHARD_MB,
) -> None:
    """Write the model of the state `found`, with the tokenizer of the model's folder, into `out`.

    Args:
        found: the state.
        out: replaced, if it exists. For a model with adapters it gets these or, by the settings, all weights merged.
        settings: the model that was trained. Its folder defines the architecture; its weights are read only as the
            base of adapters, because the state contains all others.
        seed: of the run, for weights that are neither in the folder nor in the state.
        ema: write the EMA weights; parameters that are not trained keep their newest values.
        shard_mb: maximum MiB of one file.

    Raises:
        ConfigError: a state of another model or without EMA weights, or `out` cannot be written.
    """
    saved = SavedState.of(found)
    model = _architecture(saved, found.url, settings, seed)
    live = version_tensors(model)
    saved.restore(WEIGHTS, live)
    if ema:
        _put_ema(saved, found.url, live)
    export_hf(
        model,
        _further_files(settings),
        Storage(str(out.absolute().parent)),
        out.name,
        weights=export_model(model) if settings.lora is not None and settings.lora.merged else live,
        shard_mb=shard_mb,
    )


def _further_files(settings: ModelSettings) -> Saveable:
    """Return what an export has besides weights, from the model's folder. Raises OSError."""
    folder = Path(settings.path)
    if (folder / INDEX).is_file():
        return PipelineFiles(folder)
    from transformers import AutoTokenizer

    return TokenizerFiles(AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code), folder)


def _architecture(saved: SavedState, url: str, settings: ModelSettings, seed: int) -> PreTrainedModel:
    """Return a model into which the state at `url` can be restored."""
    lora = settings.lora
    if lora is None and saved.has(WEIGHTS, is_adapter):
        raise ConfigError(
            f"the state {url} contains adapters, and [model.lora] is not known: give the state's path in its run's "
            "folder, whose config.toml has that section"
        )
    path = Path(settings.path)
    is_pipeline = (path / INDEX).is_file()
    found = saved.narrowest(WEIGHTS) if is_pipeline else saved.dtype(WEIGHTS)
    dtype = str(found).removeprefix("torch.") if lora is None else settings.dtype
    model: Any
    if is_pipeline:
        model = load_transformer(read_pipeline(path), dtype=getattr(torch, dtype), random=lora is None)
    else:
        model = load_model(
            path,
            init="random" if lora is None else "pretrained",
            seed=seed,
            dtype=dtype,
            trust_remote_code=settings.trust_remote_code,
            scores=saved.state.trainer is not None and saved.state.trainer.kind == "reward_model",
        )
    if lora is not None:
        add_adapters(model, lora, seed=seed)
    return model


@torch.no_grad()
def _put_ema(saved: SavedState, url: str, live: dict[str, Tensor]) -> None:
    ema = {name.removeprefix(EMA): tensor for name, tensor in saved.read(TRAINER).items() if name.startswith(EMA)}
    if not ema:
        raise ConfigError(f"the state {url} has no EMA weights: omit --ema, or train with policy.optimizer.ema_decay")
    for name, tensor in ema.items():
        live[name].copy_(tensor)

"""Write a model in Hugging Face form: what `transformers` loads, and whoever serves or evaluates it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings
from starling.policy.train.checkpoint.header import StateHeader, find_state
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
        weights: by the names of `starling.policy.train.model.load.version_tensors`; copies, while `model` goes on. Of
        a model with
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


# JOINED from starling.policy.train.companions: What lies beside the weights in a model's folder and goes with
# every export of them.


PROCESSOR_FILES: Final = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""How images and videos are read. The policy makes no processor, so these are copied as they are."""


class TokenizerFiles:
    """A tokenizer, and the settings of the processors: with them an export is a model folder like the one before."""

    def __init__(self, tokenizer: Saveable, folder: Path) -> None:
        """Take the tokenizer, and the folder of the model that is trained."""
        self._tokenizer, self._folder = tokenizer, folder

    def save_pretrained(self, save_directory: str) -> None:
        """Write all of it into `save_directory`."""
        self._tokenizer.save_pretrained(save_directory)
        for name in PROCESSOR_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, Path(save_directory, name))


# JOINED from starling.policy.train.export: A saved state becomes a model in Hugging Face form, without a run.


if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

EMA = "ema:"
"""What the averaged weights are called among the tensors of a trainer, each followed by its parameter's name."""


def export_state(
    source: str,
    out: Path,
    settings: ModelSettings,
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    ema: bool = False,
    shard_mb: int = SHARD_MB,
) -> StateHeader:
    """Write the model of the state that `source` means, and the tokenizer of the model's folder, into `out`.

    Args:
        source: as `find` takes it.
        out: replaced, if it is there. Of a model with adapters it gets those, or, as the settings say, all merged.
        settings: the model that was trained. Its folder tells the architecture; its weights are read below adapters
            only, as the state has the others.
        options: for fsspec.
        seed: that of the run, from which all follows that neither the folder nor the state has.
        ema: write the averaged weights; what is not trained is as in the newest ones.
        shard_mb: most MiB of one file.

    Raises:
        ConfigError: no such state, one of another model, one without averaged weights, or `out` cannot be written.
    """
    from transformers import AutoTokenizer

    found = find_state(source, options)
    saved = SavedState.of(found)
    model = _architecture(saved, found.url, settings, seed)
    live = version_tensors(model)
    saved.restore(WEIGHTS, live)
    if ema:
        _put_averages(saved, found.url, live)
    folder = Path(settings.path)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    export_hf(
        model,
        TokenizerFiles(tokenizer, folder),
        Storage(str(out.absolute().parent)),
        out.name,
        weights=export_model(model) if settings.lora is not None and settings.lora.merged else live,
        shard_mb=shard_mb,
    )
    return found.state


def _architecture(saved: SavedState, url: str, settings: ModelSettings, seed: int) -> PreTrainedModel:
    """Return a model with whatever the state at `url` does not have, to be filled with what it has."""
    lora = settings.lora
    if lora is None and saved.has(WEIGHTS, is_adapter):
        raise ConfigError(
            f"the state {url} is one of adapters, and nothing near it says which: give it where it lies in its run's "
            "folder, whose config.toml has [model.lora]"
        )
    model = load_model(
        Path(settings.path),
        init="random" if lora is None else "pretrained",
        seed=seed,
        dtype=str(saved.dtype(WEIGHTS)).removeprefix("torch.") if lora is None else settings.dtype,
        trust_remote_code=settings.trust_remote_code,
        scores=saved.state.trainer is not None and saved.state.trainer.kind == "reward_model",
    )
    if lora is not None:
        add_adapters(model, lora, seed=seed)
    return model


@torch.no_grad()
def _put_averages(saved: SavedState, url: str, live: dict[str, Tensor]) -> None:
    averaged = {name.removeprefix(EMA): tensor for name, tensor in saved.read(TRAINER).items() if name.startswith(EMA)}
    if not averaged:
        raise ConfigError(
            f"the state {url} has no averaged weights: leave --ema away, or train with policy.optimizer.ema_decay"
        )
    for name, tensor in averaged.items():
        live[name].copy_(tensor)

"""A saved state becomes a model in Hugging Face form, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings
from starling.policy.train.checkpoint import SHARD_MB, export_hf
from starling.policy.train.companions import Companions
from starling.policy.train.header import State, find
from starling.policy.train.lora import export_model
from starling.policy.train.model import load_model, tensors
from starling.policy.train.state import TRAINER, WEIGHTS, SavedState
from starling.policy.train.storage import Storage
from starling.weightsync.layouts.adapters import add_adapters, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

EMA = "ema:"
"""What the averaged weights are called among the tensors of a trainer, each followed by its parameter's name."""


def export(
    source: str,
    out: Path,
    settings: ModelSettings,
    options: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    ema: bool = False,
    shard_mb: int = SHARD_MB,
) -> State:
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

    found = find(source, options)
    saved = SavedState.of(found)
    model = _architecture(saved, found.url, settings, seed)
    live = tensors(model)
    saved.restore(WEIGHTS, live)
    if ema:
        _put_averages(saved, found.url, live)
    folder = Path(settings.path)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=settings.trust_remote_code)
    export_hf(
        model,
        Companions(tokenizer, folder),
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

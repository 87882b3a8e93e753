"""Encoders of prompts and decoders of completions, for a language model or a diffusion model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starling.algo.text import decode

if TYPE_CHECKING:
    from starling.rollout.engine.diffusion.prompts import DiffusionPrompts
    from starling.rollout.engine.multimodal.prompts import PromptEncoder
    from starling.rollout.engine.preparation import PromptPreparation
    from starling.rollout.settings import RolloutProcess


def read_language_model(path: Path, settings: RolloutProcess) -> tuple[Any, Any]:
    """Return configuration and tokenizer of the language model in `path`; None and None for a diffusion model.

    Raises:
        ConfigError: they are missing or unreadable.
    """
    if settings.diffusion is not None:
        return None, None
    # Imported here: torch and transformers take seconds, which a wrong setting must not cost.
    from starling.algo.tokenizer import load_tokenizer
    from starling.rollout.engine.model_config import read_config

    trusted = settings.model.trust_remote_code
    config = read_config(path, trust_remote_code=trusted)
    return config, load_tokenizer(path, config, trust_remote_code=trusted)


def make_encoder(
    path: Path, settings: RolloutProcess, config: Any, tokenizer: Any, tools: Sequence[Mapping[str, Any]]
) -> PromptEncoder | DiffusionPrompts:
    """Return the encoder of prompts for the model in `path`; `config` and `tokenizer` are of `read_language_model`.

    Raises:
        ConfigError: the folder has no usable processor of images, or no usable text encoders.
    """
    if settings.diffusion is not None:
        from starling.rollout.engine.diffusion.prompts import DiffusionPrompts

        return DiffusionPrompts(path, settings.diffusion, settings.model.device)
    from starling.rollout.engine.multimodal.prompts import PromptEncoder

    return PromptEncoder(config, tokenizer, path, max_media_bytes=settings.rollout.max_media_bytes, tools=tools)


def make_preparation(
    encoder: PromptEncoder | DiffusionPrompts, settings: RolloutProcess, put: Callable[[object], None]
) -> PromptPreparation:
    """Return the preparation of prompts by `encoder`; `put` takes those that a thread has prepared."""
    from starling.rollout.engine.preparation import PromptPreparation

    own = settings.rollout
    if settings.diffusion is None:
        return PromptPreparation(encoder.encode, put, own.media_timeout_s)
    return PromptPreparation(encoder.encode, put, own.embedding_timeout_s, product="embeddings", has_texts=True)


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return what decodes token ids; without a tokenizer they are steps of trajectories, which have no text."""
    return (lambda _: "") if tokenizer is None else (lambda ids: decode(tokenizer, ids))

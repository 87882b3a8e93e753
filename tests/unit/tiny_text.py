"""Tiny pipelines with text encoders of random weights, and tokenizers of single characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_diffusion import TEXT_WIDTH, tiny
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    T5Config,
    T5EncoderModel,
)

from starling.algo.diffusion.folder import PipelineFolder, read_pipeline
from starling.algo.diffusion.scratch import SCRATCH_FAMILIES
from starling.algo.diffusion.text import scratch
from starling.algo.diffusion.text.scratch import CHARACTERS, NUM_TOKENS, t5_sizes, t5_tokenizer


def _clip_tokenizer(pad: str) -> Any:
    words = [*CHARACTERS, *(f"{one}</w>" for one in CHARACTERS)]
    vocab = {one: number for number, one in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad, model_max_length=77)


def _gemma_tokenizer() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    units = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *CHARACTERS, "\u2581a"]
    vocab = {one: number for number, one in enumerate([*special, *units])}
    return GemmaTokenizer(vocab=vocab, merges=[("\u2581", "a")], add_bos_token=True)


def _clip(width: int, pooled: int) -> Any:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 77}
    ends = {"bos_token_id": 2 * len(CHARACTERS), "eos_token_id": 2 * len(CHARACTERS) + 1}
    config = CLIPTextConfig(vocab_size=NUM_TOKENS, hidden_size=width, projection_dim=pooled, **ends, **sizes)
    return CLIPTextModelWithProjection(config)


def _gemma() -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    return Gemma2Model(
        Gemma2Config(vocab_size=NUM_TOKENS, hidden_size=TEXT_WIDTH, intermediate_size=16, sliding_window=64, **sizes)
    )


def _sd3() -> dict[str, Any]:
    return {
        "tokenizer": _clip_tokenizer("<|endoftext|>"),
        "text_encoder": _clip(4, 2),
        "tokenizer_2": _clip_tokenizer("!"),
        "text_encoder_2": _clip(6, 4),
        "tokenizer_3": t5_tokenizer(),
        "text_encoder_3": T5EncoderModel(T5Config(**t5_sizes())),
    }


def _sana() -> dict[str, Any]:
    return {"tokenizer": _gemma_tokenizer(), "text_encoder": _gemma()}


def text_modules(name: str) -> dict[str, Any]:
    """Return tokenizers and text encoders of a family, all of whose weights are random."""
    if name in SCRATCH_FAMILIES:
        return scratch.text_modules(name)
    return scratch.randomised(_sd3 if name == "sd3" else _sana)


def save_pipeline(folder: Path, name: str, modules: dict[str, Any] | None = None) -> PipelineFolder:
    """Save what a pipeline computes embeddings with, and what else its folder is read for; and read it."""
    modules, transformer = text_modules(name) if modules is None else modules, tiny(name)
    for part, module in modules.items():
        module.save_pretrained(folder / part)
    (folder / "transformer").mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder / "transformer")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"scale_factor_spatial": 8, "scale_factor_temporal": 4}))
    classes = {part: ["transformers", type(module).__name__] for part, module in modules.items()}
    index = {
        "transformer": ["diffusers", type(transformer).__name__],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        **classes,
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return read_pipeline(folder)

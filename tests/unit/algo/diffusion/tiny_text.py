"""Tiny pipelines with text encoders of random weights, and tokenizers of single characters."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Final

import torch
from tiny_diffusion import TEXT_WIDTH, tiny
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

from starling.algo.diffusion.folder import PipelineFolder, read_pipeline

_CHARACTERS: Final = string.ascii_lowercase + string.ascii_uppercase + string.digits + ".,:;-!?'>"
_NUM_TOKENS: Final = 400
"""In the vocabulary of each text encoder."""
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def _t5_tokenizer() -> Any:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=[*special, *((one, -3.0) for one in _CHARACTERS)], extra_ids=0)


def _clip_tokenizer(pad: str) -> Any:
    words = [*_CHARACTERS, *(f"{one}</w>" for one in _CHARACTERS)]
    vocab = {one: number for number, one in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad, model_max_length=77)


def _gemma_tokenizer() -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    units = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *_CHARACTERS, "\u2581a"]
    vocab = {one: number for number, one in enumerate([*special, *units])}
    return GemmaTokenizer(vocab=vocab, merges=[("\u2581", "a")], add_bos_token=True)


def _qwen_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel

    units = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {one: number for number, one in enumerate(units)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _t5(config: Any, cls: Any) -> Any:
    sizes = {"d_kv": 6, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return cls(config(vocab_size=_NUM_TOKENS, d_model=TEXT_WIDTH, feed_forward_proj="gated-gelu", **sizes))


def _clip(width: int, pooled: int) -> Any:
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 77}
    ends = {"bos_token_id": 2 * len(_CHARACTERS), "eos_token_id": 2 * len(_CHARACTERS) + 1}
    config = CLIPTextConfig(vocab_size=_NUM_TOKENS, hidden_size=width, projection_dim=pooled, **ends, **sizes)
    return CLIPTextModelWithProjection(config)


def _gemma() -> Any:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    return Gemma2Model(
        Gemma2Config(vocab_size=_NUM_TOKENS, hidden_size=TEXT_WIDTH, intermediate_size=16, sliding_window=64, **sizes)
    )


def _qwen() -> Any:
    text = {
        "vocab_size": _NUM_TOKENS,
        "hidden_size": TEXT_WIDTH // 2,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": TEXT_WIDTH // 2}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _modules(name: str) -> dict[str, Any]:
    if name == "wan":
        return {"tokenizer": _t5_tokenizer(), "text_encoder": _t5(UMT5Config, UMT5EncoderModel)}
    if name == "cosmos":
        return {"tokenizer": _qwen_tokenizer(), "text_encoder": _qwen()}
    if name == "sd3":
        return {
            "tokenizer": _clip_tokenizer("<|endoftext|>"),
            "text_encoder": _clip(4, 2),
            "tokenizer_2": _clip_tokenizer("!"),
            "text_encoder_2": _clip(6, 4),
            "tokenizer_3": _t5_tokenizer(),
            "text_encoder_3": _t5(T5Config, T5EncoderModel),
        }
    return {"tokenizer": _gemma_tokenizer(), "text_encoder": _gemma()}


def text_modules(name: str) -> dict[str, Any]:
    """Return tokenizers and text encoders of a family, all of whose weights are random."""
    torch.manual_seed(3)
    modules = _modules(name)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for part in modules.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
                for parameter in part.parameters():
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return modules


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

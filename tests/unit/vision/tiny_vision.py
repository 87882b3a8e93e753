"""Tiny random vision-language models with tokenizers and image processors, and test images."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from starling.common.wire.messages import ChatMessage, Media, Prompt, Sampling
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.multimodal.prompts import PromptEncoder

torch.set_num_threads(1)

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY = {token: number for number, token in enumerate((*SPECIAL, *"abcdefgh :.<>0123456789uson?"))}
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}"
    "<|vision_start|><|{{ c.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
WIDE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
QWEN3: dict[str, Any] = {**WIDE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
OWN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {**WIDE, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
}
PIXELS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 64,
    "max_pixels": 1024,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.3, 0.4, 0.5],
}


def make_config(family: str, *, tied: bool = True, initializer_range: float = 0.25) -> Any:
    """Describe a model of `family` with a few thousand parameters."""
    width = {"initializer_range": initializer_range}
    text = {**TEXT, "head_dim": 8} if family.startswith("qwen3") else TEXT
    if family == "qwen3_vl_moe":
        text = {**text, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return AutoConfig.for_model(
        family,
        text_config={**text, **width},
        vision_config={**VISION, **OWN[family], **width},
        tie_word_embeddings=tied,
        image_token_id=VOCABULARY["<|image_pad|>"],
        video_token_id=VOCABULARY["<|video_pad|>"],
        vision_start_token_id=VOCABULARY["<|vision_start|>"],
        vision_end_token_id=VOCABULARY["<|vision_end|>"],
    )


def make_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a new model with the weights of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(make_config(family, **changes)).eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters and the special tokens."""
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=[*SPECIAL[1:2], *SPECIAL[4:]],
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def write_folder(folder: Path, family: str, *, weights: bool = True) -> Path:
    """Write a model of `family` into `folder`, with its tokenizer and processors."""
    if weights:
        make_model(family).save_pretrained(folder)
    else:
        make_config(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    return folder


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def data_url(image: Image.Image) -> str:
    """Return `image` as a data URL."""
    file = io.BytesIO()
    image.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def write_video(folder: Path, width: int, height: int, num_frames: int, seed: int = 0) -> str:
    """Write the frames of a video into `folder`; return its path."""
    folder.mkdir()
    for number in range(num_frames):
        picture(width, height, seed + number).save(folder / f"{number:04}.png")
    return str(folder)


def ask(text: str, *media: Media, name: str = "p") -> Prompt:
    """Return a prompt of one user message."""
    return Prompt(id=name, messages=(ChatMessage(role="u", content=text),), media=media)


def image(width: int, height: int, seed: int = 0) -> Media:
    """Return an image of noise as `Media`."""
    return Media(kind="image", uri=data_url(picture(width, height, seed)))


def make_encoder(folder: Path, model: Any, max_media_bytes: int = 1 << 20) -> PromptEncoder:
    """Return an encoder for `model`."""
    return PromptEncoder(model.config, make_tokenizer(), folder, max_media_bytes=max_media_bytes)


def generate(
    model: Any, encoder: PromptEncoder, prompts: dict[str, Prompt], *, count: int = 2, **sampling: Any
) -> dict[str, GroupResult]:
    """Sample `count` completions of each prompt, all in one batch."""
    engine = TransformersEngine(model, eos_token_ids=(), max_rows=64)
    for number, (lease, prompt) in enumerate(prompts.items()):
        ids, tensors = encoder.encode(prompt)
        settings = Sampling(**{"max_tokens": 3 + 2 * number, "seed": number, **sampling})
        engine.add(GroupRequest(lease, ids, count, settings, tensors))
    results: dict[str, GroupResult] = {}
    while engine.num_running or engine.num_waiting:
        for ended in engine.step():
            assert not isinstance(ended, GroupFailed), ended.reason
            results[ended.lease] = ended
    return results

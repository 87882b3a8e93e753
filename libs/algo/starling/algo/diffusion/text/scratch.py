"""Tiny text encoders of fixed random weights, and their tokenizers, for pipelines that are made from nothing.

They know nothing of language: their embeddings tell prompts apart, so that a model which is trained on them can learn
what each prompt asks for. The tokens of a prompt are its characters, for Wan, or its bytes, for Cosmos.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

WIDTH: Final = 12
"""Of an embedding."""
CHARACTERS: Final = string.ascii_letters + string.digits + string.punctuation
"""Of which the tokenizer of T5 has a token each."""
NUM_TOKENS: Final = 400
"""In the vocabulary of each text encoder; more than its tokenizer has."""
_SEED: Final = 3
_SPREAD: Final = 0.2
"""Standard deviation of what is added to all weights: those of new models are so small that embeddings look alike."""
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def text_modules(family: str) -> dict[str, Any]:
    """Return the tokenizer and the text encoder of "wan" or "cosmos", by their names in a pipeline."""
    return randomised(_MODULES[family])


def randomised(make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parts that `make` makes, in evaluation mode, with fixed weights that are all random.

    torch's generator is left as it was.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        parts = dict(make())
    generator = torch.Generator().manual_seed(_SEED + 1)
    with torch.no_grad():
        for part in parts.values():
            if isinstance(part, torch.nn.Module):
                part.eval()
                for parameter in part.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_SPREAD)
    return parts


def t5_tokenizer() -> Any:
    """Return a tokenizer of T5 whose tokens are single characters."""
    from transformers import T5Tokenizer

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5Tokenizer(vocab=[*special, *((one, -3.0) for one in CHARACTERS)], extra_ids=0)


def t5_sizes() -> dict[str, Any]:
    """Return the sizes in the configuration of a tiny encoder of the T5 family."""
    sizes = {"d_model": WIDTH, "d_kv": 6, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    return {"vocab_size": NUM_TOKENS, "feed_forward_proj": "gated-gelu", **sizes}


def _umt5() -> dict[str, Any]:
    from transformers import UMT5Config, UMT5EncoderModel

    return {"tokenizer": t5_tokenizer(), "text_encoder": UMT5EncoderModel(UMT5Config(**t5_sizes()))}


def _qwen() -> dict[str, Any]:
    return {"tokenizer": _qwen_tokenizer(), "text_encoder": _qwen_encoder()}


def _qwen_tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    units = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {one: number for number, one in enumerate(units)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], extra_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _qwen_encoder() -> Any:
    """Return a Qwen2.5-VL of two layers, whose hidden states side by side are an embedding."""
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

    width = WIDTH // 2
    text = {
        "vocab_size": NUM_TOKENS,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "bos_token_id": None,
        "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": width}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


_MODULES: Final[Mapping[str, Callable[[], Mapping[str, Any]]]] = {"wan": _umt5, "cosmos": _qwen}

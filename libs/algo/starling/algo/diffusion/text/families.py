"""Text embeddings of each family: which parts of a pipeline compute them, and how.

Each family has its own tokens, padding and choice of hidden states, which its model was trained with. They are those of
diffusers' pipelines for one prompt, to the rounding of float32:

    Wan              UMT5, 512 tokens: the last hidden states of the text; the model reads zeros for its padding
    Cosmos 2.5       Qwen2.5-VL, 512 tokens of a chat: the hidden states of all layers, each normalised per token, side
                     by side. Its model also reads those of the padding, which are not zero
    SD3              two CLIPs, 77 tokens, whose last but one hidden states stand side by side, before those of T5, 256
                     tokens, filled up with zeros to its width; the model reads the padding. The pooled embeddings are
                     those of both CLIPs
    SANA             Gemma 2, 300 tokens, in lower case, behind an instruction (section 2.3 of arXiv 2410.10629) of
                     which the first and the last token are kept; without it for the text that guidance leads away from
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.common.wire.tensors import POOLED, TEXT

_CLIP_LENGTH: Final = 77
"""Tokens of a text for CLIP."""
_SYSTEM_PROMPT: Final = "You are a helpful assistant who will provide prompts to an image generator."
"""Of Cosmos-Predict 2.5, as its model was trained."""
_STD_FLOOR: Final = 1e-8
"""Added to the standard deviation of a token's hidden state."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The embeddings of one prompt."""

    tensors: Mapping[str, Tensor]
    """As `starling.algo.diffusion.conditions` names them, without padding that is zero for the model."""
    num_cut: int = 0
    """Tokens of the prompt that the model does not read, because it is too long."""


@dataclass(frozen=True, slots=True)
class TextParts:
    """The loaded parts of a pipeline that compute embeddings."""

    modules: Mapping[str, Any]
    """Tokenizers and text encoders, by their name in the pipeline."""
    length: int
    """Tokens of a text that the model was trained with."""
    width: int | None = None
    """Of an embedding, where the configuration of the transformer says it."""


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How the embeddings of a family are computed."""

    encoders: Mapping[str, str]
    """Class in transformers of each text encoder, by its name in the pipeline."""
    clean: Callable[[str], str]
    """Returns the text that is tokenised."""
    encode: Callable[[TextParts, str, str], Encoding]
    """Computes the embeddings of a cleaned text behind an instruction, which is empty for most."""
    optional: frozenset[str] = frozenset()
    """Encoders that a pipeline may leave out."""
    instructed_by: str = ""
    """Pipeline in diffusers with a default instruction; empty without one."""

    @property
    def tokenizers(self) -> Mapping[str, str]:
        """Name of each encoder's tokenizer in the pipeline."""
        return {name: name.replace("text_encoder", "tokenizer") for name in self.encoders}


def _identical(text: str) -> str:
    return text


def _without_markup(text: str) -> str:
    """Return a text with HTML's entities replaced (also those that were escaped twice) and single spaces."""
    try:
        text = import_module("ftfy").fix_text(text)  # as diffusers does where it is installed
    except ImportError:
        pass
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


def _lower(text: str) -> str:
    return text.lower().strip()


@cache
def default_instruction(pipeline: str) -> str:
    """Return the instruction that a pipeline of diffusers puts before each prompt.

    Raises:
        ConfigError: diffusers is missing, or its pipeline has none.
    """
    try:
        import diffusers

        call = inspect.signature(getattr(diffusers, pipeline).__call__)
        return "\n".join(call.parameters["complex_human_instruction"].default)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the instruction of {pipeline} is not found ({error}): install the extra `diffusion`, or embed without it"
        ) from error


def _tokens(tokenizer: Any, text: str, length: int) -> tuple[Tensor, Tensor, int]:
    """Return the ids of a text and their mask, both [1, length], and the number of tokens that were cut off."""
    num_tokens = len(tokenizer(text, add_special_tokens=True).input_ids)
    found = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return found.input_ids, found.attention_mask, max(0, num_tokens - length)


def _wan(parts: TextParts, text: str, _: str) -> Encoding:
    encoder = parts.modules["text_encoder"]
    ids, mask, num_cut = _tokens(parts.modules["tokenizer"], text, parts.length)
    hidden = encoder(ids.to(encoder.device), mask.to(encoder.device)).last_hidden_state[0].to(encoder.dtype)
    return Encoding({TEXT: hidden[: int(mask.sum())]}, num_cut)


def _cosmos(parts: TextParts, text: str, _: str) -> Encoding:
    encoder, tokenizer = parts.modules["text_encoder"], parts.modules["tokenizer"]
    chat = [
        {"role": role, "content": [{"type": "text", "text": content}]}
        for role, content in (("system", _SYSTEM_PROMPT), ("user", text))
    ]
    settings = {"add_generation_prompt": False, "add_vision_id": False, "tokenize": True, "return_dict": False}
    num_tokens = len(tokenizer.apply_chat_template(chat, **settings))
    ids = tokenizer.apply_chat_template(
        chat, max_length=parts.length, truncation=True, padding="max_length", **settings
    )
    layers = encoder(
        torch.tensor([ids], device=encoder.device), output_hidden_states=True, logits_to_keep=1
    ).hidden_states[1:]
    normal = [
        (layer - layer.mean(dim=-1, keepdim=True)) / (layer.std(dim=-1, keepdim=True) + _STD_FLOOR) for layer in layers
    ]
    return Encoding({TEXT: torch.cat(normal, dim=-1)[0].to(encoder.dtype)}, max(0, num_tokens - parts.length))


def _sd3(parts: TextParts, text: str, _: str) -> Encoding:
    hidden, pooled = [], []
    for suffix in ("", "_2"):
        encoder = parts.modules[f"text_encoder{suffix}"]
        ids, _mask, num_cut = _tokens(parts.modules[f"tokenizer{suffix}"], text, _CLIP_LENGTH)
        found = encoder(ids.to(encoder.device), output_hidden_states=True)
        hidden.append(found.hidden_states[-2][0])
        pooled.append(found[0][0])
    of_clip, last = torch.cat(hidden, dim=-1), parts.modules.get("text_encoder_3")
    if last is None:  # zeros, which padding has, too
        assert parts.width is not None, "it was checked"
        return Encoding({TEXT: _widened(of_clip, parts.width), POOLED: torch.cat(pooled)}, num_cut)
    ids, _mask, num_cut = _tokens(parts.modules["tokenizer_3"], text, parts.length - _CLIP_LENGTH)
    of_t5 = last(ids.to(last.device))[0][0].to(last.dtype)
    return Encoding({TEXT: torch.cat([_widened(of_clip, of_t5.shape[1]), of_t5]), POOLED: torch.cat(pooled)}, num_cut)


def _widened(hidden: Tensor, width: int) -> Tensor:
    if hidden.shape[1] > width:
        raise ConfigError(
            f"the CLIPs give embeddings of {hidden.shape[1]} numbers, more than the {width} of T5 or of the "
            "transformer: they are of different models"
        )
    return torch.nn.functional.pad(hidden, (0, width - hidden.shape[1]))


def _sana(parts: TextParts, text: str, instruction: str) -> Encoding:
    encoder, tokenizer = parts.modules["text_encoder"], parts.modules["tokenizer"]
    tokenizer.padding_side = "right"
    # The first and the last token of the instruction stay.
    length = parts.length + (len(tokenizer.encode(instruction)) - 2 if instruction else 0)
    ids, mask, num_cut = _tokens(tokenizer, instruction + text, length)
    hidden = encoder(ids.to(encoder.device), attention_mask=mask.to(encoder.device))[0][0].to(encoder.dtype)
    kept = [0, *range(length - parts.length + 1, length)]
    return Encoding({TEXT: hidden[kept][mask[0, kept].bool().to(hidden.device)]}, num_cut)


TEXT_FAMILIES: Final[Mapping[str, TextFamily]] = {
    "WanTransformer3DModel": TextFamily({"text_encoder": "UMT5EncoderModel"}, _without_markup, _wan),
    "CosmosTransformer3DModel": TextFamily({"text_encoder": "Qwen2_5_VLForConditionalGeneration"}, _identical, _cosmos),
    "SD3Transformer2DModel": TextFamily(
        {
            "text_encoder": "CLIPTextModelWithProjection",
            "text_encoder_2": "CLIPTextModelWithProjection",
            "text_encoder_3": "T5EncoderModel",
        },
        _identical,
        _sd3,
        optional=frozenset({"text_encoder_3"}),
    ),
    "SanaTransformer2DModel": TextFamily({"text_encoder": "Gemma2Model"}, _lower, _sana, instructed_by="SanaPipeline"),
    "SanaVideoTransformer3DModel": TextFamily(
        {"text_encoder": "Gemma2Model"}, _lower, _sana, instructed_by="SanaVideoPipeline"
    ),
}
"""By the class of the transformer in diffusers."""

"""Between text and token ids, with the model's own tokenizer. Policy and rollout must agree here to the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids that the model continues.

    A conversation goes through the tokenizer's chat template, up to where the assistant speaks; plain text is
    tokenized as it stands, without special tokens.

    Raises:
        ConfigError: `prompt` is a conversation and the tokenizer has no chat template.
    """
    if not prompt.messages:
        return _encode(tokenizer, prompt.text)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"prompt {prompt.id!r} is a conversation and the tokenizer has no chat template; "
            "add one to the model folder or give the dataset as plain text"
        )
    conversation = [{"role": message.role, "content": message.content} for message in prompt.messages]
    # As text first: the template writes its own special tokens, and the tokenizer must not add another set.
    return _encode(tokenizer, tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))


def encode_response(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids of the prompt's reference answer, and of the token that ends it.

    Raises:
        ConfigError: the prompt has no reference, or the tokenizer no end-of-sequence token.
    """
    if not prompt.reference:
        raise ConfigError(f"example {prompt.id!r} has no response; name its column in data.reference_column")
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-sequence token, so nothing could teach when to stop; set one")
    return [*_encode(tokenizer, prompt.reference), int(tokenizer.eos_token_id)]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

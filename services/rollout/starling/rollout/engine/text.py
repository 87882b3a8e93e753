"""Between text and token ids, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

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
        return [int(token) for token in tokenizer.encode(prompt.text, add_special_tokens=False)]
    if not tokenizer.chat_template:
        raise ConfigError(
            f"prompt {prompt.id!r} is a conversation and the tokenizer has no chat template; "
            "add one to the model folder or give the dataset as plain text"
        )
    conversation = [{"role": message.role, "content": message.content} for message in prompt.messages]
    # As text first: the template writes its own special tokens, and the tokenizer must not add another set.
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def end_token_ids(tokenizer: Any, path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's and those of `generation_config.json` in folder `path`.

    The defaults of a model's configuration class are left out on purpose: they name tokens of another vocabulary.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if (Path(path) / "generation_config.json").is_file():
        declared = GenerationConfig.from_pretrained(str(path)).eos_token_id
        found.update([declared] if isinstance(declared, int) else declared or [])
    return tuple(sorted(found))

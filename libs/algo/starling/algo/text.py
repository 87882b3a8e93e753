"""Conversion between text and token ids with the model's tokenizer, shared by policy and rollout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starling.algo.chat_template import TemplateError, render
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Prompt

_MARKER: Final = re.compile("<(image|video)>")


def encode_prompt(tokenizer: Any, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
    """Return the token ids that the model continues.

    A conversation is rendered by the tokenizer's chat template, up to the start of the assistant's turn; plain text is
    tokenized unchanged, without special tokens. `tools` as for `prompt_text`.

    Raises:
        ConfigError: `prompt` is a conversation that `prompt_text` cannot render, or it has images or videos, which need
            a rollout with a vision-language model.
    """
    if prompt.media:
        raise ConfigError(
            f"prompt {prompt.id!r} has {len(prompt.media)} images or videos, and only text is supported here; "
            "generate with a vision-language model, or give a dataset without media"
        )
    return encode_text(tokenizer, prompt_text(tokenizer, prompt, tools))


def prompt_text(tokenizer: Any, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the text that the model continues, with the chat template's placeholders for media.

    Args:
        tokenizer: the model's.
        prompt: a conversation, or plain text.
        tools: functions that the model may call, as JSON schemas in OpenAI's format; ignored for plain text.

    Raises:
        ConfigError: `prompt` is a conversation, and the tokenizer has no chat template or one that refuses it.
    """
    if not prompt.messages:
        return prompt.text
    return conversation_text(tokenizer, conversation(prompt), tools, of=f"prompt {prompt.id!r}")


def plain_text(prompt: Prompt) -> str:
    """Return the prompt's text, or its messages' contents separated by blank lines: without a chat template."""
    if not prompt.messages:
        return prompt.text
    return "\n\n".join(message.content for message in prompt.messages)


def conversation(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the messages of `prompt` in the format of chat templates."""
    return [
        {"role": message.role, "content": _parts(message.content) if prompt.media else message.content}
        for message in prompt.messages
    ]


def conversation_text(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, of: str
) -> str:
    """Return `messages` rendered by the chat template, up to the start of the assistant's next turn.

    Args:
        tokenizer: the model's.
        messages: in the format of chat templates.
        tools: functions that the model may call, as JSON schemas in OpenAI's format.
        of: names the conversation in errors.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{of} is a conversation and the tokenizer has no chat template; "
            "add one to the model folder or give the dataset as plain text"
        )
    try:
        return _rendered(tokenizer, messages, list(tools))
    except Exception as error:  # code of the model's folder, which may raise anything
        reason = str(error)
        if not isinstance(error, TemplateError):
            reason = f"{type(error).__name__}: {(reason.strip() or 'no reason given').splitlines()[0]:.200}"
        raise ConfigError(
            f"the model's chat template cannot render {of} ({reason}); "
            "change the prompt's messages, or the template in the model folder"
        ) from error


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: list[Mapping[str, Any]]) -> str:
    from transformers import PreTrainedTokenizerBase  # importing it takes seconds

    given: dict[str, Any] = {"tools": tools} if tools else {}
    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        # The tokenizer's own code: of a package, or of a folder whose code the recipe trusts.
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **given))
    template = tokenizer.get_chat_template(tools=given.get("tools"))
    return render(template, messages, {**tokenizer.special_tokens_map, **given})


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `text`.

    Without special tokens: a chat template contains its own, and the tokenizer must not add another set.
    """
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def markers(messages: Sequence[ChatMessage]) -> list[str]:
    """Return the kinds of the markers ``<image>`` and ``<video>`` in `messages`, in order: ``image``, ``video``, ..."""
    return [kind for message in messages for kind in _MARKER.findall(message.content)]


def check_media(prompt: Prompt) -> None:
    """Refuse a prompt whose media do not match the markers in its messages.

    Raises:
        ConfigError: with both lists and the remedy.
    """
    if prompt.media and not prompt.messages:
        raise ConfigError(
            f"prompt {prompt.id!r} has images or videos and is plain text: give it as a conversation, "
            "because only a chat template can place them"
        )
    wanted, given = markers(prompt.messages), [media.kind for media in prompt.media]
    if wanted != given:
        raise ConfigError(
            f"prompt {prompt.id!r} refers to {_listed(wanted)} and has {_listed(given)}: "
            "write <image> or <video> once for each, in the order of the media"
        )


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "no media"


def _parts(content: str) -> list[dict[str, str]]:
    """Return `content` in the format of chat templates for a message with media."""
    # Splitting at a group keeps it: every other piece is the kind of a marker.
    pieces = enumerate(_MARKER.split(content))
    return [{"type": piece} if at % 2 else {"type": "text", "text": piece} for at, piece in pieces if piece]


def encode_response(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the token ids of the prompt's reference answer, and the end-of-sequence token.

    Raises:
        ConfigError: the prompt has no reference, or the tokenizer no end-of-sequence token.
    """
    if not prompt.reference:
        raise ConfigError(f"example {prompt.id!r} has no response; name its column in data.reference_column")
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so the model could not learn when to stop; set one"
        )
    return [*encode_text(tokenizer, prompt.reference), int(tokenizer.eos_token_id)]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of `ids` without special tokens."""
    return str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))

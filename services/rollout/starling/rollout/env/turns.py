"""What stands between two replies of the model, as text and as tokens: pure functions of a tokenizer.

The model's tokens stay as they were sampled, whatever the chat template would make of their text: some templates drop
the reasoning of earlier turns, strip blanks, or write a tool call in another form. So nothing that the model said is
written again. The template is given a mark in place of the last reply, and what it writes behind the mark is what
comes next: the end of the assistant's turn, the new messages, and the beginning of the next turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starling.algo.text import conversation_text, encode_text
from starling.common.errors import ConfigError

Message = Mapping[str, Any]

_MARK: Final = "StarlingReply"


def text_between(
    tokenizer: Any, messages: Sequence[Message], said: Sequence[Message], tools: Sequence[Message], *, of: str
) -> str:
    """Return what the chat template writes from the end of the last reply to the beginning of the next one.

    Args:
        tokenizer: the model's.
        messages: the conversation so far; the last one is the assistant's.
        said: what comes after it, at least one message.
        tools: functions that the model may call.
        of: names the conversation in errors.

    Raises:
        ConfigError: the template refuses the messages, or does not write what the assistant says.
    """
    mark = _mark([*messages, *said])
    marked = [*messages[:-1], {"role": "assistant", "content": mark}, *said]
    _, found, after = conversation_text(tokenizer, marked, tools, of=of).rpartition(mark)
    if not found:
        raise ConfigError(
            f"the model's chat template does not write what the assistant said in {of}, so nothing can follow it; "
            "change the template in the model folder"
        )
    return after


def without_ending(text: str, ending: str) -> str:
    """Return `text` without the end of the turn, where the model has sampled that itself.

    Args:
        text: what `text_between` returned.
        ending: the text of the token that ended the reply; empty where none did. Then the end of the turn is the
            template's.
    """
    stripped = text.lstrip()
    return stripped.removeprefix(ending) if ending and stripped.startswith(ending) else text


def encode_behind(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that stands behind other tokens.

    Some tokenizers begin every text with a blank; behind a special token, which is its own word, they add none.
    """
    anchor, token = tokenizer.eos_token, tokenizer.eos_token_id
    if anchor:
        ids = encode_text(tokenizer, anchor + text)
        if ids[:1] == [token]:
            return ids[1:]
    return encode_text(tokenizer, text)


def common_length(sequences: Sequence[list[int]]) -> int:
    """Return how many tokens all of `sequences` begin with alike."""
    first, last = min(sequences, default=[]), max(sequences, default=[])  # all others lie between these two
    shared = min(len(first), len(last))
    return next((at for at in range(shared) if first[at] != last[at]), shared)


def _mark(messages: Sequence[Message]) -> str:
    """Return a word that no message has."""
    texts, number = str(messages), 0
    while f"{_MARK}{number}" in texts:
        number += 1
    return f"{_MARK}{number}"

"""What stands between two replies of the model, as text and as tokens: pure functions of a tokenizer.

The model's tokens stay as they were sampled, whatever the chat template would make of their text: some templates drop
the reasoning of earlier turns, strip blanks, or write a tool call in another form. So nothing that the model said is
written again. The template is given a mark in place of the last reply, and what it writes behind the mark is what
comes next: the end of the assistant's turn, the new messages, and the beginning of the next turn.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from starling.algo.text import conversation_text, decode, encode_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Status

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


# JOINED from starling.rollout.env.stops: Texts that end a reply, which the engine, knowing tokens only,
# cannot see.

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion, TokenListener

MARGIN_TOKENS = 8
"""Looked at besides as many tokens as a stop text has bytes: some characters take several tokens."""


class StopTexts:
    """Watches one completion for texts.

    Args:
        tokenizer: the model's.
        texts: any of which ends it; none for a completion that nothing needs to watch.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(text for text in texts if text)
        self._window = max((len(text.encode()) for text in self._texts), default=0) + MARGIN_TOKENS
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._num_seen = 0

    @property
    def listener(self) -> TokenListener | None:
        """To be told of the tokens, in any thread; None where there is nothing to watch for."""
        return self._heard if self._texts else None

    def _heard(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with self._lock:
            self._ids.extend(int(token) for token in token_ids)

    def reached(self) -> bool:
        """Say whether one of the texts is there, looking at what came since the last time."""
        with self._lock:
            new = self._ids[max(0, self._num_seen - self._window) :]
            self._num_seen = len(self._ids)
        return self._found(new)

    def cut(self, completion: Completion) -> Completion:
        """Return `completion` up to the token with which the first of the texts is complete."""
        ids = completion.token_ids.tolist()
        if not self._texts or not self._found(ids):
            return completion
        low, high = 1, len(ids)  # the text of more tokens holds that of fewer, but for half a character at its end
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._found(ids[:middle]) else (middle + 1, high)
        return replace(
            completion,
            token_ids=completion.token_ids[:low],
            logprobs=completion.logprobs[:low],
            versions=completion.versions[:low],
            status=Status.OK,
        )

    def _found(self, ids: Sequence[int]) -> bool:
        text = decode(self._tokenizer, ids)
        return any(one in text for one in self._texts)

"""Text and tokens between two replies of the model, and stop texts that end a reply.

Sampled tokens stay as they are, whatever the chat template would make of their text: some templates drop the reasoning
of earlier turns, strip blanks, or rewrite a tool call. So a reply is never rendered again. The template gets a
placeholder for the last reply, and what it writes after the placeholder is what follows: the end of the assistant's
turn, the new messages, and the beginning of the next turn.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from starling.algo.text import conversation_text, decode, encode_text
from starling.common.errors import ConfigError
from starling.common.wire.messages import Status

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion, TokenListener

Message = Mapping[str, Any]

MARGIN_TOKENS: Final = 8
"""Tokens that are searched in addition to as many as a stop text has bytes: a character may take several tokens."""

_PLACEHOLDER: Final = "StarlingReply"


def text_between(
    tokenizer: Any, messages: Sequence[Message], said: Sequence[Message], tools: Sequence[Message], *, of: str
) -> str:
    """Return what the chat template writes from the end of the last reply to the beginning of the next one.

    Args:
        tokenizer: the model's.
        messages: the conversation so far; the last one is the assistant's.
        said: the messages after it, at least one.
        tools: functions that the model may call.
        of: names the conversation in errors.

    Raises:
        ConfigError: the template refuses the messages, or does not write the assistant's content.
    """
    placeholder = _placeholder([*messages, *said])
    marked = [*messages[:-1], {"role": "assistant", "content": placeholder}, *said]
    _, found, after = conversation_text(tokenizer, marked, tools, of=of).rpartition(placeholder)
    if not found:
        raise ConfigError(
            f"the model's chat template does not write what the assistant said in {of}, so nothing can follow it; "
            "change the template in the model folder"
        )
    return after


def strip_end_token(text: str, ending: str) -> str:
    """Return `text` without the end of the turn, where the model sampled it itself.

    Args:
        text: result of `text_between`.
        ending: text of the token that ended the reply; empty if none did, so that the template's end of the turn
            stays.
    """
    stripped = text.lstrip()
    return stripped.removeprefix(ending) if ending and stripped.startswith(ending) else text


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that follows other tokens.

    Some tokenizers put a blank before every text, but not after a special token; so the text is encoded after one.
    """
    anchor, token = tokenizer.eos_token, tokenizer.eos_token_id
    if anchor:
        ids = encode_text(tokenizer, anchor + text)
        if ids[:1] == [token]:
            return ids[1:]
    return encode_text(tokenizer, text)


def common_length(sequences: Sequence[list[int]]) -> int:
    """Return the length of the common prefix of `sequences`."""
    first, last = min(sequences, default=[]), max(sequences, default=[])  # all others sort between these two
    shared = min(len(first), len(last))
    return next((at for at in range(shared) if first[at] != last[at]), shared)


def _placeholder(messages: Sequence[Message]) -> str:
    """Return a word that occurs in no message: it contains a digest of all of them."""
    return _PLACEHOLDER + hashlib.sha256(str(messages).encode("utf-8", "surrogatepass")).hexdigest()


class StopTexts:
    """Detects stop texts in one completion; the engine knows stop tokens only.

    Args:
        tokenizer: the model's.
        texts: any of them ends the completion; empty to detect nothing.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, tuple(text for text in texts if text)
        self._window = max((len(text.encode()) for text in self._texts), default=0) + MARGIN_TOKENS
        self._lock = threading.Lock()
        self._ids: list[int] = []
        self._num_seen = 0

    @property
    def listener(self) -> TokenListener | None:
        """Listener for the completion's tokens, called in any thread; None without stop texts."""
        return self._on_tokens if self._texts else None

    def _on_tokens(self, index: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with self._lock:
            self._ids.extend(int(token) for token in token_ids)

    def reached(self) -> bool:
        """Whether a stop text has been sampled, searching the tokens since the last call."""
        with self._lock:
            new = self._ids[max(0, self._num_seen - self._window) :]
            self._num_seen = len(self._ids)
        return self._found(new)

    def cut(self, completion: Completion) -> Completion:
        """Return `completion` up to the token that completes the first stop text."""
        ids = completion.token_ids.tolist()
        if not self._texts or not self._found(ids):
            return completion
        low, high = 1, len(ids)  # bisection: more tokens decode to a longer text (but for a partial character)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._found(ids[:middle]) else (middle + 1, high)
        return replace(
            completion,
            token_ids=completion.token_ids[:low],
            logprobs=completion.logprobs[:low],
            versions=completion.versions[:low],
            status=Status.OK,
            kept=None if completion.kept is None else completion.kept.take(slice(0, low)),
            truncation_nats=None if completion.truncation_nats is None else completion.truncation_nats[:low],
            routing=None if completion.routing is None else completion.routing[:low],
        )

    def _found(self, ids: Sequence[int]) -> bool:
        text = decode(self._tokenizer, ids)
        return any(one in text for one in self._texts)

"""Texts that end a reply, which the engine, knowing tokens only, cannot see."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starling.algo.text import decode
from starling.common.wire.messages import Status

if TYPE_CHECKING:
    from starling.rollout.engine.base import Completion, Listener

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
    def listener(self) -> Listener | None:
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

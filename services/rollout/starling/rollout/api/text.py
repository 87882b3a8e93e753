"""Token ids become text as they come: whole characters only, and nothing beyond a stop text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

BROKEN: Final = "�"
"""What decoders write for bytes that are no character yet."""


class TextStream:
    """The text of one completion, which grows by tokens.

    A tokenizer's decoder may write a token otherwise at the beginning of a text, and a character may be spread over
    tokens. So each piece of text is the difference between two decodings that begin a few tokens earlier; what is
    returned, joined, is what decoding all tokens at once gives.

    Args:
        decode: the text of token ids, without special tokens.
        stops: texts before which the text ends.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._begin = 0
        """Where decoding begins: a few tokens before those whose text is out."""
        self._read = 0
        """Tokens whose text is in `_text`."""
        self._text = ""
        self._told = 0
        """Characters that were returned."""
        self.stopped = False
        """Whether a stop text came; nothing counts from there on."""

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end, or up to the one that completed a stop text."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """The text so far, without what might still become a stop text or a character."""
        return self._text[: self._told]

    def add(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is certain because of them."""
        begin = self._told
        for token in token_ids:
            if self.stopped:
                break
            self._ids.append(int(token))
            fresh = self._fresh()
            if fresh and not fresh.endswith(BROKEN):
                self._extend(fresh)
            elif self._first_stop(whole := fresh.rstrip(BROKEN)) is not None:
                self._extend(whole)  # the token that began a character completed a stop text before it
        return self._text[begin : self._told]

    def close(self) -> str:
        """Return the rest: nothing comes after it."""
        begin = self._told
        if not self.stopped:
            self._extend(self._fresh())
            if not self.stopped:
                self._told = len(self._text)
        return self._text[begin : self._told]

    def _fresh(self) -> str:
        """Return the text of the tokens that are not in `_text`."""
        known = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin :])[len(known) :]

    def _extend(self, fresh: str) -> None:
        end = self._first_stop(fresh)
        self._text += fresh
        self._begin, self._read = self._read, len(self._ids)
        if end is not None:
            self.stopped, self._text = True, self._text[:end]
            self._told = len(self._text)
        else:
            self._told = max(self._told, len(self._text) - _overlap(self._text, self._stops))

    def _first_stop(self, fresh: str) -> int | None:
        """Return where in the text, grown by `fresh`, the first stop text begins; None where there is none."""
        begin = max(0, len(self._text) - max(map(len, self._stops), default=0))
        searched = self._text[begin:] + fresh
        return min((begin + at for stop in self._stops if (at := searched.find(stop)) >= 0), default=None)


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Return how many of the last characters of `text` may be the beginning of one of `stops`."""
    return max(
        (size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])),
        default=0,
    )

"""Incremental detokenizer: text of a growing completion, in whole characters and up to a stop text. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT_CHARACTER: Final = "�"
"""Text of decoders for an incomplete character, or for bytes that are none; a model may also write it itself."""
MAX_UNREAD: Final = 16
"""Tokens whose text is decoded again with each further one, because it may end with an incomplete character."""
CHARACTER_TOKENS: Final = 4
"""Most tokens that a character has: one for each byte."""


class IncrementalDetokenizer:
    """The text of one completion, which grows by tokens.

    A decoder may write a token differently at the beginning of a text, and a character may span tokens. So new text is
    the difference between two decodings that begin a few tokens earlier; the pieces together equal the decoding of all
    tokens at once.

    Args:
        decode: decodes token ids, without special tokens.
        stops: stop texts; the text ends before the first of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._begun = [_BegunStop(stop) for stop in stops]
        self._ids: list[int] = []
        self._begin = 0
        """Where decoding begins: a few tokens before those whose text was returned."""
        self._read = 0
        """Number of tokens whose text is in `_text`."""
        self._text = ""
        self._num_returned = 0
        """Number of characters that were returned."""
        self.stopped = False
        """Whether a stop text was found; later tokens are ignored."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, up to the one that completed a stop text."""
        return len(self._ids)

    @property
    def text(self) -> str:
        """The text so far, without an incomplete character or what may become a stop text."""
        return self._text[: self._num_returned]

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the new text that is certain now."""
        begin = self._num_returned
        for token in token_ids:
            if self.stopped:
                break
            self._ids.append(int(token))
            fresh = self._fresh()
            if fresh and not fresh.endswith(REPLACEMENT_CHARACTER):
                self._extend(fresh)
            elif self._first_stop(whole := fresh.rstrip(REPLACEMENT_CHARACTER)) is not None:
                self._extend(whole)  # the token that began a character completed a stop text before it
            elif len(self._ids) - self._read > MAX_UNREAD:
                self._extend_part(fresh)
        return self._text[begin : self._num_returned]

    def close(self) -> str:
        """Return the remaining text, after the last token."""
        begin = self._num_returned
        if not self.stopped:
            self._extend(self._fresh())
            if not self.stopped:
                self._num_returned = len(self._text)
        return self._text[begin : self._num_returned]

    def _fresh(self, end: int | None = None) -> str:
        """Return the text of the tokens that are not in `_text`, up to `end`."""
        known = self._decode(self._ids[self._begin : self._read])
        return self._decode(self._ids[self._begin : end])[len(known) :]

    def _extend_part(self, fresh: str) -> None:
        """Extend the text by the beginning of `fresh`, which only invalid bytes or written replacement characters end:
        not by the last few tokens, which may begin a character."""
        last = len(self._ids) - CHARACTER_TOKENS
        for read in range(last, last - CHARACTER_TOKENS, -1):
            part = self._fresh(read)
            if fresh.startswith(part):  # and does not end within a character
                self._extend(part, read)
                return

    def _extend(self, fresh: str, read: int | None = None) -> None:
        """Extend the text by that of the tokens up to `read`, by default of all."""
        end = self._first_stop(fresh)
        self._text += fresh
        self._begin, self._read = self._read, len(self._ids) if read is None else read
        if end is not None:
            self.stopped, self._text = True, self._text[:end]
            self._num_returned = len(self._text)
        else:
            begun = max((stop.add(fresh) for stop in self._begun), default=0)
            self._num_returned = max(self._num_returned, len(self._text) - begun)

    def _first_stop(self, fresh: str) -> int | None:
        """Return where the first stop text begins in the text followed by `fresh`; None without one."""
        begin = max(0, len(self._text) - max(map(len, self._stops), default=0))
        searched = self._text[begin:] + fresh
        return min((begin + at for stop in self._stops if (at := searched.find(stop)) >= 0), default=None)


class _BegunStop:
    """How much of a stop text the text so far ends with, character by character (Knuth, Morris, Pratt 1977).

    A look at each possible end of the text, with each token, would take time in proportion to the square of the length.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._size = 0
        self._shorter = [0] * len(stop)
        """For each number of characters less one: the next smaller number with which their end begins the stop text."""
        size = 0
        for at in range(1, len(stop)):
            while size and stop[at] != stop[size]:
                size = self._shorter[size - 1]
            size += stop[at] == stop[size]
            self._shorter[at] = size

    def add(self, text: str) -> int:
        """Add text that does not complete the stop text; return with how many of its characters the text ends now."""
        stop, size = self._stop, self._size
        for character in text:
            while size and stop[size] != character:
                size = self._shorter[size - 1]
            size += stop[size] == character
        self._size = size
        return size

"""Forest of segments: which tokens of a packed row attend to which others, without a mask.

A *segment* is a run of tokens. It attends causally to itself, and to all tokens of its parent, of the parent's parent,
and so on: the tokens from a root to a leaf are one sequence, and sequences with a common beginning share its segments.
Segments lie in preorder, each directly after its parent or after a descendant of its parent, so that the descendants of
a segment are one range of tokens behind it.

The attention of a forest divides into *parts*: rectangles of queries and keys in which each query sees all keys, and
squares in which it sees those up to its own position. Each part is one call of a kernel that needs no mask. Sliding
windows cut the rectangles further; their edge is a square mirrored at both ends. Many tiny parts cost more than they
compute: where a kernel takes a mask, subtrees of a few tokens are one square with a mask of their own.

Legend of shapes: T tokens of the row, S segments. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

Mode = Literal["causal", "full", "reversed", "masked"]
"""Which keys the query at offset i of a part sees: those up to offset i, all, those from offset i on, or those that
`Forest.visible` says."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of queries and keys of the packed row."""

    query: int
    """First query token."""
    num_queries: int
    key: int
    """First key token."""
    num_keys: int
    mode: Mode


@dataclass(frozen=True)
class Forest:
    """Segments of a packed row in preorder: lengths, and the number of each one's parent, -1 for a root.

    Equal forests share what is computed from them.

    Raises:
        ValueError: a segment is empty, or its parent is not the segment before it, nor an ancestor of that.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.parents):
            raise ValueError(f"{len(self.lengths)} segments have {len(self.parents)} parents: give one each")
        path: list[int] = []
        for number, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(f"segment {number} has {length} tokens: a segment has at least one")
            while path and path[-1] != parent:
                path.pop()
            if parent != -1 and not path:
                raise ValueError(
                    f"segment {number} has the parent {parent}, which is neither the segment before it nor an ancestor "
                    "of that: order the segments so that each follows its parent or a descendant of its parent"
                )
            path.append(number)

    @classmethod
    def of_documents(cls, lengths: Sequence[int]) -> Forest:
        """Return the forest of documents of `lengths` tokens that share nothing."""
        return cls(tuple(lengths), (-1,) * len(lengths))

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First token of each segment."""
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        return (0, *ends[:-1])

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Tokens of the ancestors of each segment: the position of its first token in its sequences."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return tuple(depths)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Token behind the last descendant of each segment."""
        ends = [start + length for start, length in zip(self.starts, self.lengths, strict=True)]
        for number in range(len(ends) - 1, -1, -1):
            parent = self.parents[number]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[number])
        return tuple(ends)

    @cached_property
    def segment_of_tokens(self) -> Index:
        """Segment of each token, int64 [T]."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int64), self.lengths)

    @cached_property
    def positions(self) -> Index:
        """Position of each token in its sequences, int64 [T]."""
        shift = np.array(self.depths, dtype=np.int64) - np.array(self.starts, dtype=np.int64)
        return np.arange(self.num_tokens, dtype=np.int64) + np.repeat(shift, self.lengths)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Keys of each token of a segment, counted as for a square: its length and twice the tokens of its ancestors.

        The sum of length x reach over the segments of one sequence is the square of the sequence's length.
        """
        return tuple(length + 2 * depth for length, depth in zip(self.lengths, self.depths, strict=True))

    def path(self, segment: int) -> list[int]:
        """Return the segments from the root to `segment`."""
        found = []
        while segment >= 0:
            found.append(segment)
            segment = self.parents[segment]
        return found[::-1]

    def num_pairs(self, window: int | None = None) -> int:
        """Return the number of query-key pairs that are attended to."""
        return sum(
            part.num_queries * part.num_keys if part.mode == "full" else part.num_queries * (part.num_queries + 1) // 2
            for level in self.levels(window)
            for part in level
        )

    def visible(self, start: int, end: int, window: int | None) -> Flags:
        """Return which tokens from `start` to `end`, complete subtrees, see which others: bool [queries, keys]."""
        tokens = np.arange(start, end, dtype=np.int64)
        behind = np.array(self.ends, dtype=np.int64)[self.segment_of_tokens[start:end]]
        seen = (tokens[None] <= tokens[:, None]) & (tokens[:, None] < behind[None])
        if window is not None:
            positions = self.positions[start:end]
            seen &= positions[:, None] - positions[None] < window
        return seen

    def levels(
        self, window: int | None = None, masked_tokens: int = 0, *, whole_segments: bool = False
    ) -> tuple[tuple[Part, ...], ...]:
        """Return the parts of the attention in levels; those of a level have no query in common.

        The parts of the first level hold each token once as a query, and its own key.

        Args:
            window: tokens of a sequence that each token sees, itself included; None for all up to itself.
            masked_tokens: most tokens of a square with a mask; 0 for none.
            whole_segments: make the first level one causal part for each segment, even one that is longer than the
                window, which is then to be computed with the window.
        """
        return _levels(self, window, masked_tokens, whole_segments)

    def parts(
        self,
        window: int | None = None,
        masked_tokens: int = 0,
        *,
        whole_segments: bool = False,
        may_mask: Callable[[int, int], bool] = lambda start, end: True,
    ) -> list[Part]:
        """Return the parts of the attention; those that hold a token's own key come first.

        Args:
            window: see `levels`.
            masked_tokens: likewise.
            whole_segments: likewise.
            may_mask: whether the tokens from the first argument to the second may be a square with a mask.
        """
        if window is not None and window >= max(self.reach, default=0):
            window = None
        squares = _masked_squares(self, masked_tokens)
        squares = {first: one for first, one in squares.items() if may_mask(*one)}
        found = [Part(start, end - start, start, end - start, "masked") for start, end in squares.values()]
        if window is None:
            found += _tree_parts(self, squares)
        else:
            if whole_segments:
                sizes = zip(self.starts, self.lengths, strict=True)
                found += [Part(start, length, start, length, "causal") for start, length in sizes]
            found += _window_parts(self, window, squares, ancestors_only=whole_segments)
        # So that the first level can be written, and the others merged into it.
        found.sort(key=lambda part: (part.query, part.num_queries) != (part.key, part.num_keys))
        return found


@lru_cache(maxsize=64)
def _levels(
    forest: Forest,
    window: int | None,
    masked_tokens: int,
    whole_segments: bool,
) -> tuple[tuple[Part, ...], ...]:
    return in_levels(forest.parts(window, masked_tokens, whole_segments=whole_segments), forest.num_tokens)


def in_levels(parts: Iterable[Part], num_tokens: int) -> tuple[tuple[Part, ...], ...]:
    """Return `parts` of a row of `num_tokens` in levels: those of a level have no query in common."""
    levels: list[list[Part]] = []
    level_of_tokens = np.zeros(num_tokens, dtype=np.int64)
    for part in parts:
        queries = slice(part.query, part.query + part.num_queries)
        level = int(level_of_tokens[queries].max())
        level_of_tokens[queries] = level + 1
        if level == len(levels):
            levels.append([])
        levels[level].append(part)
    return tuple(map(tuple, levels))


_Squares = dict[int, tuple[int, int]]
"""First and last token of the squares with a mask, by the first segment."""


def _masked_squares(forest: Forest, most: int) -> _Squares:
    """Return runs of subtrees with one parent, of at most `most` tokens; a segment without others is none."""
    squares: _Squares = {}
    number = 0
    while number < len(forest.lengths):
        first, parent, start = number, forest.parents[number], forest.starts[number]
        end = start
        while number < len(forest.lengths) and forest.parents[number] == parent and forest.ends[number] - start <= most:
            end = forest.ends[number]
            number = bisect_left(forest.starts, end)
        if number - first > 1:
            squares[first] = start, end
        number = max(number, first + 1)
    return squares


def _outside(forest: Forest, squares: _Squares) -> Iterator[int]:
    """Yield the segments that are in no square."""
    behind = 0
    for segment, start in enumerate(forest.starts):
        if segment in squares:
            behind = squares[segment][1]
        if start >= behind:
            yield segment


def _tree_parts(forest: Forest, squares: _Squares) -> Iterator[Part]:
    """Yield one square per segment, and one rectangle per segment with descendants, but for those within squares."""
    for segment in _outside(forest, squares):
        start, length, end = forest.starts[segment], forest.lengths[segment], forest.ends[segment]
        yield Part(start, length, start, length, "causal")
        behind = start + length
        if end > behind:
            yield Part(behind, end - behind, start, length, "full")


def _window_parts(forest: Forest, window: int, squares: _Squares, *, ancestors_only: bool) -> Iterator[Part]:
    outside = set(_outside(forest, squares))
    for segment, (start, depth, length) in enumerate(zip(forest.starts, forest.depths, forest.lengths, strict=True)):
        # The ancestors of a segment within a square are either in the same one or in none.
        for ancestor in outside.intersection(forest.path(segment)):
            if ancestors_only and ancestor == segment:
                continue
            key_depth, key_start = forest.depths[ancestor], forest.starts[ancestor]
            keys = key_depth, key_depth + forest.lengths[ancestor]
            for first, last, key_first, key_last, mode in band((depth, depth + length), keys, window):
                yield Part(
                    start + first - depth,
                    last - first,
                    key_start + key_first - key_depth,
                    key_last - key_first,
                    mode,
                )


_Piece = tuple[int, int, int, int, Mode]


def band(queries: tuple[int, int], keys: tuple[int, int], window: int) -> Iterator[_Piece]:
    """Divide the pairs ``i - window < j <= i`` of queries i and keys j, both [first, last) positions of a sequence.

    Yields:
        The pieces (first query, last query, first key, last key, mode).
    """
    work = [(*queries, *keys)]
    while work:
        first, last, key_first, key_last = work.pop()
        first, last = max(first, key_first), min(last, key_last + window - 1)
        key_first, key_last = max(key_first, first - window + 1), min(key_last, last)
        if first >= last or key_first >= key_last:
            continue
        is_causal, is_windowed = key_last > first, last - 1 - key_first >= window
        if not is_causal and not is_windowed:
            yield first, last, key_first, key_last, "full"
        elif is_causal and is_windowed:
            middle = first + window
            if last > middle:
                work += [(middle, last, key_first, key_last), (first, middle, key_first, key_last)]
            else:
                work += [(first, last, first, key_last), (first, last, key_first, first)]
        elif is_causal and key_first < first:
            work += [(first, last, first, key_last), (first, last, key_first, first)]
        elif is_causal and last > key_last:
            work += [(key_last, last, key_first, key_last), (first, key_last, key_first, key_last)]
        elif is_causal:
            yield first, last, key_first, key_last, "causal"
        elif first < key_first + window - 1:
            middle = key_first + window - 1
            work += [(middle, last, key_first, key_last), (first, middle, key_first, key_last)]
        elif key_last > last - window + 1:
            middle = last - window + 1
            work += [(first, last, middle, key_last), (first, last, key_first, middle)]
        else:
            yield first, last, key_first, key_last, "reversed"

"""Truncated sampling, and its kept tokens: the token ids among which top-p, top-k and min-p let each token be drawn.

The log-probability of a token is exact for training only over the set from which it was drawn. Rollout and trainer have
different logits, and would keep different sets; the trainer therefore gets the rollout's, and renormalises over it.
(DeepSeek-V3.2, arXiv:2512.02556, section 3.1, "Keep Sampling Mask".)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]


@overload
def is_truncated(temperature: float, top_p: float, top_k: int, min_p: float) -> bool: ...
@overload
def is_truncated(
    temperature: FloatArray, top_p: FloatArray, top_k: npt.NDArray[np.int64], min_p: FloatArray
) -> npt.NDArray[np.bool_]: ...
def is_truncated(
    temperature: float | FloatArray,
    top_p: float | FloatArray,
    top_k: int | npt.NDArray[np.int64],
    min_p: float | FloatArray,
) -> bool | npt.NDArray[np.bool_]:
    """Say whether sampling with these parameters excludes tokens: of one completion, or of each row of a batch.

    Greedy decoding, which draws no token, is not truncated.
    """
    return (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0) | (min_p > 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The kept tokens at each of T positions, as compressed sparse rows."""

    counts: IntArray
    """Number of kept tokens, [T]; 0 where the whole vocabulary was kept, and where nothing was sampled."""
    ids: IntArray
    """Their ids, position after position, ascending in each, [sum of counts]."""

    def __len__(self) -> int:
        """Return T."""
        return len(self.counts)

    @classmethod
    def from_rows(cls, rows: Sequence[npt.NDArray[np.integer]]) -> KeptTokens:
        """Return the sets of positions whose kept ids are `rows`."""
        counts = np.array([len(row) for row in rows], np.int32)
        return cls(counts, np.concatenate([NO_IDS, *rows]).astype(np.int32, copy=False))

    @classmethod
    def whole(cls, num: int) -> KeptTokens:
        """Return the sets of `num` positions at which the whole vocabulary was kept."""
        return cls(np.zeros(num, np.int32), NO_IDS)

    def rows(self) -> list[IntArray]:
        """Return the kept ids of each position."""
        ends = np.cumsum(self.counts, dtype=np.int64)
        return np.split(self.ids, ends[:-1]) if len(ends) else []

    def take(self, positions: npt.NDArray[np.integer] | npt.NDArray[np.bool_] | slice) -> KeptTokens:
        """Return the sets of `positions`: indices in any order, a mask, or a slice."""
        counts = self.counts[positions]
        starts = (np.cumsum(self.counts, dtype=np.int64) - self.counts)[positions]
        offsets = np.cumsum(counts, dtype=np.int64) - counts
        places = np.repeat(starts - offsets, counts) + np.arange(counts.sum(dtype=np.int64))
        return KeptTokens(counts, self.ids[places])


NO_IDS: IntArray = np.zeros(0, np.int32)


def join_nats(
    parts: Iterable[tuple[npt.NDArray[np.float32] | None, int]],
) -> npt.NDArray[np.float32] | None:
    """Return the nats of consecutive parts, each with its number of positions; None if no part has any."""
    given = list(parts)
    if all(nats is None for nats, _ in given):
        return None
    return np.concatenate([nats if nats is not None else np.full(num, np.nan, np.float32) for nats, num in given])


def mean_nats(parts: Iterable[npt.NDArray[np.float32] | None]) -> float | None:
    """Return the mean of ``-log(probability of the kept tokens)`` over the positions at which it was measured.

    Args:
        parts: the value at each position, NaN where it was not measured; None for a part without any.

    Returns:
        Nats per token; None if no position was measured.
    """
    measured = [part[~np.isnan(part)] for part in parts if part is not None]
    if not measured:
        return None
    values = np.concatenate(measured)
    return float(values.mean(dtype=np.float64)) if len(values) else None


def join_kept(parts: Iterable[tuple[KeptTokens | None, int]]) -> KeptTokens | None:
    """Return the sets of consecutive parts, each with its number of positions; None if no part has any.

    A part without sets kept the whole vocabulary.
    """
    given = list(parts)
    if all(kept is None for kept, _ in given):
        return None
    whole = [kept if kept is not None else KeptTokens.whole(num) for kept, num in given]
    return KeptTokens(np.concatenate([kept.counts for kept in whole]), np.concatenate([kept.ids for kept in whole]))


def kept_problem(kept: KeptTokens, token_ids: IntArray, sampled: npt.NDArray[np.bool_] | None) -> str:
    """Return what is wrong with the sets of T tokens, as the end of a sentence; empty if nothing is.

    Args:
        kept: from another process.
        token_ids: the tokens, [T], which must be among those that were kept.
        sampled: which of them were sampled, [T]; None for all.
    """
    counts, ids = kept.counts, kept.ids
    if len(counts) != len(token_ids):
        return f"{len(counts)} sets of kept tokens came with {len(token_ids)} tokens"
    if counts.min(initial=0) < 0 or counts.sum(dtype=np.int64) != len(ids):
        return f"it has {len(ids)} kept tokens, and their counts do not add up to that"
    if sampled is not None and counts[~sampled].any():
        return "a token that was not sampled came with kept tokens"
    rows = np.repeat(np.arange(len(counts)), counts)
    if ids.min(initial=0) < 0 or ((ids[1:] <= ids[:-1]) & (rows[1:] == rows[:-1])).any():
        return "the kept tokens of a position are not different ids in ascending order"
    has_own = np.zeros(len(counts), np.bool_)
    has_own[rows[ids == token_ids[rows]]] = True
    if not (has_own | (counts == 0)).all():
        return f"token {int(np.flatnonzero(~has_own & (counts > 0))[0])} is not among those that were kept for it"
    return ""

"""Suggestions for names that are not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause with the names in `known` that are most similar to `name`, or with some of them."""
    names = sorted(known)
    if not names:
        return "there are none"
    if matches := get_close_matches(name, names, n=3, cutoff=0.5):
        return f"nearest: {', '.join(matches)}"
    return f"there are: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"

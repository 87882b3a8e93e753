"""Levels of sandboxes as parameters: those that this machine offers come first, so that each sample has one of them."""

from __future__ import annotations

from collections.abc import Iterable

from starling.common.sandbox.launch import MECHANISMS, Mechanism, problem_of


def offered_first(levels: Iterable[Mechanism]) -> list[Mechanism]:
    """Return `levels`, in their order but for those that cannot be made here, which come last."""
    return sorted(levels, key=lambda level: problem_of(level) is not None)


ALL = offered_first(MECHANISMS)
STRONG = offered_first(("bubblewrap", "namespaces", "landlock"))
"""Levels that keep code from the files and processes of the service."""

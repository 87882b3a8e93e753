"""Regular expressions that choose parameters by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from starling.common.errors import ConfigError


def first_matches(patterns: Sequence[str], names: Iterable[str], setting: str) -> dict[str, str]:
    """Return, for each of `names` in which one of `patterns` is found, the first such.

    Args:
        patterns: regular expressions.
        names: of parameters.
        setting: whose patterns these are, for the error.

    Raises:
        ConfigError: a pattern chooses nothing, which names it and the names most like it.
    """
    names = list(names)
    found: dict[str, str] = {}
    for name in names:
        pattern = next((pattern for pattern in patterns if re.search(pattern, name)), None)
        if pattern is not None:
            found[name] = pattern
    chosen = set(found.values())
    for pattern in patterns:
        if pattern in chosen:
            continue
        if any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"{setting} has {pattern!r} after patterns that match all that it matches: put it before them"
            )
        near = ", ".join(_near(pattern, names))
        raise ConfigError(
            f"{setting} has {pattern!r}, which matches no trainable parameter; "
            + (f"names like it: {near}" if near else f"they are {names[0]} and so on")
        )
    return found


def _near(pattern: str, names: Sequence[str], num: int = 3) -> list[str]:
    """Return the names that have a part like `pattern`, one for all layers, best first."""
    parts: dict[str, str] = {}
    for name in {re.sub(r"\d+", "0", name): name for name in reversed(names)}.values():
        words = name.split(".")
        spans = ((first, last) for first in range(len(words)) for last in range(first + 1, len(words) + 1))
        for first, last in spans:
            parts.setdefault(".".join(words[first:last]), name)
    like = difflib.get_close_matches(pattern.replace("\\", ""), list(parts), n=10 * num)
    return list(dict.fromkeys(parts[part] for part in like))[:num]

"""Faults around a run that an operator has to mend, for the live views; each has its line in the log as well."""

from __future__ import annotations

from typing import Final

from starling.common.observe.terminal import one_line

MAX_NOTICES: Final = 8
KEEP_S: Final = 600.0
"""How long a fault is shown after it was last seen."""
MAX_CHARACTERS: Final = 400


class Notices:
    """The newest faults, one text for each key. Any thread may add; one thread reads."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, str]] = {}

    def add(self, key: str, text: str, now: float) -> bool:
        """Show `text` from now on, in place of what was shown for this key. The text may contain that of a peer.

        Returns whether another text, or none, was shown.
        """
        before, text = self._found.get(key, (now, ""))[1], one_line(text[:MAX_CHARACTERS])
        self._found[key] = (now, text)
        if len(self._found) > MAX_NOTICES:
            oldest = min(list(self._found.items()), key=lambda item: item[1][0])
            self._found.pop(oldest[0], None)
        return text != before

    def texts(self, now: float) -> tuple[str, ...]:
        """Return what is shown at the time `now`, oldest first."""
        found = list(self._found.items())
        for key, (at, _) in found:
            if now - at > KEEP_S:
                self._found.pop(key, None)
        return tuple(text for at, text in sorted(entry for _, entry in found) if now - at <= KEEP_S)

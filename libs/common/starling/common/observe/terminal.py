"""Texts of others as a terminal may show them: without characters that control it.

A terminal obeys escape sequences: they clear it, change its title, and in some terminals type for its user.
Completions, names of replicas and what code in a sandbox prints can contain them.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, other line ends, changes of the direction of writing, and surrogates."""


def printable(text: str) -> str:
    r"""Return the text with control characters as Python writes them, ``\x1b``; tabs and line feeds stay."""
    return text if text.isprintable() else _CONTROLS.sub(_escaped, text)


def one_line(text: str) -> str:
    r"""Return the text as `printable` does, with tabs and line feeds escaped too: it cannot begin a line of its own."""
    return text if text.isprintable() else printable(text).replace("\t", r"\t").replace("\n", r"\n")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()

"""The program in a completion: its last block of code in a known language, or all of it."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

Language = Literal["python", "cpp"]
LANGUAGES: Final[tuple[Language, ...]] = ("python", "cpp")
_NAMES: Final[dict[str, Language]] = {
    **dict.fromkeys(("python", "py", "python3", "py3", "pypy", "pypy3"), "python"),
    **dict.fromkeys(("cpp", "c++", "cc", "cxx", "cplusplus"), "cpp"),
    **dict.fromkeys((f"{name}{year}" for name in ("c++", "cpp") for year in (11, 14, 17, 20, 23)), "cpp"),
}
_FENCE: Final = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^`\n]*\Z")
_LOOKS_LIKE_CPP: Final = re.compile(r"^\s*(#\s*include\s*[<\"]|int\s+main\s*\(|using\s+namespace\s)", re.MULTILINE)


class Source(NamedTuple):
    """A program's text."""

    language: Language
    text: str


def program_of(completion: str, language: Language | None = None) -> Source | None:
    """Return the program in a completion.

    It is the last block between fences whose tag names a known language, or that has no tag; or the whole completion if
    it has no such block. A fence without an end reaches to the end of the completion. The language of what has no tag
    is `language`, or C++ if it looks like that, and else Python.

    Args:
        completion: the text.
        language: consider blocks in this language only; None for all.

    Returns None where the completion has blocks, and none is a program in a wanted language.
    """
    blocks = _blocks(completion) or [("", completion)]
    for tag, text in reversed(blocks):
        found = _NAMES.get(tag.lower()) if tag else language or _guess(text)
        if found is not None and language in (None, found):
            return Source(found, text)
    return None


def _guess(text: str) -> Language:
    return "cpp" if _LOOKS_LIKE_CPP.search(text) else "python"


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return tag and text of each block between fences."""
    blocks = list[tuple[str, str]]()
    fence, tag, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line.rstrip("\r\n"))
        if not fence and found:
            fence, tag, lines = found[1], found[2], []
        elif fence and found and found[1].startswith(fence) and not found[2]:
            blocks.append((tag, "".join(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    return [*blocks, (tag, "".join(lines))] if fence else blocks

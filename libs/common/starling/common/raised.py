"""Exceptions of a user's code in words: type, text, and the line of the user's file that raised."""

from __future__ import annotations

import os
import sysconfig
import traceback
from typing import Final

MAX_TEXT: Final = 300
"""Characters of an exception's text that are shown."""
MAX_PLACE: Final = 160
"""Characters of a file and line; of a longer path the end is shown."""
_INSTALLED: Final = tuple(
    f"{sysconfig.get_paths()[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def describe_raised(error: BaseException) -> str:
    """Return an exception as text: ``ZeroDivisionError: division by zero (reward.py:12)``, in UTF-8 and bounded.

    The line is the innermost one of the user's code, which may have called a library.
    """
    place = user_line(error)
    return describe_type(error) + (f" ({place})" if place else "")


def describe_type(error: BaseException) -> str:
    """Return an exception without its line, for a reader to whom the paths of this machine are of no use."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's exception may fail in __str__
        text = "(its text cannot be had)"
    name = type(error).__name__
    return plain_text(f"{name}: {text}" if text.strip() else name)


def plain_text(text: str) -> str:
    """Return a text of user code on one line, in UTF-8 and bounded."""
    text = " ".join(text.split())
    text = text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
    return text.encode("utf-8", "replace").decode()


def user_line(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is neither of an installed library nor of Starling, or ""."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, names = frame.f_code.co_filename, frame.f_globals
        module = getattr(names.get("__spec__"), "name", None) or str(names.get("__name__", ""))
        if not module.startswith("starling.") and not file.startswith((*_INSTALLED, "<")):
            found = _place(file, line)
    return found


def _place(file: str, line: int) -> str:
    place = f"{file}:{line}".encode("utf-8", "replace").decode()
    return place if len(place) <= MAX_PLACE else f"...{place[3 - MAX_PLACE :]}"

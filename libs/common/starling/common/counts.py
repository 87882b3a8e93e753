"""Counts in messages: a number with its noun, in the singular or the plural."""

from __future__ import annotations


def counted(num: int, noun: str, plural: str = "", *, form: str = "") -> str:
    """Return ``1 word``, ``2 words`` or ``0 words``.

    Args:
        num: the count.
        noun: the singular.
        plural: the plural, if it is not the noun with an s.
        form: format of the number, as ``,`` for separated thousands.
    """
    return f"{num:{form}} {noun if num == 1 else plural or noun + 's'}"

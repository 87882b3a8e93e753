"""An engine that lives, has requests, and samples nothing: it hangs, and nobody else would ever notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOKS: Final = 16
"""How often it is looked at within the time that it may be silent."""


async def await_silence(num_answers: Callable[[], int | None], silence_s: float) -> None:
    """Return when the engine has given no answer for `silence_s`.

    Looks are counted, and not the time: a machine that slept makes no engine hang.

    Args:
        num_answers: how many answers there were; None while none is due.
        silence_s: seconds.
    """
    before, num_silent = num_answers(), 0
    while num_silent < LOOKS:
        await asyncio.sleep(silence_s / LOOKS)
        answers = num_answers()
        num_silent = num_silent + 1 if answers is not None and answers == before else 0
        before = answers

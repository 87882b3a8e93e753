"""What is kept with a request for the pulls of its result. A store returns it, and others may have written it."""

from __future__ import annotations

from typing import Any

import msgspec


class KeptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the routes know of a request whose result is pulled."""

    types: tuple[str, ...]
    """Those that scorers give."""
    pushed: tuple[str, ...]
    """Those that reward workers push."""
    input_info: dict[str, Any]
    """What `enqueue` found out about the media; values of JSON."""
    pushed_until: float
    """Until when scores may be pushed, in seconds since 1970."""


def read_kept(info: dict[str, Any]) -> KeptInfo:
    """Return what was kept with a request. Raises ValueError for something else, as that of another route."""
    try:
        kept = msgspec.convert(info, KeptInfo)
        msgspec.json.encode(kept.input_info)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its `input_info` is no JSON: {error}") from None
    return kept

"""How fast an engine is, as the heartbeats tell it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine

EVERY_S = 0.5


class Speed:
    """Measures the tokens that an engine samples in a second, now and then."""

    def __init__(self) -> None:
        self._num_tokens, self._measured_at = 0, time.monotonic()

    def begin(self) -> None:
        """Another engine counts from 0."""
        self._num_tokens = 0

    def measured(self, engine: Engine, now: float) -> dict[str, float] | None:
        """Return the gauges as of `now`, or None when they stay what they were."""
        elapsed, num_tokens = now - self._measured_at, engine.num_tokens - self._num_tokens
        if elapsed < EVERY_S:
            return None
        self._num_tokens, self._measured_at = engine.num_tokens, now
        if not num_tokens and not engine.num_running:  # an idle engine's speed is what it was
            return None
        return {"tokens_per_s": num_tokens / elapsed, "rows": engine.num_running}

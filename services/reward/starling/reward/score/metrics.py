"""Metrics of the workers of a reward service, whichever front ends it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from starling.common.observe.metrics import Family, Histogram, Samples

GAUGES: Final[Mapping[str, Family]] = {
    "queue_depth": Family("starling_reward_pending_scores", "gauge", "Scores to come."),
    "workers_ready": Family("starling_reward_workers", "gauge", "Workers that are ready."),
    "workers_replaced": Family(
        "starling_reward_workers_replaced_total", "counter", "Workers that ended or exceeded a limit."
    ),
    "samples_decoded": Family(
        "starling_reward_decoded_samples_total", "counter", "Samples whose latents were decoded."
    ),
    "decode_seconds": Family("starling_reward_decode_seconds_total", "counter", "Time that decoders took for them."),
    "decoders_ready": Family("starling_reward_decoders", "gauge", "Workers of decoders that are ready."),
    "decoders_replaced": Family(
        "starling_reward_decoders_replaced_total", "counter", "Workers of decoders that ended or exceeded a limit."
    ),
    "scorers_quarantined": Family(
        "starling_reward_scorers_quarantined", "gauge", "Scorers of which no worker can be started."
    ),
}
"""By the gauge of a pool. Those of decoders exist with `[reward.decoder]` only."""
LATENCY_BOUNDS_S: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
FAMILIES: Final = (
    *GAUGES.values(),
    Family(
        "starling_reward_latency_seconds",
        "histogram",
        "Time from the arrival of a group, or a request, to its rewards, by the front end (`controller`, `http`).",
        ("front_end",),
    ),
    Family("starling_reward_scorer_seconds_total", "counter", "Time that a scorer took in its workers.", ("scorer",)),
    Family("starling_reward_scorer_calls_total", "counter", "Calls of a scorer that have ended.", ("scorer",)),
    Family("starling_reward_scorer_samples_total", "counter", "Samples in these calls.", ("scorer",)),
)


class Latencies:
    """Times from the arrival of work to its answer, of one front end. It belongs to the scoring thread."""

    def __init__(self, front_end: str) -> None:
        self._histogram = Histogram("starling_reward_latency_seconds", LATENCY_BOUNDS_S, (("front_end", front_end),))
        self._arrived_at: dict[str, float] = {}

    def begin(self, id: str, now: float) -> None:
        """Note the arrival of work."""
        self._arrived_at.setdefault(id, now)

    def end(self, id: str, now: float) -> None:
        """Note its answer."""
        if (since := self._arrived_at.pop(id, None)) is not None:
            self._histogram.observe(now - since)

    def forget(self, *ids: str) -> None:
        """Note that work was cancelled."""
        for id in ids:
            self._arrived_at.pop(id, None)

    def samples(self) -> Samples:
        """Return the samples."""
        return self._histogram.samples()


class ScorerTimes:
    """What the calls of each scorer took. It belongs to the scoring thread.

    Args:
        titles: of the scorers.
    """

    def __init__(self, titles: Sequence[str]) -> None:
        self._titles = tuple(titles)
        self._seconds = [0.0] * len(titles)
        self._num_calls, self._num_samples = [0] * len(titles), [0] * len(titles)

    def add(self, scorer: int, seconds: float, num_samples: int) -> None:
        """Add a call."""
        self._seconds[scorer] += seconds
        self._num_calls[scorer] += 1
        self._num_samples[scorer] += num_samples

    def samples(self) -> Samples:
        """Return the samples."""
        found: Samples = {}
        for title, *values in zip(self._titles, self._seconds, self._num_calls, self._num_samples, strict=True):
            for name, value in zip(("seconds", "calls", "samples"), values, strict=True):
                found[f"starling_reward_scorer_{name}_total", (("scorer", title),)] = value
        return found


def gauge_samples(gauges: Mapping[str, float]) -> Samples:
    """Return the samples of a pool's gauges."""
    return {(GAUGES[name].name, ()): value for name, value in gauges.items() if name in GAUGES}

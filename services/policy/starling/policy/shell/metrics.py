"""Metrics of a policy, served by its HTTP endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starling.common.observe.metrics import Family, Samples
from starling.policy.core.phases import PHASES

FAMILIES: Final = (
    Family("starling_policy_version", "gauge", "Weight version that the policy holds."),
    Family("starling_policy_published_version", "gauge", "Newest version that it has copied to publish; -1 for none."),
    Family("starling_policy_asleep", "gauge", "1 while others have its devices, else 0."),
    Family("starling_policy_steps_total", "counter", "Steps that it has made."),
    Family("starling_policy_step_seconds_total", "counter", "Time of these steps."),
    Family("starling_policy_step_time_seconds_total", "counter", "The same by what it did.", ("phase",)),
    Family("starling_policy_tokens_total", "counter", "Sampled tokens of these steps."),
    Family("starling_policy_tokens_per_second", "gauge", "Sampled tokens of the last step over its training time."),
)


class PolicyMetrics:
    """Counts of one policy. It belongs to the working thread."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._step_s = self._num_tokens = self._tokens_per_s = 0.0
        self._phase_s: dict[str, float] = dict.fromkeys(PHASES, 0.0)

    def note_step(self, metrics: Mapping[str, float]) -> None:
        """Add a step, given its metrics."""
        self._num_steps += 1
        self._step_s += metrics.get("time/step_s", 0.0)
        self._num_tokens += metrics.get("num_tokens", 0.0)
        self._tokens_per_s = metrics.get("tokens_per_s", 0.0)
        for phase in PHASES:
            self._phase_s[phase] += metrics.get(f"time/{phase}_s", 0.0)

    def samples(self, *, version: int, published: int, asleep: bool) -> Samples:
        """Return all samples."""
        found: Samples = {
            ("starling_policy_version", ()): version,
            ("starling_policy_published_version", ()): published,
            ("starling_policy_asleep", ()): int(asleep),
            ("starling_policy_steps_total", ()): self._num_steps,
            ("starling_policy_step_seconds_total", ()): self._step_s,
            ("starling_policy_tokens_total", ()): self._num_tokens,
            ("starling_policy_tokens_per_second", ()): self._tokens_per_s,
        }
        for phase, seconds in self._phase_s.items():
            found["starling_policy_step_time_seconds_total", (("phase", phase),)] = seconds
        return found

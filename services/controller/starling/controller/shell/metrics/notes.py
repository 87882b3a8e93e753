"""What the notes of a run add up to: counters, and gauges of the last step and the last evaluation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from starling.common.net.limits import role_of
from starling.common.observe.metrics import Labels, Samples
from starling.controller.shell.metrics.families import COUNTED, LEFT_REASONS, PHASES, STEP_GAUGES, STEP_PREFIXES


class RunNotes:
    """Sums over the notes since this controller was started; Prometheus knows what counters that begin anew mean.

    Args:
        step: the fields of the last step before, empty if there is none.
        evaluation: likewise of the last evaluation.
    """

    def __init__(self, step: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
        self._counters: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self._step: Samples = {}
        self._last: Samples = {}
        # From 0 on: where a counter appears with its first event, Prometheus does not see that it rises.
        for name in COUNTED:
            self._count(name, 0.0)
        self._show_step(step)
        self._show_evaluation(evaluation)

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add a note."""
        self._count("starling_run_events_total", kind=kind)
        match kind:
            case "step":
                self._add_step(fields)
            case "trained" | "answered":
                self._count("starling_groups_trained_total", len(fields.get("prompts", ())))
            case "waiting" | "discarded":
                self._count("starling_groups_failed_total", outcome=kind, status=str(fields.get("status", "")))
            case "adopted":
                self._add_adoption(fields)
            case "published":
                _set(self._last, "starling_weights_version", fields.get("version"))
                self._measure("starling_weights_publish_seconds", fields.get("publish_s"))
            case "evaluation":
                self._count("starling_evaluations_total")
                self._show_evaluation(fields)
            case "joined":
                self._count("starling_replicas_joined_total", role=str(fields.get("role")))
            case "left":
                self._count(
                    "starling_replicas_left_total",
                    role=role_of(str(fields.get("replica"))) or "",
                    reason=left_reason(str(fields.get("reason"))),
                )

    def samples(self) -> Samples:
        """Return all samples."""
        return {**self._counters, **self._step, **self._last}

    def _add_step(self, fields: Mapping[str, Any]) -> None:
        self._count("starling_steps_total")
        self._count("starling_steps_skipped_total", _number(fields.get("skipped_step")) or 0.0)
        self._count("starling_step_seconds_total", _number(fields.get("time/step_s")) or 0.0)
        self._count("starling_step_tokens_total", _number(fields.get("num_tokens")) or 0.0)
        for phase in PHASES:
            self._count("starling_step_time_seconds_total", _number(fields.get(f"time/{phase}_s")) or 0.0, phase=phase)
        self._show_step(fields)

    def _show_step(self, fields: Mapping[str, Any]) -> None:
        self._step = {}
        for key, value in fields.items():
            if key in STEP_GAUGES:
                _set(self._step, STEP_GAUGES[key].name, value)
            elif (family := STEP_PREFIXES.get(key[: key.find("/") + 1])) is not None:
                _set(self._step, family.name, value, **{family.labels[0]: key.partition("/")[2]})

    def _show_evaluation(self, fields: Mapping[str, Any]) -> None:
        for name, key in (("version",) * 2, ("reward_mean",) * 2, ("failed_prompts", "num_failed")):
            _set(self._last, f"starling_evaluation_{name}", fields.get(key))

    def _add_adoption(self, fields: Mapping[str, Any]) -> None:
        replica = str(fields.get("replica"))
        self._measure("starling_weights_pull_seconds", fields.get("pull_s"), replica=replica)
        self._measure("starling_weights_pause_seconds", fields.get("pause_s"), replica=replica)
        self._count("starling_weights_pulled_bytes_total", _number(fields.get("size_bytes")) or 0.0, replica=replica)
        self._count("starling_weights_unproven_total", 0.0 if fields.get("attested") else 1.0)

    def _count(self, name: str, number: float = 1.0, /, **labels: str) -> None:
        self._counters[name, tuple(labels.items())] += number

    def _measure(self, name: str, seconds: object, /, **labels: str) -> None:
        if (number := _number(seconds)) is not None:
            self._count(f"{name}_sum", number, **labels)
            self._count(f"{name}_count", **labels)


def left_reason(text: str) -> str:
    """Return the reason of a line `left` as one of a few words."""
    return next((word for begin, word in LEFT_REASONS.items() if text.startswith(begin)), "evicted")


def _set(where: Samples, name: str, value: object, /, **labels: str) -> None:
    if (number := _number(value)) is not None:
        where[name, tuple(labels.items())] = number


def _number(value: object) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None

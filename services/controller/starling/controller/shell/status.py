"""Telemetry snapshot of the controller's state, for the screen and for observers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from starling.common.files import parse_line, read_lines
from starling.common.ids import LEASE_KINDS
from starling.common.wire.telemetry import ReplicaView, RunSnapshot
from starling.controller.core.explain import explain, pull_of, run_phase
from starling.controller.core.groups.group import GONE, GroupState
from starling.controller.core.records import MetricsSummary
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState

NUM_REWARDS = 10
"""Rewards of the last steps in a snapshot."""
NUM_EVALUATIONS = 16
"""Newest evaluations in a snapshot. A reader that misses none of them learns of every evaluation once."""
MAX_CURVE_POINTS = 240
"""A curve that reaches this number of points is halved: pairs of points become their mean."""

log = structlog.get_logger(__name__)


class _Alarm(msgspec.Struct):
    name: str


class _StepFigures(msgspec.Struct):
    """Fields of a line `step` that are read again, and shown."""

    step: int
    loss: float | None = None
    reward_mean: float | None = None
    sampled_reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    filtered_share: float | None = None
    alarms: list[_Alarm] = []


class _EvaluationFigures(msgspec.Struct):
    """Likewise of a line `evaluation`."""

    version: int
    num_prompts: int | None = None
    reward_mean: float | None = None


_FIGURES: Final = {"step": _StepFigures, "evaluation": _EvaluationFigures}


def is_intact(kind: str, fields: dict[str, Any]) -> bool:
    """Whether the fields of a line of metrics.jsonl have the types that were written: the file may be of others."""
    if kind not in _FIGURES:
        return True
    try:
        msgspec.convert(fields, _FIGURES[kind])
        msgspec.msgpack.encode(fields)  # a number beyond 64 bits, half a surrogate pair, thousands of levels
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return False
    return True


def _scalars(fields: Mapping[str, Any]) -> dict[str, float | str | None]:
    """Return the fields that a snapshot has: neither the alarms of a step nor the tasks of an evaluation."""
    values = {name: float(value) if isinstance(value, bool) else value for name, value in fields.items()}
    return {name: value for name, value in values.items() if value is None or isinstance(value, int | float | str)}


@dataclass
class MetricsHistory:
    """Metrics of the last steps, the reward curve, and the last evaluations, of bounded size."""

    started: float
    step: dict[str, Any] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REWARDS))
    curve: list[float] = field(default_factory=list)
    evaluations: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=NUM_EVALUATIONS))
    num_evaluations: int = 0
    """Evaluations so far."""
    _pending_sum: float = 0.0
    """Of the rewards that are not in the curve yet; their number grows with the length of the run."""
    _num_pending: int = 0
    _steps_per_point: int = 1

    def read(self, path: Path, before: MetricsSummary | None = None) -> set[tuple[str, int]]:
        """Read the metrics.jsonl of earlier incarnations, after that part of it which `before` sums up.

        Lines that cannot be read are skipped and counted in the log.

        Returns the lines of that part about steps and evaluations, by kind and step, or kind and number of evaluations
        before.
        """
        written: set[tuple[str, int]] = set()
        num_skipped = begin = 0
        if before is not None and path.exists() and before.size_bytes <= path.stat().st_size:
            self._restore(before)
            begin = before.size_bytes
        for line in read_lines(path, begin):
            fields = parse_line(line) or {}
            kind = fields.pop("kind", None)
            if not isinstance(kind, str) or not is_intact(kind, fields):
                num_skipped += 1  # cut off, or damaged by a power cut
                continue
            if kind == "evaluation":
                written.add((kind, self.num_evaluations))
            elif kind in ("step", "trained", "answered") and isinstance(step := fields.get("step"), int):
                written.add((kind, step))
            self.note(kind, fields)
        if num_skipped:
            log.warning("lines_skipped", file=str(path), lines=num_skipped)
        return written

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Add the fields of a metrics line of this kind."""
        if kind == "step":
            self.step = _scalars(fields)
            # With dynamic sampling the trained groups are selected by reward.
            reward = fields.get("sampled_reward_mean", fields.get("reward_mean"))
            if "reward_mean" in fields and reward is not None:
                self._add_reward(reward)
        elif kind == "evaluation":
            self.evaluations.append(_scalars(fields))
            self.num_evaluations += 1

    def summary(self, size_bytes: int) -> MetricsSummary:
        """Return all of it, as read from the first `size_bytes` of metrics.jsonl."""
        return MetricsSummary(
            size_bytes=size_bytes,
            step=self.step,
            rewards=tuple(self.rewards),
            curve=tuple(self.curve),
            pending=(),
            steps_per_point=self._steps_per_point,
            evaluations=tuple(self.evaluations),
            num_evaluations=self.num_evaluations,
            pending_sum=self._pending_sum,
            num_pending=self._num_pending,
        )

    def _restore(self, summary: MetricsSummary) -> None:
        self.step, self.curve = summary.step, list(summary.curve)
        self._pending_sum = sum(summary.pending, summary.pending_sum)
        self._num_pending = len(summary.pending) + summary.num_pending
        self._steps_per_point, self.num_evaluations = summary.steps_per_point, summary.num_evaluations
        self.rewards.extend(summary.rewards)
        self.evaluations.extend(summary.evaluations)

    def _add_reward(self, reward: float) -> None:
        self.rewards.append(reward)
        self._pending_sum += reward
        self._num_pending += 1
        if self._num_pending == self._steps_per_point:
            self.curve.append(self._pending_sum / self._num_pending)
            self._pending_sum, self._num_pending = 0.0, 0
        if len(self.curve) == MAX_CURVE_POINTS:
            self.curve = [(a + b) / 2 for a, b in zip(self.curve[::2], self.curve[1::2], strict=True)]
            self._steps_per_point *= 2


def snapshot(
    state: ControllerState, history: MetricsHistory, now: float, dropped: int, notices: tuple[str, ...] = ()
) -> RunSnapshot:
    """Return the snapshot of `state` at the time `now`; `dropped` counts the messages that could not be decoded, and
    `notices` are the faults that an operator has to mend."""
    members = sorted(state.replicas.membership.members.values(), key=lambda m: m.name)
    return RunSnapshot(
        phase=run_phase(state),
        version=state.version,
        last_step=state.plan.last_step,
        num_supervised_steps=state.plan.num_supervised_steps,
        elapsed_s=now - history.started,
        waiting_for=explain(state),
        groups={str(s): state.buffer.count(s) for s in GroupState if s not in GONE},
        replicas=tuple(_view(state, member) for member in members),
        step=history.step,
        rewards=tuple(history.rewards),
        curve=tuple(history.curve),
        evaluations=tuple(history.evaluations),
        num_evaluations=history.num_evaluations,
        dropped=dropped,
        alarms=tuple(map(str, state.training.alarms.values())),
        notices=notices,
        num_prompts=state.plan.num_prompts,
        num_answered=num_answered(state),
        desired={str(role): num for role, num in state.replicas.desired.counts.items()},
        draining=tuple(sorted(state.replicas.desired.draining)),
    )


def num_answered(state: ControllerState) -> int:
    """Return the number of prompts that a run without a policy has answered."""
    buffer = state.buffer
    return buffer.num_trained_groups + buffer.count(GroupState.FROZEN) + buffer.count(GroupState.SCORED)


def _view(state: ControllerState, member: Member) -> ReplicaView:
    pulling, progress = pull_of(state, member) or (-1, None)
    return ReplicaView(
        name=member.name,
        role=member.role,
        version=state.weights_version if member.role == "policy" else member.version,
        num_leases=len(state.replicas.leases.of(member.name, *LEASE_KINDS)),
        gauges=member.gauges,
        pulling=pulling,
        progress=progress,
    )

"""The controller's state as a telemetry snapshot."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from starling.common.wire.telemetry import ReplicaView, Snapshot
from starling.controller.core.ledger import GroupState
from starling.controller.core.state import State

KEPT_REWARDS = 200


@dataclass
class History:
    """What the last notes said."""

    started: float
    step: dict[str, Any] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REWARDS))
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    discarded: str = ""
    """Which group was discarded last, and why."""

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Keep what the screen shows."""
        if kind == "step":
            self.step = fields
            if "reward_mean" in fields:
                self.rewards.append(fields["reward_mean"])
        elif kind == "evaluation":
            self.evaluations.append(fields)
        elif kind == "discarded":
            self.discarded = f"prompt {fields['prompt']}: {fields['reason']}"


def snapshot(state: State, history: History, now: float, dropped: int) -> Snapshot:
    """Return what to show of `state`."""
    kinds = ("generate", "score", "train", "publish", "adopt", "checkpoint")
    replicas = tuple(
        ReplicaView(
            name=member.name,
            role=member.role,
            version=state.version if member.role == "policy" else member.version,
            num_leases=len(state.leases.of(member.name, *kinds)),
            gauges=member.gauges,
        )
        for member in sorted(state.membership.members.values(), key=lambda m: m.name)
    )
    return Snapshot(
        phase=state.phase,
        version=state.version,
        last_step=state.plan.last_step,
        num_sft_steps=state.plan.num_sft_steps,
        elapsed_s=now - history.started,
        waiting_for=state.waiting_for,
        groups={
            str(s): state.ledger.count(s) for s in GroupState if s not in (GroupState.TRAINED, GroupState.DISCARDED)
        },
        replicas=replicas,
        step=history.step,
        rewards=tuple(history.rewards),
        evaluations=tuple(history.evaluations),
        dropped=dropped,
    )

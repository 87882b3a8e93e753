"""What the controller shows of a run several times a second over PUB/SUB. It may be lost by design."""

from __future__ import annotations

import msgspec

from starling.common.wire.messages import LeaseProgress


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, for the screen."""

    name: str
    role: str
    version: int
    num_leases: int
    gauges: dict[str, float] = {}
    pulling: int = -1
    """The version that it pulls, as soon as a heartbeat tells how far it is; -1 for none."""
    progress: LeaseProgress | None = None
    """How far that pull is."""


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the run at one moment."""

    phase: str
    """sft, dpo, reward_model, rl, replay, generate, evaluate, infer, checkpointing, draining, or over."""
    version: int
    """Steps made; without a policy, files written."""
    last_step: int
    num_supervised_steps: int
    elapsed_s: float
    waiting_for: str
    """What the run waits for, in words."""
    groups: dict[str, int] = {}
    """Groups in each state."""
    replicas: tuple[ReplicaView, ...] = ()
    step: dict[str, float | str | None] = {}
    """Metrics of the last step."""
    rewards: tuple[float, ...] = ()
    """Mean reward of the last steps, oldest first."""
    curve: tuple[float, ...] = ()
    """Mean reward over the whole run, oldest first; each value is the mean of equally many steps."""
    evaluations: tuple[dict[str, float | str | None], ...] = ()
    """Summaries of the evaluations so far."""
    dropped: int = 0
    """Frames that were refused."""
    alarms: tuple[str, ...] = ()
    """What is wrong with the last step, in words."""
    num_prompts: int = 0
    """Without a policy: how many prompts are to be answered, and below how many of them are."""
    num_answered: int = 0

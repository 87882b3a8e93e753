"""Telemetry: the state of the run, published several times a second over PUB/SUB. It may be lost by design."""

from __future__ import annotations

import msgspec

from starling.common.wire.messages import LeaseProgress


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One replica, for the live view."""

    name: str
    role: str
    version: int
    num_leases: int
    gauges: dict[str, float] = {}
    pulling: int = -1
    """Version that it pulls, once a heartbeat reports its progress; -1 for none."""
    progress: LeaseProgress | None = None
    """Progress of that pull."""


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of the run at one moment."""

    phase: str
    """sft, dpo, reward_model, rl, replay, generate, evaluate, infer, checkpointing, draining, or over."""
    version: int
    """Trained steps; without a policy, written files."""
    last_step: int
    num_supervised_steps: int
    elapsed_s: float
    waiting_for: str
    """What the run waits for, in words; see `starling why`."""
    groups: dict[str, int] = {}
    """Number of groups in each state."""
    replicas: tuple[ReplicaView, ...] = ()
    step: dict[str, float | str | None] = {}
    """Metrics of the last step."""
    rewards: tuple[float, ...] = ()
    """Mean reward of the last steps, oldest first."""
    curve: tuple[float, ...] = ()
    """Mean reward over the whole run, oldest first; each value is the mean of equally many steps."""
    evaluations: tuple[dict[str, float | str | None], ...] = ()
    """Summaries of the last evaluations, oldest first."""
    dropped: int = 0
    """Messages that the hub refused."""
    alarms: tuple[str, ...] = ()
    """Alarms of the last step, in words."""
    num_prompts: int = 0
    """Without a policy: number of prompts to answer."""
    num_answered: int = 0
    """Without a policy: number of prompts that are answered."""
    notices: tuple[str, ...] = ()
    """Faults around the run that an operator has to mend, in words: a refused key, a service of another version, a
    clock that is wrong, a disk that is full or cannot be written. Each also has its line in the controller's log and in
    metrics.jsonl."""
    num_evaluations: int = 0
    """Evaluations so far; 0 from a controller that sends the summaries of all of them."""
    desired: dict[str, int] = {}
    """By role: how many replicas the run should have, where an operator or the rule of `controller.autoscale` has set
    it. What is missing is to be placed; what is surplus the controller drains."""
    draining: tuple[str, ...] = ()
    """Replicas that are being drained: they are not to be started again."""

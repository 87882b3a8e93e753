"""Fault mixes of simulated runs: mixes of related faults, and one of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Faults:
    """Rates of faults: shares of messages, pulls, ...; ``every_s`` is the mean time between two faults, 0 for never."""

    loss: float = 0.0
    duplicates: float = 0.0
    reorder: bool = False
    """Each message has a delay of its own, up to 2 s, and may overtake others."""
    rollout_crash_every_s: float = 0.0
    reward_crash_every_s: float = 0.0
    teacher_crash_every_s: float = 0.0
    policy_crash_every_s: float = 0.0
    policy_hang_every_s: float = 0.0
    """A policy computes nothing any more, and goes on to send heartbeats."""
    controller_crash_every_s: float = 0.0
    power_cut_every_s: float = 0.0
    """The controller and all replicas stop at once, and records that are not durable and messages in transit are
    lost."""
    silent_deaths: float = 0.0
    """Share of the crashes and partitions that do not close the connection."""
    partition_every_s: float = 0.0
    """Some replicas are cut off from the controller, for up to `cut_leases`."""
    cut_leases: float = 2.0
    """Longest partition, in units of `RunPlan.lease_s`."""
    late: float = 0.0
    """Share of the partitions whose messages arrive afterwards instead of being lost."""
    join_every_s: float = 0.0
    """An additional replica joins."""
    leave_every_s: float = 0.0
    """A replica leaves and does not come back."""
    preempt_every_s: float = 0.0
    """A rollout with work in progress leaves gracefully, and is restarted."""
    request_every_s: float = 0.0
    """An operator changes a setting, requests an evaluation or a saved state, or queries the run."""
    scale_every_s: float = 0.0
    """An operator sets the number of replicas of a role, or drains one; a launcher places what is missing."""
    launch_s: float = 0.0
    """Longest time until a replica starts that a launcher was asked for."""
    refusals: float = 0.0
    """Share of the placements that a launcher refuses. It is asked again after a backoff, a few times."""
    stragglers: float = 0.0
    """Share of the replicas that are ten times slower than others."""
    scorer_failures: float = 0.0
    teacher_failures: float = 0.0
    """Share of the groups that a teacher fails to score."""
    pull_failures: float = 0.0
    torn: float = 0.0
    """Share of the switches to another version after which the engine holds wrong weights."""
    lies: float = 0.0
    """Share of the messages of one more rollout, and of one more reward replica, that are well-formed and false. Above
    0 another rollout is honest in its messages, and sends other weights than were published."""


CALM: Final = Faults()

MIXES: Final[dict[str, Faults]] = {
    "calm": CALM,
    "reorder": Faults(reorder=True),
    "loss": Faults(loss=0.02, pull_failures=0.05),
    "duplicates": Faults(duplicates=0.2),
    "crashes": Faults(
        rollout_crash_every_s=2.0,
        reward_crash_every_s=5.0,
        teacher_crash_every_s=4.0,
        policy_crash_every_s=8.0,
        policy_hang_every_s=40.0,
        silent_deaths=0.2,
        join_every_s=8.0,
        leave_every_s=10.0,
        stragglers=0.1,
        torn=0.05,
        pull_failures=0.05,
    ),
    "preemptions": Faults(preempt_every_s=1.0, controller_crash_every_s=10.0),
    "controller": Faults(controller_crash_every_s=4.0, request_every_s=3.0),
    "power_cuts": Faults(power_cut_every_s=4.0, request_every_s=3.0, pull_failures=0.05),
    "lies": Faults(lies=0.3, rollout_crash_every_s=4.0, controller_crash_every_s=8.0),
    "scaling": Faults(
        scale_every_s=2.0,
        rollout_crash_every_s=6.0,
        reward_crash_every_s=12.0,
        policy_crash_every_s=20.0,
        controller_crash_every_s=6.0,
        launch_s=4.0,
        refusals=0.2,
        pull_failures=0.05,
    ),
    "partitions": Faults(partition_every_s=3.0, silent_deaths=0.5, stragglers=0.1),
}
"""The mixes of related faults, by name."""

EVERYTHING: Final = Faults(
    loss=0.02,
    duplicates=0.1,
    reorder=True,
    rollout_crash_every_s=5.0,
    reward_crash_every_s=15.0,
    teacher_crash_every_s=12.0,
    policy_crash_every_s=20.0,
    policy_hang_every_s=80.0,
    controller_crash_every_s=12.0,
    silent_deaths=0.3,
    partition_every_s=15.0,
    join_every_s=15.0,
    leave_every_s=20.0,
    preempt_every_s=10.0,
    request_every_s=10.0,
    scale_every_s=15.0,
    launch_s=2.0,
    refusals=0.1,
    stragglers=0.1,
    scorer_failures=0.05,
    teacher_failures=0.03,
    pull_failures=0.1,
    torn=0.05,
)

ALL: Final[dict[str, Faults]] = {**MIXES, "everything": EVERYTHING}
"""The mixes that ``--faults all`` runs."""

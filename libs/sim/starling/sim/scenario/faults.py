"""What goes wrong in a simulated run, and how often: eight mixes, and one of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Faults:
    """Shares are of messages, pulls, ...; ``every_s`` is a mean time between two of a kind, 0 for never."""

    loss: float = 0.0
    duplicates: float = 0.0
    reorder: bool = False
    """Each message takes its own time, up to 2 s, and may overtake others."""
    rollout_crash_every_s: float = 0.0
    reward_crash_every_s: float = 0.0
    teacher_crash_every_s: float = 0.0
    policy_crash_every_s: float = 0.0
    controller_crash_every_s: float = 0.0
    silent_deaths: float = 0.0
    """Share of the deaths and partitions that close no connection."""
    partition_every_s: float = 0.0
    """Some replicas and the controller do not hear each other for a while, up to `cut_leases` long."""
    cut_leases: float = 2.0
    late: float = 0.0
    """Share of the partitions after which what was said meanwhile, on either side, arrives all the same."""
    join_every_s: float = 0.0
    """A replica that nobody expected joins."""
    leave_every_s: float = 0.0
    """A replica says farewell, for good."""
    preempt_every_s: float = 0.0
    """A rollout leaves in good order, in the middle of what it does, and comes back."""
    wish_every_s: float = 0.0
    """An operator changes a setting, wants an evaluation, or asks why nothing happens."""
    stragglers: float = 0.0
    """Share of the replicas that work ten times more slowly than others."""
    scorer_failures: float = 0.0
    teacher_failures: float = 0.0
    """Share of the groups that a teacher cannot score."""
    pull_failures: float = 0.0
    torn: float = 0.0
    """Share of the switches after which the engine holds something else."""


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
        silent_deaths=0.2,
        join_every_s=8.0,
        leave_every_s=10.0,
        stragglers=0.1,
        torn=0.05,
        pull_failures=0.05,
    ),
    "preemptions": Faults(preempt_every_s=1.0, controller_crash_every_s=10.0),
    "controller": Faults(controller_crash_every_s=4.0, wish_every_s=3.0),
    "partitions": Faults(partition_every_s=3.0, silent_deaths=0.5, stragglers=0.1),
}
"""The mixes, by what goes wrong in them."""

EVERYTHING: Final = Faults(
    loss=0.02,
    duplicates=0.1,
    reorder=True,
    rollout_crash_every_s=5.0,
    reward_crash_every_s=15.0,
    teacher_crash_every_s=12.0,
    policy_crash_every_s=20.0,
    controller_crash_every_s=12.0,
    silent_deaths=0.3,
    partition_every_s=15.0,
    join_every_s=15.0,
    leave_every_s=20.0,
    preempt_every_s=10.0,
    wish_every_s=10.0,
    stragglers=0.1,
    scorer_failures=0.05,
    teacher_failures=0.03,
    pull_failures=0.1,
    torn=0.05,
)

ALL: Final[dict[str, Faults]] = {**MIXES, "everything": EVERYTHING}
"""What ``--faults all`` goes through."""

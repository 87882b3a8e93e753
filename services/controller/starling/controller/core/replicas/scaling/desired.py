"""Desired numbers of replicas: what operators, or the rule of `autoscale`, have set, and which replicas are surplus.

Nothing is desired of a role until a number is set: all replicas that join stay then. What is missing is placed by a
launcher, which reads the numbers in the snapshots of the run. The journal has every change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from starling.common.counts import counted
from starling.common.ids import Role

MAX_DESIRED: Final = 1024
"""Replicas of one role that an operator may ask for."""
MAX_REQUESTS: Final = 1024
"""Requests whose answers are kept: one that arrives again changes nothing."""
SCALED_ROLES: Final[tuple[Role, ...]] = ("rollout", "policy", "reward", "teacher")


@dataclass(slots=True)
class Draining:
    """A replica that is being drained: it gets no more work, and is ordered to leave when it has none."""

    reason: str
    deadline: float
    """When it is ordered to leave although it has work, which others then get."""
    ordered_at: float | None = None
    """When it was ordered to leave; None as long as it finishes its work."""


@dataclass
class DesiredReplicas:
    """The desired number of replicas of each role that was scaled, and the replicas that were chosen to be drained."""

    counts: dict[Role, int] = field(default_factory=dict)
    chosen: dict[str, None] = field(default_factory=dict)
    """Names that an operator has chosen, and that have not left yet."""
    draining: dict[str, Draining] = field(default_factory=dict)
    """By name: members that are being drained. The journal does not have them, because they follow from the rest."""
    requests: dict[str, str] = field(default_factory=dict)
    """Answers to requests that were granted."""

    @property
    def is_unset(self) -> bool:
        """Whether nothing was ever scaled."""
        return not (self.counts or self.chosen or self.draining)

    def at_start(self, role: Role, num: int) -> int:
        """Return how many replicas of `role` a run waits for that begins with `num`: no more than are desired."""
        return min(num, self.counts.get(role, num))

    def set(self, role: Role, num: int, chosen: str, request: str, answer: str) -> None:
        """Desire `num` replicas of `role`; `chosen`: without this one, if it is not empty."""
        self.counts[role] = num
        if chosen:
            self.chosen[chosen] = None
        if request:
            self.requests[request] = answer
            while len(self.requests) > MAX_REQUESTS:
                del self.requests[next(iter(self.requests))]

    def forget(self, name: str) -> None:
        """Forget a replica that has left."""
        self.draining.pop(name, None)
        self.chosen.pop(name, None)


def surplus(names: Iterable[str], num: int) -> list[str]:
    """Return which of the replicas `names`, of one role, are more than `num`: the highest numbers, as the newest."""
    newest_first = sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True)
    return newest_first[: max(0, len(newest_first) - num)]


def check_role(role: str) -> Role:
    """Return `role`. Raises ValueError when no replica of the run can have it."""
    for known in SCALED_ROLES:
        if role == known:
            return known
    like = difflib.get_close_matches(role, SCALED_ROLES, 1)
    hint = f"did you mean {like[0]}?" if like else f"choose one of {', '.join(SCALED_ROLES)}"
    raise ValueError(f"there is no role {role!r:.100} that can be scaled; {hint}")


def check_count(role: Role, num: int) -> None:
    """Raise ValueError when a run cannot have `num` replicas of `role`."""
    if num < 1:
        raise ValueError(
            f"{role} {num} would leave the run without a {role}; keep at least 1, or stop the run with `starling stop`"
        )
    if num > MAX_DESIRED:
        raise ValueError(f"{role} {num} is more than a run may be scaled to; give at most {MAX_DESIRED}")


def named(num: int, role: Role) -> str:
    """Return ``2 rollouts``, or ``1 policy``."""
    return counted(num, role, "policies" if role == "policy" else "")


def scaled_text(role: Role, num: int, present: int) -> str:
    """Return the answer to an operator who asked for `num` replicas of `role`, where there are `present`."""
    missing = num - present
    if missing > 0:
        return f"{named(num, role)} desired, {present} present: the launcher places {missing} more"
    if missing < 0:
        return f"{named(num, role)} desired, {present} present: {-missing} will be drained, the newest first"
    return f"{named(num, role)} desired, and present"

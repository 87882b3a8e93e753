"""Names and numbers that travel between services, and how they are written.

A *lease* is one piece of work handed to one replica. Its id says what the work is, which object it concerns and
which attempt this is, so that a late answer to an earlier attempt can never be taken for the present one.
"""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["controller", "policy", "rollout", "reward", "teacher", "operator"]
Objective = Literal["sft", "dpo", "reward_model"]
"""What a step of examples teaches."""
Activity = Literal["rl", "replay", "generate", "evaluate", "infer", "serve"]
"""What a run does with groups."""
Purpose = Literal["train", "evaluate"]
LeaseKind = Literal[
    "generate", "score", "teach", "train", "publish", "adopt", "checkpoint", "save", "sleep", "wake",
]  # fmt: skip

LEASE_KINDS: Final[tuple[LeaseKind, ...]] = (
    "generate", "score", "teach", "train", "publish", "adopt", "checkpoint", "save", "sleep", "wake",
)  # fmt: skip


def lease_id(kind: LeaseKind, subject: int | str, incarnation: int, number: int) -> str:
    """Write the id of the lease that the controller's `incarnation` gave out as its `number`-th.

    For example ``generate:t17:2.41``: no two leases of a run have the same id, whatever crashed in between.
    """
    return f"{kind}:{subject}:{incarnation}.{number}"


def lease_incarnation(lease: str) -> int:
    """Return which incarnation of the controller gave out `lease`; -1 when it is not an id of ours."""
    text = lease.rpartition(":")[2].partition(".")[0]
    return int(text) if text.isascii() and text.isdigit() else -1


def lease_order(lease: str) -> tuple[int, int]:
    """Return what is greater for each lease than for all that were given out before it; (-1, -1) for no id of ours."""
    incarnation, _, number = lease.rpartition(":")[2].partition(".")
    if not all(part.isascii() and part.isdigit() for part in (incarnation, number)):
        return -1, -1
    return int(incarnation), int(number)


def lease_kind(lease: str) -> LeaseKind | None:
    """Return what kind of work `lease` names, or None when it is not an id of ours."""
    kind = lease.partition(":")[0]
    for known in LEASE_KINDS:
        if kind == known:
            return known
    return None


def lease_subject(lease: str) -> str:
    """Return what an id of ours is about: ``t17`` for ``generate:t17:2.41``."""
    return lease.split(":")[1]

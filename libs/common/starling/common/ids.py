"""Names and numbers that travel between services, and how they are written.

A *lease* is one piece of work handed to one replica. Its id says what the work is, which object it concerns and
which attempt this is, so that a late answer to an earlier attempt can never be taken for the present one.
"""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["controller", "policy", "rollout", "reward"]
Purpose = Literal["train", "evaluate"]
LeaseKind = Literal["generate", "score", "train", "publish", "adopt", "checkpoint"]

LEASE_KINDS: Final[tuple[LeaseKind, ...]] = ("generate", "score", "train", "publish", "adopt", "checkpoint")


def lease_id(kind: LeaseKind, subject: int | str, attempt: int) -> str:
    """Write the id of attempt `attempt` at `kind` for `subject`, for example ``generate:17:0``."""
    return f"{kind}:{subject}:{attempt}"


def lease_kind(lease: str) -> LeaseKind | None:
    """Return what kind of work `lease` names, or None when it is not an id of ours."""
    kind = lease.partition(":")[0]
    for known in LEASE_KINDS:
        if kind == known:
            return known
    return None


def lease_subject(lease: str) -> str:
    """Return what an id of ours is about: ``17`` for ``generate:17:0``."""
    return lease.split(":")[1]

"""Roles, lease ids and other names that travel between services.

A *lease* is one unit of work assigned to one replica. Its id names the kind of work, its subject and the attempt, so
that a late answer to an earlier attempt can never count as an answer to the present one.
"""

from __future__ import annotations

from typing import Final, Literal

Role = Literal["controller", "policy", "rollout", "reward", "teacher", "operator"]
Objective = Literal["sft", "dpo", "reward_model"]
"""Training objective of steps on supervised examples."""
TrainerKind = Literal["sft", "rl", "dpo", "reward_model"]
"""Trainer of a step: supervised examples, scored groups, or preference pairs."""
Activity = Literal["rl", "replay", "generate", "evaluate", "infer", "serve"]
"""Use of the groups of a run."""
Purpose = Literal["train", "evaluate"]
"""Purpose of a group: the steps of the run, or an evaluation of a version. A run that trains nothing has groups of
purpose `train` too: the values are on the wire, and a file takes the place of its step."""
LeaseKind = Literal[
    "generate", "score", "teach", "train", "publish", "adopt", "checkpoint", "save", "sleep", "wake",
]  # fmt: skip

LEASE_KINDS: Final[tuple[LeaseKind, ...]] = (
    "generate", "score", "teach", "train", "publish", "adopt", "checkpoint", "save", "sleep", "wake",
)  # fmt: skip

MAX_DIGITS: Final = 19
"""Digits of a number in an id: those of 64 bits. A peer may send any text, and Python converts no more than 4,300."""
MAX_LEASE_CHARACTERS: Final = 128
"""Characters of a lease id; those that a controller grants have less than half of them."""


def lease_id(kind: LeaseKind, subject: int | str, incarnation: int, number: int) -> str:
    """Return the id of lease `number` of the controller's `incarnation`.

    For example ``generate:t17:2.41``: no two leases of a run have the same id, even after a crash.
    """
    return f"{kind}:{subject}:{incarnation}.{number}"


def whole_number(text: str) -> int:
    """Return the number that `text` is, in ASCII digits; -1 if it is none, or has more than `MAX_DIGITS`."""
    return int(text) if len(text) <= MAX_DIGITS and text.isascii() and text.isdigit() else -1


def lease_incarnation(lease: str) -> int:
    """Return the incarnation of the controller that granted `lease`; -1 if it is not a lease id."""
    return whole_number(lease.rpartition(":")[2].partition(".")[0])


def lease_order(lease: str) -> tuple[int, int]:
    """Return a key that sorts leases in the order in which they were granted; (-1, -1) if it is not a lease id."""
    incarnation, _, number = lease.rpartition(":")[2].partition(".")
    order = whole_number(incarnation), whole_number(number)
    return order if min(order) >= 0 else (-1, -1)


def lease_kind(lease: str) -> LeaseKind | None:
    """Return the kind of work of `lease`, or None if it is not a lease id."""
    kind = lease.partition(":")[0]
    for known in LEASE_KINDS:
        if kind == known:
            return known
    return None


def lease_subject(lease: str) -> str:
    """Return the subject of a lease id: ``t17`` for ``generate:t17:2.41``."""
    return lease.split(":", 2)[1]

"""Staleness bound: the age of a sample, and the number of slots that bounds it.

Steps are numbered from 1; step ``s`` makes version ``s`` from version ``s - 1``. With ``P`` prompts per step and
a bound ``S`` on staleness, groups are numbered by admission from 0 and trained in that order, so that group ``i``
belongs to step ``i // P + 1``, whose base version is ``i // P``.

Why slots bound staleness. At most ``N = (S + 1) * P`` groups are admitted and not yet freed, and the groups of step
``s`` are freed when version ``s`` is published. So group ``i`` can only be admitted once ``i + 1 - N`` groups have been
freed. Freeing goes by whole steps, hence at least ``ceil((i + 1) / P) - (S + 1) = i // P - S`` versions have been
published by then. A rollout that adopts no less than that before it samples the group's first token makes every
token with a version of at least ``i // P - S``: its staleness in step ``i // P + 1`` is at most ``S``.

With ``S = 0`` a step's groups are admitted only after the step before is published: synchronous training.

The complete proof, with ranks and restarts, is `docs/explanation/staleness.md`.
"""

from __future__ import annotations


def staleness(step: int, oldest_version: int) -> int:
    """Return how many versions older than the base of `step` the oldest token of a sample is.

    0 is on-policy. The result is negative only if the sample comes from a version newer than the base of `step`.
    """
    return (step - 1) - oldest_version


def oldest_allowed_version(published: int, rank: int, prompts_per_step: int, max_staleness: int) -> int:
    """Return the oldest version that may sample a token of the live group of this `rank`, while `published` is newest.

    The published version is the base of the step that trains the group of rank 0, so the step of rank ``r`` has the
    base ``published + r // prompts_per_step``. Values of 0 or less mean that the initial weights suffice.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(prompts_per_step, max_staleness)
    if rank < 0:
        raise ValueError(f"rank is {rank}: live groups are ranked from 0")
    return published + rank // prompts_per_step - max_staleness


def num_slots(prompts_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be admitted and not yet freed, so that no sample exceeds `max_staleness`.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(prompts_per_step, max_staleness)
    return (max_staleness + 1) * prompts_per_step


def _check(prompts_per_step: int, max_staleness: int) -> None:
    if prompts_per_step < 1:
        raise ValueError(f"prompts_per_step is {prompts_per_step}: a step needs at least 1 prompt")
    if max_staleness < 0:
        raise ValueError(f"max_staleness is {max_staleness}: it must be 0 (synchronous) or more")

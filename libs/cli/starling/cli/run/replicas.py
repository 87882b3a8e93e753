"""Replicas of a run as the supervisor knows them: what was placed, how it ended, and when it is started again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from starling.cli.launch.interface import Ended, Placement


@dataclass
class Replica:
    """One replica that the launcher has been asked for."""

    placement: Placement
    ended: Ended | None = None
    """Its last end; None while it is placed."""
    due: float | None = None
    """When it is started again (monotonic seconds), after it ended."""
    spared: bool = False
    """It died, and the run continues without it."""
    is_drained: bool = False
    """The run needs it no more: it is not started again."""

    @property
    def name(self) -> str:
        """Return its name, such as ``rollout-3``."""
        return self.placement.name

    @property
    def role(self) -> str:
        """Return its role."""
        return self.placement.role

    @property
    def is_placed(self) -> bool:
        """Whether it has been started and has not ended."""
        return self.ended is None and self.due is None

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error that the run did not tolerate."""
        return self.ended is not None and self.ended.code != 0 and not (self.spared or self.is_drained)

    @property
    def counts(self) -> bool:
        """Whether it is one of those that the run should have: also while it is to be started again, or was given up.

        One that was given up is not replaced by another name: that would die as often.
        """
        return not self.is_drained and (self.ended is None or self.due is not None or self.spared)

    def ending(self) -> str:
        """Return how it ended in words: ``was killed by SIGKILL``."""
        return "runs" if self.ended is None else self.ended.reason


def missing(replicas: Iterable[Replica], members: Collection[str], role: str, num: int) -> list[str]:
    """Return the names of the replicas of `role` to place so that the run has `num`: the lowest numbers that are free.

    `members`: the replicas that the controller has, without those that it drains; others may have started some.
    """
    own = [replica for replica in replicas if replica.role == role]
    present = {replica.name for replica in own if replica.counts} | _of(role, members)
    taken = present | {replica.name for replica in own if replica.ended is None}
    free = (name for name in (f"{role}-{i}" for i in range(len(taken) + num)) if name not in taken)
    return [name for name, _ in zip(free, range(num - len(present)), strict=False)]


def unneeded(replicas: Iterable[Replica], members: Collection[str], role: str, num: int) -> list[Replica]:
    """Return the replicas of `role` that are more than `num` and no members, so that no controller drains them."""
    own = [replica for replica in replicas if replica.role == role and replica.counts]
    present = {replica.name for replica in own} | _of(role, members)
    absent = sorted((one for one in own if one.name not in members), key=lambda one: number_of(one.name), reverse=True)
    return absent[: max(0, len(present) - num)]


def number_of(name: str) -> int:
    """Return the number in the name of a replica: 3 of ``rollout-3``."""
    return int(name.rpartition("-")[2])


def _of(role: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if name.rpartition("-")[0] == role}


class Replicas:
    """All replicas of a run, in the order of their first starts."""

    def __init__(self) -> None:
        """There are none."""
        self._by_name: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over those that were ever placed; a loop may add some."""
        return iter(list(self._by_name.values()))

    def __contains__(self, name: object) -> bool:
        """Return whether the replica `name` was ever placed."""
        return name in self._by_name

    def __getitem__(self, name: str) -> Replica:
        """Return the replica `name`."""
        return self._by_name[name]

    def add(self, replica: Replica) -> None:
        """Add a replica that was placed, or replace the former one of its name."""
        self._by_name[replica.name] = replica

    def placed(self, role: str = "") -> list[Replica]:
        """Return those that run as far as is known, of `role` or of all roles."""
        return [one for one in self._by_name.values() if one.is_placed and role in ("", one.role)]

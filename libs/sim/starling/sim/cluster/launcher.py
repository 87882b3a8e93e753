"""Simulated launcher: starts the replicas that the controller asks for, with a delay, and refuses some.

Which names are missing and which are not needed the supervisor of `starling run` says (`starling.cli.run.replicas`), as
well as how often a replica that could not be placed is tried again (`starling.cli.run.restarts`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from starling.cli.launch.interface import Ended, Placement
from starling.cli.run.replicas import Replica, missing, unneeded
from starling.cli.run.restarts import Restarts
from starling.controller.core.replicas.scaling.desired import DesiredReplicas
from starling.sim.environment.clock import SimulatedClock
from starling.sim.replicas.replica import SimulatedReplica
from starling.sim.scenario.faults import Faults

PLACE_EVERY_S: Final = 1.0
"""Seconds between two updates of the number of replicas that the controller asks for."""
MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0


class SimulatedLauncher:
    """Starts what is missing, and ends what no controller will drain."""

    def __init__(
        self,
        clock: SimulatedClock,
        rng: random.Random,
        faults: Faults,
        start: Callable[[str, str], None],
    ) -> None:
        """`start`: starts a replica of this role and name, in its next incarnation."""
        self._clock, self._rng, self._faults, self._start = clock, rng, faults, start
        self._restarts = Restarts(MAX_RESTARTS, RESTART_WINDOW_S)
        self._placed: dict[str, Replica] = {}
        """Those that it has begun to place, and that have not started yet, by name."""
        self.unneeded: set[str] = set()
        """Names that are not restarted, unless they are placed again."""
        self.num_refused = 0
        """Placements that were refused."""

    def look(
        self, replicas: Iterable[SimulatedReplica], restarting: set[str], members: set[str], desired: DesiredReplicas
    ) -> None:
        """Place what is missing, and end what is not needed.

        Args:
            replicas: the newest incarnation of each name.
            restarting: names of those that died and will be restarted.
            members: those of the controller.
            desired: numbers of replicas that the controller asks for, and replicas that it drains.
        """
        members = members - desired.draining.keys()
        present = {replica.name: replica for replica in replicas}
        known = [self._as_placed(replica, restarting, desired) for replica in present.values()]
        known = [one for one in known if one.name not in self._placed] + list(self._placed.values())
        for role, num in desired.counts.items():
            for replica in unneeded(known, members, role, num):
                self.unneeded.add(replica.name)
                self._placed.pop(replica.name, None)
                if replica.name in present and present[replica.name].alive:
                    present[replica.name].leave("the launcher ends it")
            for name in missing(known, members, role, num):
                self.unneeded.discard(name)
                self._placed[name] = Replica(Placement(name, role, ()))
                self._try(name)

    def _as_placed(self, replica: SimulatedReplica, restarting: set[str], desired: DesiredReplicas) -> Replica:
        """Return a replica as the supervisor knows it."""
        is_drained = replica.name in self.unneeded or replica.name in desired.draining
        placed = Replica(Placement(replica.name, replica.role, ()), is_drained=is_drained)
        if not replica.alive:
            placed.ended = Ended(replica.name, 0, "ended")
            placed.due = self._clock.now if replica.name in restarting and not placed.is_drained else None
        return placed

    def _try(self, name: str) -> None:
        """Place a replica, after some time, unless the placement is refused: then again after a backoff."""
        replica = self._placed[name]
        if self._rng.random() >= self._faults.refusals:
            self._clock.after(self._faults.launch_s * self._rng.random(), self._begin, replica)
            return
        self.num_refused += 1
        delay_s = self._restarts.delay_s(name, self._clock.now)
        if delay_s is None:
            replica.ended, replica.spared = Ended(name, None, "could not be started"), True
        else:
            self._clock.after(delay_s, self._retry, replica)

    def _retry(self, replica: Replica) -> None:
        if self._placed.get(replica.name) is replica:
            self._try(replica.name)

    def _begin(self, replica: Replica) -> None:
        if self._placed.get(replica.name) is replica:
            del self._placed[replica.name]
            self._start(replica.role, replica.name)

"""A reward replica: the real reward core, and one scorer that takes its time or fails."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.sim.replicas.replica import Buffers, SimulatedReplica

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

SCORERS: Final = (core.WeightedScorer("right", 1.0),)


class SimulatedReward(SimulatedReplica):
    """Scores the completions of each group, which is right or wrong by its text alone."""

    role: Role = "reward"

    def __init__(self, world: SimulatedCluster, name: str, epoch: int, num_slots: int) -> None:
        super().__init__(world, name, epoch, num_slots)
        self._core = core.GroupScores(SCORERS, num_slots)

    def do(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a group."""
        assert isinstance(message, wire.ScoreGroup), f"a reward was sent {message}"
        self._act(self._core.add(message))

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Forget groups."""
        self._act(self._core.give_up(leases))

    def _act(self, commands: list[core.Command]) -> None:
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self.book.work(task.id)
                    for position, text in task.completions:
                        seconds = self.takes(self.world.scenario.work.score_s)
                        self.world.busy_s["reward"] += seconds
                        self.world.clock.after(seconds, self._scored, task.id, position, text)
                case core.SendScores(message=message):
                    self.answer(message.lease, message)
                case core.CancelTask():
                    pass  # its scores come, and change nothing

    def _scored(self, task: str, position: int, completion: wire.CompletionText) -> None:
        if not self.alive:
            return
        if self.world.rng.random() < self.world.faults.scorer_failures:
            score = core.Score(task, position, 0, None, wire.Status.REWARD_ERROR, "The scorer failed.")
        else:
            score = core.Score(task, position, 0, right(completion.text))
        self._act(self._core.record(score))


def right(text: str) -> float:
    """Return 1 or 0, by the text alone. (7: with a power of two, all completions of a prompt would have the same.)"""
    return float(zlib.crc32(text.encode()) % 7 % 2)

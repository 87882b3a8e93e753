"""Simulated reward replica: the real reward core around one scorer with random durations and failures."""

from __future__ import annotations

from typing import Final

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import Sample, Score
from starling.sim.checks.guarantees import right
from starling.sim.replicas.replica import Buffers, Cluster, SimulatedReplica

SCORERS: Final = (WeightedScorer("right", 1.0),)


class SimulatedReward(SimulatedReplica):
    """Scores the completions of each group as right or wrong, by their texts."""

    role: Role = "reward"

    def __init__(self, cluster: Cluster, name: str, incarnation: int, num_slots: int) -> None:
        super().__init__(cluster, name, incarnation, num_slots)
        self._core = core.GroupScores(SCORERS, num_slots)

    def execute(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a group."""
        assert isinstance(message, wire.ScoreGroup), f"a reward was sent {message}"
        self._apply(self._core.add(message))

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Drop groups."""
        self._apply(self._core.cancel(leases))

    def _apply(self, commands: list[core.Command]) -> None:
        for command in commands:
            match command:
                case core.SubmitTask(task=task):
                    self.leases.work(task.id)
                    for sample in task.samples:
                        seconds = self.sample_duration(self.cluster.scenario.workload.score_s)
                        self.cluster.busy_s["reward"] += seconds
                        self.cluster.clock.after(seconds, self._scored, task.id, sample)
                case core.SendScores(message=message):
                    self.answer(message.lease, message)
                case core.CancelTask():
                    pass  # late scores of a cancelled group are ignored by the core

    def _scored(self, task: str, sample: Sample) -> None:
        if not self.alive:
            return
        if self.cluster.rng.random() < self.cluster.faults.scorer_failures:
            score = Score(task, sample.index, 0, None, wire.Status.REWARD_ERROR, "The scorer failed.")
        else:
            score = Score(task, sample.index, 0, right(sample.completion.text))
        self._apply(self._core.record(score))

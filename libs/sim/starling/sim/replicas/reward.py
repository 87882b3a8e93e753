"""Simulated reward replica: the real reward core around scorers with random durations and failures."""

from __future__ import annotations

import itertools
from typing import Final

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.reward.core import groups as core
from starling.reward.core.rewards import WeightedScorer
from starling.reward.core.samples import Sample, Score
from starling.sim.checks.guarantees import right
from starling.sim.replicas.replica import Buffers, Cluster, SimulatedReplica

RIGHT: Final = WeightedScorer("right", 1.0)


class SimulatedReward(SimulatedReplica):
    """Scores the completions of each group as right or wrong, by their texts; evaluation scorers say the opposite."""

    role: Role = "reward"

    def __init__(self, cluster: Cluster, name: str, incarnation: int, num_slots: int) -> None:
        super().__init__(cluster, name, incarnation, num_slots)
        evaluation = (WeightedScorer(label, 0.0, evaluates=True) for label in cluster.scenario.plan.evaluation_scorers)
        self._scorers = (RIGHT, *evaluation)
        self._core = core.GroupScores(self._scorers, num_slots)

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
                    for sample, scorer in itertools.product(task.samples, task.scorers):
                        seconds = self.sample_duration(self.cluster.scenario.workload.score_s)
                        self.cluster.busy_s["reward"] += seconds
                        self.cluster.clock.after(seconds, self._scored, task.id, sample, scorer)
                case core.SendScores(message=message):
                    self.answer(message.lease, message)
                case core.CancelTask():
                    pass  # late scores of a cancelled group are ignored by the core

    def _scored(self, task: str, sample: Sample, scorer: int) -> None:
        if not self.alive:
            return
        if self.cluster.rng.random() < self.cluster.faults.scorer_failures:
            score = Score(task, sample.index, scorer, None, wire.Status.REWARD_ERROR, "The scorer failed.")
        else:
            value = right(sample.completion.text)
            score = Score(task, sample.index, scorer, 1.0 - value if self._scorers[scorer].evaluates else value)
        self._apply(self._core.record(score))

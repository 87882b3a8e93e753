"""Simulated teacher: its log-probabilities are a function of the prompt and the completions."""

from __future__ import annotations

from collections import deque

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.sim.checks.guarantees import teacher_logprobs
from starling.sim.errors import require
from starling.sim.replicas.replica import Buffers, Cluster, SimulatedReplica


class SimulatedTeacher(SimulatedReplica):
    """Scores the tokens of one group after the other."""

    role: Role = "teacher"

    def __init__(self, cluster: Cluster, name: str, incarnation: int, num_slots: int) -> None:
        super().__init__(cluster, name, incarnation, num_slots)
        self._queue: deque[tuple[wire.ScoreTokens, Buffers]] = deque()

    def execute(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a group."""
        assert isinstance(message, wire.ScoreTokens), f"a teacher was sent {message}"
        self._queue.append((message, buffers))
        if len(self._queue) == 1:
            self._begin_group()

    def cancel(self, leases: tuple[str, ...]) -> None:
        """Drop queued groups. The group in progress is finished; its answer is then ignored."""
        first = list(self._queue)[:1]
        self._queue = deque(first + [entry for entry in list(self._queue)[1:] if entry[0].lease not in leases])

    def _begin_group(self) -> None:
        message, _ = self._queue[0]
        self.leases.work(message.lease)
        seconds = self.sample_duration(self.cluster.scenario.workload.teach_s * len(message.lengths))
        self.cluster.busy_s["teacher"] += seconds
        self.cluster.clock.after(seconds, self._finish_group)

    def _finish_group(self) -> None:
        if not self.alive:
            return
        message, (prompt, tokens) = self._queue.popleft()
        if self.cluster.rng.random() < self.cluster.faults.teacher_failures:
            self.fail(message.lease, "the teacher is out of memory")
        else:
            logprobs = teacher_logprobs(prompt, tokens)
            num = len(logprobs) // 4
            require(
                num == sum(message.lengths), f"{message.prompt_id} has {num} tokens, its lengths are {message.lengths}"
            )
            meta = wire.TensorMeta(dtype="float32", shape=(num,), nbytes=len(logprobs), name="teacher_logprobs")
            self.answer(message.lease, wire.TokensScored(lease=message.lease, tensors=(meta,)), (logprobs,))
        if self._queue:
            self._begin_group()

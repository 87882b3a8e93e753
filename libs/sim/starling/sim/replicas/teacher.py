"""A teacher: it says of each token what depends on the prompt and the completions alone, and takes its time."""

from __future__ import annotations

import struct
import zlib
from collections import deque
from typing import TYPE_CHECKING

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.sim.errors import demand
from starling.sim.replicas.replica import Buffers, SimulatedReplica

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster


class SimulatedTeacher(SimulatedReplica):
    """Scores the tokens of one group after the other."""

    role: Role = "teacher"

    def __init__(self, world: SimulatedCluster, name: str, epoch: int, num_slots: int) -> None:
        super().__init__(world, name, epoch, num_slots)
        self._queue: deque[tuple[wire.ScoreTokens, Buffers]] = deque()

    def do(self, message: wire.LeasedCommand, buffers: Buffers) -> None:
        """Queue a group."""
        assert isinstance(message, wire.ScoreTokens), f"a teacher was sent {message}"
        self._queue.append((message, buffers))
        if len(self._queue) == 1:
            self._begin()

    def give_up(self, leases: tuple[str, ...]) -> None:
        """Forget groups; the one in hand is finished, and its answer wanted by nobody."""
        first = list(self._queue)[:1]
        self._queue = deque(first + [entry for entry in list(self._queue)[1:] if entry[0].lease not in leases])

    def _begin(self) -> None:
        message, _ = self._queue[0]
        self.book.work(message.lease)
        seconds = self.takes(self.world.scenario.work.teach_s * len(message.lengths))
        self.world.busy_s["teacher"] += seconds
        self.world.clock.after(seconds, self._scored)

    def _scored(self) -> None:
        if not self.alive:
            return
        message, (prompt, tokens) = self._queue.popleft()
        if self.world.rng.random() < self.world.faults.teacher_failures:
            self.fail(message.lease, "the teacher has no memory left")
        else:
            logprobs = teacher_logprobs(prompt, tokens)
            num = len(logprobs) // 4
            demand(num == sum(message.lengths), f"{message.prompt_id} has {num} tokens and says {message.lengths}")
            meta = wire.TensorMeta(dtype="float32", shape=(num,), nbytes=len(logprobs), name="teacher_logprobs")
            self.answer(message.lease, wire.TokensScored(lease=message.lease, tensors=(meta,)), (logprobs,))
        if self._queue:
            self._begin()


def teacher_logprobs(prompt: bytes, tokens: bytes) -> bytes:
    """Return what stands for a teacher's log-probabilities of `tokens` (int32) behind `prompt`."""
    value = zlib.crc32(tokens, zlib.crc32(prompt)) % 1000 / -100.0
    return struct.pack("<f", value) * (len(tokens) // 4)

"""Somebody at a terminal, who changes settings, wants evaluations, and asks why nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.sim.errors import demand

if TYPE_CHECKING:
    from starling.sim.cluster.cluster import SimulatedCluster

NAME: Final = "operator-0"
REPEAT_S: Final = 1.0
PATIENCE_S: Final = 120.0
"""No answer takes longer, whatever goes wrong, while the run goes on."""
CHANGES: Final = (
    ("policy.optimizer.learning_rate", (1e-6, 2e-6, 1e-5)),
    ("policy.algorithm.clip_high", (0.2, 0.28)),
    ("sampling.temperature", (0.8, 1.0, 1.2)),
    ("evaluation.every", (0.0, 1.0, 3.0)),
    ("controller.save_every", (1.0, 2.0, 0.0)),
)


class SimulatedOperator:
    """Says each thing again until it is answered."""

    role: Final = "operator"

    def __init__(self, world: SimulatedCluster) -> None:
        self.world = world
        self.alive = True
        self._asked: dict[str, float] = {}
        """When each request was first made that has no answer yet."""
        self._evaluations: set[str] = set()
        """Requests for an evaluation."""
        self._num = 0

    def want_something(self) -> None:
        """Make a request."""
        rng, request = self.world.rng, f"request {self._num}"
        self._num += 1
        self._asked[request] = self.world.clock.now
        message: wire.OperatorMessage = wire.QueryRun(request=request, about=rng.choice(("status", "why")))
        wish = rng.random()
        if wish < 0.6:
            key, values = rng.choice(CHANGES)
            message = wire.ChangeSetting(request=request, key=key, value=rng.choice(values))
        elif wish < 0.8:
            message = wire.RequestEvaluation(request=request)
            self._evaluations.add(request)
        self._say(message)

    def hear(self, envelope: wire.Envelope, message: wire.Down, frames: list[bytes | memoryview]) -> None:
        """Take in an answer."""
        demand(isinstance(message, wire.OperatorReply), f"an operator was told {message}")
        assert isinstance(message, wire.OperatorReply)
        self._asked.pop(message.request, None)
        if message.ok and message.request in self._evaluations:
            self.world.promises.promised.add(message.request)

    def _say(self, message: wire.OperatorMessage) -> None:
        since = self._asked.get(message.request)
        if since is None:
            return
        waited = self.world.clock.now - since
        demand(waited < PATIENCE_S, f"an operator has had no answer to {message} for {waited:.0f} s")
        envelope = wire.Envelope(protocol=wire.PROTOCOL_VERSION, run="r", sender=NAME, incarnation=1, seq=1)
        self.world.to_controller(NAME, codec.pack(envelope, message))
        self.world.clock.after(REPEAT_S, self._say, message)

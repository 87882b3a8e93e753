"""Simulated operator: changes settings, requests evaluations and saved states, and queries the run at random times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.sim.checks.guarantees import Guarantees
from starling.sim.environment.clock import SimulatedClock
from starling.sim.errors import require

NAME: Final = "operator-0"
REPEAT_S: Final = 1.0
TIMEOUT_S: Final = 120.0
"""Every request is answered within this time, under all faults, while the run continues."""
MOST_REPLICAS: Final = 5
"""Of one role, that it asks for."""
CHANGES: Final = (
    ("policy.optimizer.learning_rate", (1e-6, 2e-6, 1e-5)),
    ("policy.algorithm.clip_high", (0.2, 0.28)),
    ("sampling.temperature", (0.8, 1.0, 1.2)),
    ("evaluation.every", (0.0, 1.0, 3.0)),
    ("controller.save_every", (1.0, 2.0, 0.0)),
)


class SimulatedOperator:
    """Repeats each request until it is answered."""

    role: Final = "operator"
    alive: Final = True

    def __init__(
        self,
        clock: SimulatedClock,
        rng: random.Random,
        guarantees: Guarantees,
        to_controller: Callable[[str, list[bytes | memoryview]], None],
    ) -> None:
        self._clock, self._rng, self._guarantees, self._to_controller = clock, rng, guarantees, to_controller
        self._unanswered: dict[str, float] = {}
        """Time of each request that has no answer yet."""
        self._evaluations: set[str] = set()
        """Requests for an evaluation."""
        self._num = 0

    def make_request(self) -> None:
        """Make a random request."""
        rng, request = self._rng, f"request {self._num}"
        self._num += 1
        self._unanswered[request] = self._clock.now
        message: wire.OperatorMessage = wire.QueryRun(request=request, about=rng.choice(("status", "why")))
        choice = rng.random()
        if choice < 0.6:
            key, values = rng.choice(CHANGES)
            message = wire.ChangeSetting(request=request, key=key, value=rng.choice(values))
        elif choice < 0.8:
            message = wire.RequestEvaluation(request=request)
            self._evaluations.add(request)
        elif choice < 0.9:
            message = wire.RequestCheckpoint(request=request)
        self._send(message)

    def scale(self, roles: Sequence[str], names: Sequence[str]) -> None:
        """Set the number of replicas of one of `roles`, or drain one of `names`; both also beyond what is possible."""
        rng, request = self._rng, f"request {self._num}"
        self._num += 1
        self._unanswered[request] = self._clock.now
        message: wire.OperatorMessage = wire.ScaleReplicas(
            request=request, role=rng.choice(roles), num=rng.randint(0, MOST_REPLICAS)
        )
        if names and rng.random() < 0.3:
            message = wire.DrainReplica(request=request, name=rng.choice(names))
        self._send(message)

    def receive(self, envelope: wire.Envelope, message: wire.Down, frames: list[bytes | memoryview]) -> None:
        """Handle a reply."""
        require(isinstance(message, wire.OperatorReply), f"an operator was sent {message}")
        assert isinstance(message, wire.OperatorReply)
        self._unanswered.pop(message.request, None)
        if message.ok and message.request in self._evaluations:
            self._guarantees.granted_evaluations.add(message.request)

    def _send(self, message: wire.OperatorMessage) -> None:
        since = self._unanswered.get(message.request)
        if since is None:
            return
        waited = self._clock.now - since
        require(waited < TIMEOUT_S, f"an operator has waited {waited:.0f} s for the reply to {message}")
        envelope = wire.Envelope(protocol=wire.PROTOCOL_VERSION, run="r", sender=NAME, incarnation=1, seq=1)
        self._to_controller(NAME, codec.pack(envelope, message))
        self._clock.after(REPEAT_S, self._send, message)

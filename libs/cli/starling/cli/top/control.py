"""Requests of an operator to the controller of a run: why it waits, and what the keys of an operator ask for."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starling.cli.operate.command import Connection, controller_of, make_change
from starling.cli.operate.scaling import make_draining, make_scaling
from starling.common.errors import ConfigError, StarlingError
from starling.common.net.operator import OperatorClient
from starling.common.wire.messages import (
    ChangeSetting,
    OperatorMessage,
    QueryRun,
    RequestCheckpoint,
    RequestEvaluation,
)

TIMEOUT_S = 5.0
"""How long an answer may take: a controller answers between two messages."""


@dataclass(frozen=True)
class Request:
    """What an operator wants, before it is confirmed."""

    question: str
    make: Callable[[str], OperatorMessage]
    """Message of a request with this id."""


class Operator:
    """Asks the controller of a run with an operator's key. Any thread; one request at a time is open."""

    def __init__(self, folder: Path | None, connection: Connection) -> None:
        """Reach the controller as `starling status` does: by the run's folder, or by address, key and id."""
        self._folder, self._connection = folder, connection

    def ask(self, make: Callable[[str], OperatorMessage]) -> tuple[bool, str]:
        """Send a request; return whether it was accepted, and the answer in words. An error is an answer too."""
        from starling.cli.run.attempt import OPERATOR

        try:
            address, key, run = controller_of(self._folder, self._connection)
            name = key.stem if key is not None else OPERATOR
            with OperatorClient(address, key, run, name=name) as client:
                reply = client.ask(make(uuid.uuid4().hex), TIMEOUT_S)
        except StarlingError as error:
            return False, str(error)
        except OSError as error:
            return False, f"{error.filename or 'the run'} cannot be read: {error.strerror}"
        return reply.ok, reply.text

    def why(self) -> tuple[bool, str]:
        """Return what the run waits for, as `starling why` prints it."""
        return self.ask(lambda request: QueryRun(request=request, about="why"))


def evaluation() -> Request:
    """Return the request to evaluate the newest version."""
    return Request(
        "Evaluate the newest version on the held-out prompts of the run?",
        lambda request: RequestEvaluation(request=request),
    )


def checkpoint() -> Request:
    """Return the request to save a state."""
    return Request("Save a state of the run before its next step?", lambda request: RequestCheckpoint(request=request))


def change(words: str) -> Request:
    """Return the request to change a setting, ``KEY VALUE``. Raises ConfigError for anything else."""
    parts = words.replace("=", " ").split(maxsplit=1)
    if len(parts) != 2:
        raise ConfigError(f"{words!r} is no setting with a value; write KEY VALUE, such as rl.max_staleness 2")
    key, value = make_change(*parts)
    return Request(
        f"Set {key} = {value} from the next step on?",
        lambda request: ChangeSetting(request=request, key=key, value=value),
    )


def draining(words: str) -> Request:
    """Return the request to take a replica out of the run, ``NAME``. Raises ConfigError for anything else."""
    parts = words.split()
    if len(parts) != 1:
        raise ConfigError(f"{words!r:.100} is no replica; write its name, such as rollout-3")
    return Request(f"Drain {parts[0]}? It finishes its work and leaves; one less is desired.", make_draining(parts[0]))


def scaling(words: str) -> Request:
    """Return the request to have another number of replicas, ``ROLE NUMBER``. Raises ConfigError for anything else."""
    parts = words.replace("=", " ").split()
    if len(parts) != 2:
        raise ConfigError(f"{words!r:.100} is no number of replicas; write ROLE NUMBER, such as rollout 8")
    make = make_scaling(*parts)
    return Request(f"Scale {parts[0]} to {parts[1]}? What is surplus is drained, the newest first.", make)


def changeable() -> str:
    """Return the settings that may change, one on each line with its range."""
    from starling.controller.core.training.dynamic_settings import DYNAMIC

    return "\n".join(f"{one.key:<36} {one.short_range}" for one in DYNAMIC.values())

"""Requests to the controller of a run with the operator's key: what it waits for, and, if allowed, changes."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from starling.cli.operate.command import Connection, make_change, open_client
from starling.cli.operate.scaling import make_draining, make_scaling
from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError, StarlingError

if TYPE_CHECKING:
    from starling.common.wire.messages import OperatorMessage, OperatorReply

    MakeMessage = Callable[[str], OperatorMessage]

TIMEOUT_S: Final = 5.0
FRESH_S: Final = 1.0
"""How long an answer serves all who ask the same."""
MAX_KEY: Final = 200
MAX_COMPLETIONS: Final = 1 << 20


class OperatorLine:
    """One operator's requests to one run, one after the other."""

    def __init__(self, key: Path | None) -> None:
        """Ask with the key in this file, None for that of the run's folder."""
        self._connection = Connection(key=key)
        self._lock = threading.Lock()
        self._answers: dict[str, tuple[float, Path, OperatorReply | StarlingError]] = {}

    def query(self, attempt: Attempt, about: str) -> OperatorReply:
        """Return the controller's answer to `status` or `why`, at most a second old. Raises StarlingError."""
        from starling.common.wire.messages import QueryRun

        with self._lock:
            known = self._answers.get(about)
            if known is not None and time.monotonic() < known[0] + FRESH_S and known[1] == attempt.folder:
                return _given(known[2])
            assert about in ("status", "why")
            message = QueryRun(request=uuid.uuid4().hex, about=about)  # type: ignore[arg-type]
            answer: OperatorReply | StarlingError
            try:
                answer = _ask(attempt, self._connection, message)
            except StarlingError as error:  # also kept: those who wait for this line would wait again for the same
                answer = error
            self._answers[about] = (time.monotonic(), attempt.folder, answer)
            return _given(answer)

    def act(self, attempt: Attempt, asked: dict[str, Any]) -> OperatorReply:
        """Have the controller do what a request of the page asks for. Raises StarlingError."""
        message = operator_message(asked)
        with self._lock:
            self._answers.clear()
            return _ask(attempt, self._connection, message)


def _given(answer: OperatorReply | StarlingError) -> OperatorReply:
    if isinstance(answer, StarlingError):
        raise answer
    return answer


def operator_message(asked: dict[str, Any]) -> OperatorMessage:
    """Return the message for a request of the page. Raises ConfigError with one sentence."""
    make = ACTIONS.get(str(asked.get("action"))[:40])
    if make is None:
        names = ", ".join(list(ACTIONS)[:-1])
        raise ConfigError(f"{asked.get('action')!r:.50} is no action; there are {names} and {list(ACTIONS)[-1]}")
    return make(asked)(uuid.uuid4().hex)


def _evaluate(asked: dict[str, Any]) -> MakeMessage:
    from starling.common.wire.messages import RequestEvaluation

    num = asked.get("num_completions", 0)
    if type(num) is not int or not 0 <= num <= MAX_COMPLETIONS:
        raise ConfigError(f"{num!r:.50} completions: give a whole number, 0 for that of the recipe")
    return lambda request: RequestEvaluation(request=request, num_completions=num)


def _checkpoint(asked: dict[str, Any]) -> MakeMessage:
    from starling.common.wire.messages import RequestCheckpoint

    return lambda request: RequestCheckpoint(request=request)


def _set(asked: dict[str, Any]) -> MakeMessage:
    from starling.common.wire.messages import ChangeSetting

    key, value = asked.get("key"), asked.get("value")
    if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY:
        raise ConfigError("give the key of a setting, such as policy.optimizer.learning_rate")
    if not isinstance(value, str) or len(value) > MAX_KEY:
        raise ConfigError(f"{key}: give one number, one word, true or false")
    named, changed = make_change(key.strip(), value.strip())
    return lambda request: ChangeSetting(request=request, key=named, value=changed)


def _scale(asked: dict[str, Any]) -> MakeMessage:
    role, num = asked.get("role"), asked.get("num")
    if not isinstance(role, str) or type(num) is not int:
        raise ConfigError(f"{role!r:.50} {num!r:.50}: give a role and a whole number of replicas, such as rollout 8")
    return make_scaling(role, str(num))


def _drain(asked: dict[str, Any]) -> MakeMessage:
    name = asked.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{name!r:.50} is no replica; give its name, such as rollout-3")
    return make_draining(name)


def _stop(asked: dict[str, Any]) -> MakeMessage:
    from starling.common.wire.messages import RequestStop

    return lambda request: RequestStop(request=request, reason="an operator asked for it on the dashboard")


ACTIONS: Final[dict[str, Callable[[dict[str, Any]], MakeMessage]]] = {
    "evaluate": _evaluate,
    "checkpoint": _checkpoint,
    "set": _set,
    "scale": _scale,
    "drain": _drain,
    "stop": _stop,
}
"""What the page may ask for: each returns the message, by the id of its request."""


def _ask(attempt: Attempt, connection: Connection, message: OperatorMessage) -> OperatorReply:
    with open_client(attempt.folder, connection) as client:
        return client.ask(message, TIMEOUT_S)

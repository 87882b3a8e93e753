"""`starling scale` and `starling drain`: the number of replicas of a run, and one replica less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from starling.cli.command_line import define
from starling.cli.operate.command import NO_CONNECTION, Flags, ask
from starling.common.counts import counted
from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from starling.common.wire.messages import OperatorMessage

MAX_DIGITS: Final = 9
"""Of a number of replicas; the controller says how many there may be."""
MAX_WORD: Final = 200
"""Characters of a role or of the name of a replica."""


def scale(
    *words: Annotated[str, Parameter(name="[RUN_FOLDER] ROLE NUMBER", help="For example rollout 8, or policy 2.")],
    connection: Flags = NO_CONNECTION,
) -> int:
    """Set how many replicas of a role a run has."""
    if len(words) not in (2, 3):
        raise ConfigError(f"{counted(len(words), 'word')}: write starling scale [RUN_FOLDER] ROLE NUMBER")
    *folder, role, number = words
    return ask(make_scaling(role, number), Path(folder[0]) if folder else None, connection)


def drain(
    *words: Annotated[str, Parameter(name="[RUN_FOLDER] NAME", help="The name of a replica, such as rollout-3.")],
    connection: Flags = NO_CONNECTION,
) -> int:
    """Take one replica out of a run; others get its work."""
    if len(words) not in (1, 2):
        raise ConfigError(f"{counted(len(words), 'word')}: write starling drain [RUN_FOLDER] NAME")
    *folder, name = words
    return ask(make_draining(name), Path(folder[0]) if folder else None, connection)


def make_scaling(role: str, number: str) -> Callable[[str], OperatorMessage]:
    """Return the message, by the id of its request, that sets the number of replicas of a role. Raises ConfigError."""
    from starling.common.wire.messages import ScaleReplicas

    if not (number.isdecimal() and number.isascii() and len(number) <= MAX_DIGITS):
        raise ConfigError(f"{number!r:.100} is not a number of replicas; give ROLE NUMBER, such as rollout 8")
    _check_word("ROLE", role)
    return lambda request: ScaleReplicas(request=request, role=role, num=int(number))


def make_draining(name: str) -> Callable[[str], OperatorMessage]:
    """Return the message, by the id of its request, that takes a replica out of the run. Raises ConfigError."""
    from starling.common.wire.messages import DrainReplica

    _check_word("NAME", name)
    return lambda request: DrainReplica(request=request, name=name)


def _check_word(what: str, text: str) -> None:
    if not 0 < len(text) <= MAX_WORD:
        raise ConfigError(f"{what} {text!r:.100} has {counted(len(text), 'character')}; give 1 to {MAX_WORD}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} {text!r:.100} is not UTF-8; give another one") from None


scale_command = define(
    "scale",
    scale,
    "[RUN_FOLDER] ROLE NUMBER [OPTIONS]",
    "ROLE is rollout, policy, reward or teacher. The launcher of the run places what is missing, and the controller "
    "drains what is surplus, the newest first.",
    "Examples:\n  starling scale runs/quickstart rollout 8\n  starling scale policy 2",
)
drain_command = define(
    "drain", drain, "[RUN_FOLDER] NAME [OPTIONS]", "Example:\n  starling drain runs/quickstart rollout-3"
)

"""Operators' commands: `starling status`, `why`, `set`, `checkpoint` and `stop`, and `evaluate` of a run in progress.

The controller answers all of them, in words and as data; nothing is guessed from files. The folder of the run is enough
to reach its controller; for a controller elsewhere give its address, an operator's key and the run's id.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Group, Parameter

from starling.cli.command_line import define
from starling.cli.terminal import print_json
from starling.common.counts import counted
from starling.common.errors import ConfigError, StarlingError, UnreachableError
from starling.common.ranges import MAX_SECONDS

if TYPE_CHECKING:
    from starling.cli.run.attempt import Attempt
    from starling.common.net.operator import OperatorClient
    from starling.common.wire.messages import OperatorMessage

TIMEOUT_S = 10.0
MAX_BITS = 63
"""Of a whole number that a message can carry."""
REASON = "an operator asked for it"
CONNECTION = Group("Connection", sort_key=8)
OUTPUT = Group("Output", sort_key=9)

RunFolder = Annotated[
    Path | None,
    Parameter(help="runs/NAME/attempt-N, or runs/NAME for its newest attempt; by default the newest below ./runs."),
]


@dataclass(frozen=True)
class Connection:
    """How to reach the controller of a run, and how to print its answer."""

    controller: Annotated[str, Parameter(metavar="ADDRESS", help="tcp://host:port, instead of a folder.")] = ""
    key: Annotated[
        Path | None, Parameter(metavar="FILE", help="An operator's key; by default keys/operator-0.json of the run.")
    ] = None
    run: Annotated[str, Parameter(metavar="ID", help="The run's id, instead of a folder.")] = ""
    timeout: Annotated[float, Parameter(metavar="SECONDS", help="How long to wait for the answer.")] = TIMEOUT_S
    json: Annotated[bool, Parameter(help="Print the answer as one JSON object.", group=OUTPUT)] = False


Flags = Annotated[Connection, Parameter(name="*", group=CONNECTION)]


NO_CONNECTION: Final = Connection()
"""The newest run below ./runs."""


class NoAnswerError(StarlingError):
    """The run is over, or the controller refused the request."""


def status(folder: RunFolder = None, /, *, connection: Flags = NO_CONNECTION) -> int:
    """Show what a run is doing: its phase, replicas and groups."""
    from starling.common.wire.messages import QueryRun

    return ask(lambda request: QueryRun(request=request, about="status"), folder, connection)


def why(folder: RunFolder = None, /, *, connection: Flags = NO_CONNECTION) -> int:
    """Explain what a run is waiting for, since when, and the deadline."""
    from starling.common.wire.messages import QueryRun

    return ask(lambda request: QueryRun(request=request, about="why"), folder, connection)


def change_setting(
    *words: Annotated[str, Parameter(name="[RUN_FOLDER] KEY VALUE", help="For example rl.max_staleness 2.")],
    connection: Flags = NO_CONNECTION,
) -> int:
    """Change a setting of a run, from its next step on."""
    from starling.common.wire.messages import ChangeSetting

    if len(words) not in (2, 3):
        raise ConfigError(f"{counted(len(words), 'word')}: write starling set [RUN_FOLDER] KEY VALUE")
    *folder, key, text = words
    key, value = make_change(key, text)
    where = Path(folder[0]) if folder else None
    return ask(lambda request: ChangeSetting(request=request, key=key, value=value), where, connection)


def make_change(key: str, text: str) -> tuple[str, bool | int | float | str]:
    """Return the key of a setting, and the value that `text` is. Raises ConfigError for what no message can carry."""
    from starling.common.settings import parse_value, shown

    value = parse_value(text)
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{key} = {text}: give one number, one word, true or false")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ConfigError(f"{key} = {shown(value)} is out of range; give a smaller number")
    _check_text("KEY VALUE", f"{key} {text}")
    return key.replace("-", "_"), value


def checkpoint(folder: RunFolder = None, /, *, connection: Flags = NO_CONNECTION) -> int:
    """Save a state of a run before its next step, from which it can resume or another run begin."""
    from starling.common.wire.messages import RequestCheckpoint

    return ask(lambda request: RequestCheckpoint(request=request), folder, connection)


def stop(folder: RunFolder = None, /, *, connection: Flags = NO_CONNECTION) -> int:
    """Stop a run gracefully: finish the step, write a checkpoint."""
    from starling.common.wire.messages import RequestStop

    return ask(lambda request: RequestStop(request=request, reason=REASON), folder, connection)


def evaluate_run(num_completions: int, folder: Path | None, connection: Connection) -> int:
    """Evaluate the newest version of a run on its held-out prompts; `num_completions` 0: as in its recipe."""
    from starling.common.wire.messages import RequestEvaluation

    return ask(lambda request: RequestEvaluation(request=request, num_completions=num_completions), folder, connection)


def ask(message: Callable[[str], OperatorMessage], folder: Path | None, connection: Connection) -> int:
    """Send one request to the controller of a run and print the answer. Returns the exit code.

    Raises:
        StarlingError: there is no such run, or no answer.
    """
    import msgspec

    with open_client(folder, connection) as client:
        reply = client.ask(message(uuid.uuid4().hex), connection.timeout)
    if connection.json:
        print_json(msgspec.json.encode({"ok": reply.ok, "text": reply.text, **reply.data}).decode())
    elif reply.ok:
        print(reply.text)
    else:
        print(f"starling: {reply.text}", file=sys.stderr)
    return 0 if reply.ok else 1


def open_client(folder: Path | None, connection: Connection) -> OperatorClient:
    """Return a client of the controller of a run, to be closed. Raises StarlingError: there is no such run."""
    from starling.cli.run.attempt import OPERATOR
    from starling.common.net.operator import OperatorClient

    if not 0 < connection.timeout <= MAX_SECONDS:
        raise ConfigError(f"--timeout {connection.timeout:g} is not a number of seconds; give one above 0")
    _check_text("--controller", connection.controller)
    _check_text("--run", connection.run)
    address, key, run = controller_of(folder, connection)
    return OperatorClient(address, key, run, name=key.stem if key is not None else OPERATOR)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} {text!r} is not UTF-8; give another one") from None


def controller_of(folder: Path | None, connection: Connection) -> tuple[str, Path | None, str]:
    """Return address, key file and run id: as given, else from the run's folder. Raises StarlingError."""
    from starling.cli.run.attempt import OPERATOR, Attempt

    if connection.controller and connection.run:
        return connection.controller, connection.key, connection.run
    if (connection.controller or connection.run) and folder is None:
        raise ConfigError("give --controller and --run together (and --key), or the folder of a run")
    attempt = Attempt.find(folder)
    address = connection.controller or _address(attempt)
    run, curve = (connection.run, True) if connection.run else _identity(attempt)
    key = connection.key or (attempt.key(OPERATOR) if curve else None)
    return address, key, run


def _address(attempt: Attempt) -> str:
    from starling.cli.run.command import complete_sentence

    if attempt.is_over():
        if attempt.is_complete():
            raise NoAnswerError(complete_sentence(attempt))
        raise NoAnswerError(f"the run in {attempt.folder} is over; `starling run --resume {attempt.folder}` resumes it")
    try:
        address = attempt.read_address()["address"]
        if not isinstance(address, str):
            raise TypeError(address)
    except (ValueError, KeyError, TypeError, RecursionError):  # written before a power cut, and damaged by it
        raise UnreachableError(
            f"{attempt.address} is damaged; `starling run --resume {attempt.folder}` writes it again"
        ) from None
    except FileNotFoundError:
        raise UnreachableError(
            f"the controller of {attempt.folder} does not listen: it is starting, or was never started; try again, or "
            "give --controller"
        ) from None
    except OSError as error:
        raise UnreachableError(
            f"{attempt.address} cannot be read: {error.strerror}; restore it, or give --controller and --run"
        ) from None
    return address


def _identity(attempt: Attempt) -> tuple[str, bool]:
    """Return the id of a run that `starling run` started, and whether it uses CURVE."""
    if not attempt.config.exists():
        raise ConfigError(f"{attempt.folder} has no config.toml with the run's id; give --run ID")
    from starling.common.settings import read_toml

    config = read_toml(attempt.config)
    try:
        run, curve = config["run"]["id"], config["network"]["curve"]
        if not isinstance(run, str) or not isinstance(curve, bool):
            raise TypeError(run)
        return run, curve
    except (KeyError, TypeError):
        raise ConfigError(f"{attempt.config} does not have the run's id; restore it, or give --run ID") from None


status_command = define(
    "status", status, "[RUN_FOLDER] [OPTIONS]", "Examples:\n  starling status runs/quickstart\n  starling status --json"
)
why_command = define("why", why, "[RUN_FOLDER] [OPTIONS]", "Example:\n  starling why runs/quickstart")
set_command = define(
    "set",
    change_setting,
    "[RUN_FOLDER] KEY VALUE [OPTIONS]",
    "`docs/how-to/operate.md` lists the settings that may change.",
    "Example:\n  starling set runs/quickstart policy.optimizer.learning_rate 1e-6",
)
checkpoint_command = define(
    "checkpoint", checkpoint, "[RUN_FOLDER] [OPTIONS]", "Example:\n  starling checkpoint runs/quickstart"
)
stop_command = define("stop", stop, "[RUN_FOLDER] [OPTIONS]", "Example:\n  starling stop runs/quickstart")

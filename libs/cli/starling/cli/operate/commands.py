"""What an operator says to a run that goes on: `starling status`, `why`, `set`, `evaluate`, `stop`.

The controller answers all of them, in words and as data; nothing is guessed from files. Whoever has the run's folder
needs to give nothing else; for a controller elsewhere its address, an operator's key and the run's id do.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from starling.cli.run.attempt import OPERATOR, Attempt
from starling.common.errors import ConfigError, StarlingError, UnreachableError
from starling.common.net.operator import OperatorClient
from starling.common.settings import parse_value
from starling.common.wire.messages import ChangeSetting, OperatorMessage, QueryRun, RequestEvaluation, RequestStop

TIMEOUT_S = 10.0
REASON = "an operator asked for it"


class NoAnswerError(StarlingError):
    """The run is over, or the controller refused what was asked."""


def main(command: str, argv: Sequence[str]) -> int:
    """Say one thing to a run and print its answer. Raises StarlingError without one, or when it is a refusal."""
    known = parser_of(command).parse_args(list(argv))
    message = MESSAGES[command](known, uuid.uuid4().hex)
    address, key, run = _controller(known)
    name = key.stem if key is not None else OPERATOR
    with OperatorClient(address, key, run, name=name) as line:
        reply = line.ask(message, known.timeout)
    if known.json:
        print(msgspec.json.encode({"ok": reply.ok, "text": reply.text, **reply.data}).decode())
    elif reply.ok:
        print(reply.text)
    else:
        print(f"starling: {reply.text}", file=sys.stderr)
    return 0 if reply.ok else 1


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the command line of one command."""
    parser = argparse.ArgumentParser(
        prog=f"starling {command}", description=SUMMARY[command], epilog=EPILOG.get(command), allow_abbrev=False
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="runs/<name>/attempt-<n>, or runs/<name> for its newest attempt; without it, the newest below ./runs",
    )
    if command == "set":
        parser.add_argument("key", help="as in the recipe, for example policy.optimizer.learning_rate")
        parser.add_argument("value", help="the new value")
    if command == "evaluate":
        parser.add_argument(
            "--num-completions", type=int, default=0, metavar="N", help="of each prompt; without it, as in the recipe"
        )
    parser.add_argument("--controller", metavar="ADDRESS", help="tcp://host:port, instead of a folder")
    default = f"keys/{OPERATOR}.json"
    parser.add_argument(
        "--key", dest="key_file", type=Path, metavar="FILE", help=f"an operator's key; default: {default}"
    )
    parser.add_argument("--run", metavar="ID", help="the run's id, instead of a folder")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="most to wait for it")
    parser.add_argument("--json", action="store_true", help="print the answer as one JSON object")
    return parser


def _setting(known: argparse.Namespace, request: str) -> ChangeSetting:
    value = parse_value(known.value)
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{known.key} = {known.value}: give one number, one word, true or false")
    return ChangeSetting(request=request, key=known.key.replace("-", "_"), value=value)


MESSAGES: dict[str, Callable[[argparse.Namespace, str], OperatorMessage]] = {
    "status": lambda _, request: QueryRun(request=request, about="status"),
    "why": lambda _, request: QueryRun(request=request, about="why"),
    "set": _setting,
    "evaluate": lambda known, request: RequestEvaluation(request=request, num_completions=known.num_completions),
    "stop": lambda _, request: RequestStop(request=request, reason=REASON),
}
SUMMARY = {
    "status": "Print what a run is doing: its phase, its replicas, its groups.",
    "why": "Print what a run waits for, the root of it, and who waits on whom, for how long already.",
    "set": "Change a setting of a run that goes on, from its next step on.",
    "evaluate": "Evaluate the newest version on the held-out prompts, now.",
    "stop": "End a run in good order: the step in hand, then a checkpoint.",
}

EPILOG = {"evaluate": "With --model it is another command, a run of its own: starling evaluate --model DIR --help."}


def _controller(known: argparse.Namespace) -> tuple[str, Path | None, str]:
    """Return address, key file and run id: as given, else from the run's folder. Raises StarlingError."""
    if known.controller and known.run:
        return known.controller, known.key_file, known.run
    if (known.controller or known.run) and known.folder is None:
        raise ConfigError("give --controller and --run together (and --key), or the folder of a run")
    attempt = Attempt.find(known.folder)
    address = known.controller or _address(attempt)
    run, curve = (known.run, True) if known.run else _identity(attempt)
    key = known.key_file or (attempt.key(OPERATOR) if curve else None)
    return address, key, run


def _address(attempt: Attempt) -> str:
    if attempt.is_over():
        raise NoAnswerError(f"the run in {attempt.folder} is over; `starling run --resume {attempt.folder}` goes on")
    try:
        address: str = json.loads(attempt.address.read_text())["address"]
    except FileNotFoundError:
        raise UnreachableError(
            f"the controller of {attempt.folder} does not listen: it is starting, or was never started; try again, or "
            "give --controller"
        ) from None
    return address


def _identity(attempt: Attempt) -> tuple[str, bool]:
    """Return the id of a run that `starling run` began, and whether it uses CURVE."""
    try:
        config = tomllib.loads(attempt.config.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{attempt.folder} has no config.toml that tells the run's id; give --run ID") from None
    return config["run"]["id"], config["network"]["curve"]

"""`starling top`: the live view of a run in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from starling.cli.command_line import define
from starling.cli.operate.command import CONNECTION, Connection, RunFolder
from starling.common.errors import ConfigError, StarlingError

if TYPE_CHECKING:
    from starling.cli.runs.live import LiveRun
    from starling.cli.top.control import Operator


class NoTerminalError(StarlingError):
    """There is nothing to draw on."""


def top(
    folder: RunFolder = None,
    /,
    *,
    allow_control: Annotated[
        bool, Parameter(help="Let keys evaluate, save a state and change settings, each after a confirmation.")
    ] = False,
    telemetry: Annotated[
        str,
        Parameter(metavar="ADDRESS", group=CONNECTION, help="tcp://host:port of the telemetry, instead of a folder."),
    ] = "",
    observer_key: Annotated[
        Path | None, Parameter(metavar="FILE", group=CONNECTION, help="An observer's key, for --telemetry.")
    ] = None,
    controller: Annotated[
        str, Parameter(metavar="ADDRESS", group=CONNECTION, help="tcp://host:port, for an operator without a folder.")
    ] = "",
    key: Annotated[
        Path | None,
        Parameter(
            metavar="FILE", group=CONNECTION, help="An operator's key; by default keys/operator-0.json of the run."
        ),
    ] = None,
    run: Annotated[str, Parameter(metavar="ID", group=CONNECTION, help="The run's id, with --controller.")] = "",
) -> int:
    """Show a run live in this terminal: replicas, curves, evaluations, waits, events and completions."""
    check_terminal()
    live, name = _follow(folder, telemetry, observer_key)
    operator = _operator(live, folder, Connection(controller=controller, key=key, run=run))
    if allow_control and operator is None:
        raise ConfigError(
            "--allow-control needs an operator's key: give the folder of the run with keys/operator-0.json, or "
            "--controller, --run and --key"
        )
    from starling.cli.top.app import TopApp

    return TopApp(live, name, operator, allow_control=allow_control).run(mouse=False) or 0


def check_terminal() -> None:
    """Raise NoTerminalError unless this process has a terminal that can place its cursor."""
    from rich.console import Console

    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        raise NoTerminalError("top draws on a terminal, and this is none; `starling status RUN` prints the same once")
    if Console().is_dumb_terminal:
        raise NoTerminalError(
            "this terminal cannot place its cursor (TERM=dumb); set TERM, such as TERM=xterm-256color, or use "
            "`starling status RUN`"
        )


def _follow(folder: Path | None, telemetry: str, observer_key: Path | None) -> tuple[LiveRun, str]:
    """Return the run to follow and its name. Raises ConfigError when there is none, or its key cannot be used."""
    from starling.cli.run.attempt import Attempt
    from starling.cli.runs.feed import Telemetry
    from starling.cli.runs.live import LiveRun
    from starling.common.net.curve import load_key

    if telemetry:
        if observer_key is not None:
            load_key(observer_key)
        given = Telemetry(telemetry, observer_key)
        attempt = Attempt.find(folder) if folder is not None else None
        return LiveRun(attempt, given), attempt.folder.parent.name if attempt is not None else telemetry
    if observer_key is not None:
        raise ConfigError("--observer-key needs --telemetry ADDRESS; a run's folder has its observer's key")
    attempt = Attempt.find(folder)
    return LiveRun(attempt), f"{attempt.folder.parent.name}/{attempt.folder.name}"


def _operator(live: LiveRun, folder: Path | None, connection: Connection) -> Operator | None:
    """Return who asks the controller; None where no operator's key can be read."""
    from starling.cli.run.attempt import OPERATOR
    from starling.cli.top.control import Operator

    if connection.controller and connection.run:
        return Operator(None, connection)
    if live.attempt is None:
        return None
    try:
        (connection.key or live.attempt.key(OPERATOR)).read_bytes()
    except FileNotFoundError:
        return Operator(live.attempt.folder, connection) if not (live.attempt.folder / "keys").exists() else None
    except OSError:
        return None
    return Operator(live.attempt.folder, connection)


command = define(
    "top",
    top,
    "[RUN_FOLDER] [OPTIONS]",
    "Examples:\n  starling top runs/quickstart\n  starling top --allow-control\n"
    "  starling top --telemetry tcp://10.0.0.1:5556 --observer-key observer-0.json",
)

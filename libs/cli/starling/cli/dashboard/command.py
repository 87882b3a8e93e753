"""`starling dashboard`: serve a web page on runs, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from cyclopts import Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError

MAX_RUNS: Final = 8
DEFAULT_PORT: Final = 8642
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def dashboard(
    *runs: Annotated[
        Path, Parameter(help="Folders of up to 8 runs, or of attempts; by default the newest below ./runs.")
    ],
    host: Annotated[str, Parameter(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, Parameter(metavar="PORT", help="0 for a free one.")] = DEFAULT_PORT,
    allow_control: Annotated[
        bool,
        Parameter(help="Let the page evaluate, save, set, scale, drain and stop, with the operator's key of the run."),
    ] = False,
    key: Annotated[
        Path | None, Parameter(metavar="FILE", help="An operator's key; by default keys/operator-0.json of each run.")
    ] = None,
    token_file: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Keep the token in this file, made if need be; by default it is a new one."),
    ] = None,
    address_file: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Write the address with its token to this file, instead of printing it."),
    ] = None,
    allow_host: Annotated[
        tuple[str, ...],
        Parameter(metavar="NAME", negative_iterable=(), help="A host name by which the page may be reached as well."),
    ] = (),
) -> int:
    """Serve a web page on runs: topology, curves, completions, weights, waits and events, live."""
    from starling.cli.dashboard.serve import Options, serve

    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is no port; give one from 0 to 65535")
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs are given; name up to {MAX_RUNS}")
    return serve(
        Options(
            runs=runs,
            host=host,
            port=port,
            may_control=allow_control,
            key=key,
            token_file=token_file,
            address_file=address_file,
            names=allow_host,
        )
    )


command = define(
    "dashboard",
    dashboard,
    "[RUN ...] [OPTIONS]",
    "The page is protected by a token, which is part of the address that is printed.",
    "Examples:\n  starling dashboard runs/mine\n  starling dashboard runs/a runs/b --allow-control",
)

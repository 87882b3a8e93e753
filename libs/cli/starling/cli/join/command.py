"""The command `starling join`: obtain the settings of a run from its controller, then run the service of a role."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from starling.cli.command_line import define

USAGE = "tcp://HOST:PORT --role rollout --key FILE [OPTIONS] [--set KEY=VALUE ...]"
NOTES = """The key is all that this machine needs: `starling keys make FOLDER rollout-8` makes one where the run is.
The replica ends with the run, or when this process gets SIGTERM; its unfinished work then goes to others.

Examples:
  starling join tcp://10.0.0.1:5555 --role rollout --key rollout-8.json --gpus 4
  starling join tcp://10.0.0.1:5555 --role rollout --key keys --set rollout.num_slots=32"""
TIMEOUT_S = 60.0


def join(
    controller: Annotated[str, Parameter(name="ADDRESS", help="Address of the controller, tcp://HOST:PORT.")],
    /,
    *,
    role: Annotated[Literal["policy", "rollout", "reward", "teacher"], Parameter(help="What this replica is to be.")],
    key: Annotated[
        Path | None,
        Parameter(
            metavar="FILE",
            help="Key of this replica, which has its name; of a folder, the first of the role whose name is free. "
            "Only a run with network.curve = false needs none.",
        ),
    ] = None,
    name: Annotated[str, Parameter(help="Name of this replica; default: that of its key.")] = "",
    gpus: Annotated[
        int, Parameter(help="GPUs of this replica: the first that are visible, and vLLM's workers. 0: all, as set.")
    ] = 0,
    host: Annotated[
        str, Parameter(help="Address at which others reach this machine; default: that towards the controller.")
    ] = "",
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set", metavar="KEY=VALUE", help="Setting in place of the run's, for this replica; may repeat."
        ),
    ] = (),
    config: Annotated[tuple[Path, ...], Parameter(metavar="FILE", help="TOML with such settings; may repeat.")] = (),
    folder: Annotated[
        Path | None, Parameter(name="--dir", help="Folder of this replica's files; default: joined/NAME.")
    ] = None,
    replace: Annotated[
        bool, Parameter(help="Take the place of a replica of this name that is still connected.")
    ] = False,
    timeout: Annotated[float, Parameter(metavar="SECONDS", help="How long to look for the controller.")] = TIMEOUT_S,
) -> int:
    """Join a run in progress: obtain its settings from the controller, and serve as one more replica."""
    from starling.cli.join.joining import JoinRequest, prepare

    request = JoinRequest(
        controller=controller,
        role=role,
        key=key,
        name=name,
        num_gpus=gpus,
        host=host,
        settings=set_,
        configs=config,
        folder=folder,
        replaces=replace,
        timeout_s=timeout,
    )
    joining = prepare(request)
    for line in joining.notes:
        print(line)
    sys.stdout.flush()
    # The same process goes on as the service: whoever started it keeps its id, and signals reach the service.
    os.execve(sys.executable, [sys.executable, "-m", *joining.command], joining.environment)


command = define("join", join, USAGE, NOTES)

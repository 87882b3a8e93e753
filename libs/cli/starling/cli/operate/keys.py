"""`starling keys`: the CURVE keys of a run, and the role that each of them may play."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from starling.cli.command_line import define
from starling.common.errors import ConfigError

USAGE = """[make] FOLDER NAME ... [--replace]
       starling keys list FOLDER
       starling keys revoke FOLDER NAME ..."""
NOTES = """Examples:
  starling keys make run/keys policy-0 rollout-0 reward-0 operator-0
  starling keys revoke run/keys rollout-0"""
Folder = Annotated[Path, Parameter(help="The folder of the run's keys.")]


def make(
    folder: Folder,
    name: Annotated[str, Parameter(help="For example policy-0, rollout-0, reward-0 or operator-0.")],
    /,
    *names: str,
    replace: Annotated[bool, Parameter(help="Replace the key of a name that has one.")] = False,
) -> int:
    """Create a key for each name, in a new folder or in one that has keys."""
    from starling.common.net.keyring import list_keys, make_keys

    _check_folder(folder)
    make_keys(folder, [name, *names], replace=replace)
    print(f"made {_counted([name, *names])} in {folder}; it allows {len(list_keys(folder))} now")
    return 0


def show(folder: Folder, /) -> int:
    """List the names and roles whose keys are allowed."""
    from starling.common.net.keyring import list_keys

    _check_folder(folder)
    for entry in list_keys(folder):
        print(f"{entry.name:<16} {entry.role:<9} {entry.public} {entry.path or 'its key file is elsewhere'}")
    return 0


def revoke(
    folder: Folder, name: Annotated[str, Parameter(help="A name that `starling keys list` shows.")], /, *names: str
) -> int:
    """Revoke the keys of these names, also during the run."""
    from starling.common.net.keyring import revoke_keys

    _check_folder(folder)
    revoke_keys(folder, [name, *names])
    print(f"revoked {_counted([name, *names])}; a running controller drops them within a second")
    return 0


def _check_folder(folder: Path) -> None:
    """Raise ConfigError for the folder of a run or of an attempt: keys written there are none of the run's.

    The controller's key would become its `controller.json`, which has the address of the controller.
    """
    from starling.cli.run.attempt import newest_attempt

    keys = newest_attempt(folder) / "keys"
    if keys.is_dir():
        raise ConfigError(f"{folder} is the folder of a run, and its keys are in {keys}; give that")


def _counted(names: Sequence[str]) -> str:
    return f"the key of {names[0]}" if len(names) == 1 else f"{len(names)} keys"


command: App = define(
    "keys",
    make,
    USAGE,
    NOTES,
)  # `starling keys FOLDER NAME ...` makes keys
for _name, _action in (("make", make), ("list", show), ("revoke", revoke)):
    command.command(_action, name=_name)

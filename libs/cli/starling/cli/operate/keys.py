"""`starling keys`: who may speak in a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from starling.common.errors import ConfigError
from starling.common.net.keyring import list_keys, make_keys, revoke_keys

ACTIONS = ("make", "list", "revoke")


def main(argv: Sequence[str]) -> int:
    """Make, list or revoke keys. Raises ConfigError."""
    given = list(argv)
    if given and given[0] not in (*ACTIONS, "-h", "--help"):
        given.insert(0, "make")  # `starling keys FOLDER NAME ...`
    known = _parser().parse_args(given)
    folder: Path = known.folder
    if known.action == "make":
        make_keys(folder, known.names, replace=known.replace)
        print(f"made {_counted(known.names)} in {folder}; it allows {len(list_keys(folder))} now")
    elif known.action == "revoke":
        revoke_keys(folder, known.names)
        print(f"revoked {_counted(known.names)}; a running controller drops them within a second")
    else:
        for entry in list_keys(folder):
            print(f"{entry.name:<16} {entry.role:<9} {entry.public} {entry.path or 'its key file is elsewhere'}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser() -> _Parser:
    parser = _Parser(prog="starling keys", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="make | list | revoke")
    make = actions.add_parser("make", help="make a key for each name; a folder that has keys already gets more")
    make.add_argument("--replace", action="store_true", help="give a name that has a key a new one")
    show = actions.add_parser("list", help="show whose keys are allowed")
    revoke = actions.add_parser("revoke", help="allow the keys of these names no longer; also in a running job")
    for action in (make, show, revoke):
        action.add_argument("folder", type=Path, help="the folder of the run's keys")
    for action in (make, revoke):
        action.add_argument("names", nargs="+", help="for example policy-0 rollout-0 reward-0 operator-0")
    return parser


def _counted(names: Sequence[str]) -> str:
    return f"the key of {names[0]}" if len(names) == 1 else f"{len(names)} keys"

"""The command by which a replica on another machine joins the run: `starling join`."""

from __future__ import annotations

from typing import Final

from starling.cli.launch.interface import Placement

CONNECT_S: Final = 600
"""How long a replica looks for the controller after its start."""


def join_command(placement: Placement, key: str, folder: str, program: str = "starling") -> list[str]:
    """Return the words of `starling join` for a replica, with `key` and `folder` as the other machine sees them."""
    words = [program, "join", placement.controller, "--role", placement.role, "--key", key, "--dir", folder]
    words += ["--replace", "--timeout", str(CONNECT_S)]
    if placement.num_gpus:
        words += ["--gpus", str(placement.num_gpus)]
    for setting in placement.settings:
        name, equals, value = setting.removeprefix("--").partition("=")
        words += ["--set", f"{name.replace('-', '_')}={value if equals else 'true'}"]
    return words


def service_command(placement: Placement, address: str, program: str = "starling") -> list[str]:
    """Return the words of a policy's service: its states belong into the run's folder, which its node has to see.

    `address` stands for that of its node.
    """
    return [program, placement.role, *placement.arguments, f"--network.host={address}"]

"""The services as commands: each runs in this process, without the import of any other.

This package needs none of them to be installed to know their names.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from starling.common.errors import ConfigError
from starling.common.importing import without_modules

SERVICES: Final = {
    **{role: f"starling.{role}.shell.main" for role in ("controller", "policy", "rollout", "reward")},
    "teacher": "starling.rollout.shell.teacher",  # it shares the rollout's distribution, and its dependencies
}
"""Commands that parse their own command line, by the module that runs them."""


def run_module(command: str, argv: Sequence[str]) -> int:
    """Run a service in this process. Returns its exit code.

    Raises:
        ConfigError: its distribution is not installed.
    """
    part = SERVICES[command].split(".")[1]
    if not is_installed(part):
        raise ConfigError(missing(command, part))
    sys.argv = [f"starling {command}", *argv]
    with without_modules("rich"):  # which structlog imports for tracebacks that no service prints
        importlib.import_module("structlog")
    try:
        runpy.run_module(SERVICES[command], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def is_installed(part: str) -> bool:
    """Return whether the distribution ``starling-<part>`` is installed."""
    return importlib.util.find_spec(f"starling.{part}") is not None


def missing(command: str, part: str) -> str:
    """Return the sentence about a command whose distribution is not installed."""
    return f"starling {command} is not installed here; install the distribution starling-{part}"

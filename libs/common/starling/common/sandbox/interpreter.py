"""Python interpreter of an environment of its own, and what a sandbox must show for it to start."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from starling.common.errors import ConfigError
from starling.common.settings import environment_variables

OLDEST: Final = (3, 11)
_ANSWER_S: Final = 30.0
_MOST_LINKS: Final = 40
_ASK: Final = (
    "import json, sys; print(json.dumps([list(sys.version_info[:2]), sys.executable, [sys.prefix, sys.exec_prefix, "
    "sys.base_prefix, sys.base_exec_prefix]]))"
)


class Interpreter(NamedTuple):
    """One interpreter."""

    path: str
    """Of the program; in a virtual environment of a link, which says which environment it is."""
    prefixes: tuple[str, ...]
    """Folders of the environment and of the installation that it is based on."""
    links: tuple[str, ...]
    """Paths through which `path` leads to the program."""


@cache
def find_interpreter(path: Path) -> Interpreter:
    """Return the interpreter at an absolute path. It is run once, without anything that its environment installs.

    Raises:
        ConfigError: it cannot be run, or is too old.
    """
    try:
        version, program, prefixes = _ask(path)
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"python is {str(path)!r}, which cannot be run as a Python interpreter ({_reason(error)}): name the "
            "program of an environment, as `/opt/judge/.venv/bin/python`."
        ) from None
    if version < OLDEST:
        raise ConfigError(
            f"python is {str(path)!r}, a Python {version[0]}.{version[1]}, and workers need {OLDEST[0]}.{OLDEST[1]} or "
            f"later: make the environment anew, for example with `uv venv --python {OLDEST[0]}.{OLDEST[1]}`."
        )
    # Only with its site, which is not run here, does Python before 3.14 know of a virtual environment.
    environments = [str(place) for place in program.parents[:2] if (place / "pyvenv.cfg").is_file()]
    return Interpreter(str(program), tuple(dict.fromkeys([*environments, *prefixes])), _links(program))


def _ask(path: Path) -> tuple[tuple[int, int], Path, list[str]]:
    """Return the version of an interpreter, its program, which a script may start, and its prefixes."""
    command = [str(path), "-I", "-S", "-c", _ASK]
    variables = environment_variables(["LD_LIBRARY_PATH"])
    found = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, env=variables, check=True
    )
    (major, minor), program, prefixes = json.loads(found.stdout)
    return (int(major), int(minor)), Path(program), [str(prefix) for prefix in prefixes]


def _reason(error: Exception) -> str:
    match error:
        case OSError():
            return error.strerror or type(error).__name__
        case subprocess.TimeoutExpired():
            return f"it took longer than {_ANSWER_S:g} s"
        case subprocess.CalledProcessError():
            return f"it ended with {error.returncode}"
    return "it does not answer as one"


def _links(path: Path) -> tuple[str, ...]:
    """Return each path through which a link leads to a file, from the link itself to the file."""
    found = [str(path)]
    while os.path.islink(found[-1]) and len(found) < _MOST_LINKS:
        found.append(os.path.join(os.path.dirname(found[-1]), os.readlink(found[-1])))
    return tuple(map(os.path.normpath, found))

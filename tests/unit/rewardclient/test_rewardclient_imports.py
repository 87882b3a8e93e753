"""The reward client is for any trainer: it imports neither the service nor torch, and little else."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

NEVER = (
    "torch",
    "transformers",
    "zmq",
    "structlog",
    "pydantic",
    "fastapi",
    "uvicorn",
    "starling.reward",
    "starling.algo",
)
"""Neither may be imported, nor need be installed."""
PROGRAM = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # its import fails, as if it were not installed
from importlib import import_module
from pkgutil import walk_packages
package = import_module("starling.rewardclient")
modules = [one.name for one in walk_packages(package.__path__, "starling.rewardclient.")]
for name in modules:
    import_module(name)
print(*sorted(name for name in sys.modules if name.startswith("starling.common.")))
print(*modules)
"""


@pytest.fixture(scope="module")
def imported() -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, ",".join(NEVER)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_client_imports_without_the_service(imported: list[list[str]]) -> None:
    assert "starling.rewardclient.blocking" in imported[1]


def test_client_needs_only_errors_of_the_common_library(imported: list[list[str]]) -> None:
    assert imported[0] == ["starling.common.errors"]


def test_client_needs_few_packages() -> None:
    names = sorted(Requirement(text).name for text in requires("starling-rewardclient") or ())
    assert names == ["httpx2", "msgspec", "numpy", "starling-common"]

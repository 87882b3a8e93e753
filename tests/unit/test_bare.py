"""The pure packages import in an interpreter without third-party and I/O modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = ("zmq", "torch", "transformers", "structlog", "asyncio", "ucxx", "pydantic")
PURE = (
    "starling.controller.core",
    "starling.rollout.core",
    "starling.reward.core",
    "starling.policy.core",
    "starling.common.wire",
    "starling.common.leases",
    "starling.common.ids",
    "starling.common.kinds",
    "starling.common.errors",
    "starling.weightsync.plan.layout",
    "starling.weightsync.plan.planner",
    "starling.weightsync.offers.offer",
    "starling.algo.advantage",
    "starling.algo.algorithm",
    "starling.algo.media",
    "starling.algo.staleness",
    "starling.algo.packing",
    "starling.sim",
)
IMPORT_ALL = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None  # its import fails, as if it were not installed
from importlib import import_module
from pkgutil import walk_packages
package = import_module(sys.argv[1])
modules = [m.name for m in walk_packages(getattr(package, "__path__", ()), f"{sys.argv[1]}.")]
for module in modules:
    import_module(module)
print(1 + len(modules))
"""


def import_bare(package: str, *, missing: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Import a package and all its modules in a fresh interpreter without the modules `missing`."""
    command = [sys.executable, "-c", IMPORT_ALL, package, ",".join(missing)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("package", PURE)
def test_pure_modules_import_in_a_bare_interpreter(package: str) -> None:
    done = import_bare(package, missing=MISSING)
    assert done.returncode == 0, done.stderr
    at_least = 2 if package.endswith((".core", ".wire")) else 1
    assert int(done.stdout) >= at_least, "no modules of the package were found"


def test_bare_interpreter_lacks_the_missing_modules() -> None:
    """A module that needs a missing module does not import."""
    assert "ModuleNotFoundError: import of zmq halted" in import_bare("starling.common.net", missing=("zmq",)).stderr
    assert "import of torch halted" in import_bare("starling.algo.loss", missing=("torch",)).stderr

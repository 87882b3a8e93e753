"""The locked file: complete, pinned, hashed, and without addresses."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKED = ROOT / "constraints.locked.txt"
MEMBERS = ("starling-cli", "starling-rewardclient", "starling-sim")
"""Together they need all others."""
LINE = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.+]*)((?: --hash=sha256:[0-9a-f]{64})+)")


def locked() -> dict[str, str]:
    """Return the version of each locked package."""
    lines = [line for line in LOCKED.read_text().splitlines() if not line.startswith("#")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), [line for line, match in zip(lines, matches, strict=True) if match is None]
    return {match[1]: match[2] for match in matches if match is not None}


def needed(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Add the installed packages that a package needs, with their extras, to `found`."""
    if extras <= found.get(name, frozenset()) and name in found:
        return
    found[name] = found.get(name, frozenset()) | extras
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        environments = [{**default_environment(), "extra": extra} for extra in ("", *found[name])]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in environments):
            needed(canonicalize_name(requirement.name), frozenset(requirement.extras), found)


def test_locked_file_names_versions_and_hashes_only() -> None:
    assert len(locked()) > 50
    assert "://" not in LOCKED.read_text()
    assert "index" not in LOCKED.read_text()


def test_locked_versions_are_those_of_the_constraints() -> None:
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    constraints = {canonicalize_name(name): version for name, version in pins}
    differ = {name: version for name, version in locked().items() if constraints.get(name, version) != version}
    assert differ == {"torch": f"{constraints['torch']}+cpu"}


def test_locked_file_has_all_that_the_members_need() -> None:
    found: dict[str, frozenset[str]] = {}
    for member in MEMBERS:
        needed(member, frozenset(), found)
    names = {name for name in found if not name.startswith("starling-")}
    gpu = {name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))}
    assert names - gpu - set(locked()) == set()


def test_locked_install_takes_nothing_without_a_hash() -> None:
    command = ["make", "--dry-run", "--always-make", "demo", "INSTALL=locked"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in shown.splitlines() if "uv pip install" in line]
    assert len(installs) == 3
    assert "--constraint constraints.locked.txt --only-binary :all:" in installs[0]
    assert "--require-hashes --no-deps --no-build-isolation --requirement constraints.locked.txt" in installs[1]
    assert "--no-deps --no-build-isolation --editable libs/common" in installs[2]

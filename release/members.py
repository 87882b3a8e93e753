"""The members of the repository and the one version of all of them, which is that of release/version.txt.

usage: python release/members.py [NEW_VERSION]     print the version, or write a new one to all members
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
VERSION = ROOT / "release/version.txt"
_LINE = re.compile(r'^version = "[^"]*"$', re.MULTILINE)


class ReleaseError(Exception):
    """No release can be made; the text says why, and what to do."""


def manifests(root: Path = ROOT) -> list[Path]:
    """Return the pyproject.toml of every member below `root`."""
    return sorted([*root.glob("libs/*/pyproject.toml"), *root.glob("services/*/pyproject.toml")])


def project(manifest: Path) -> dict[str, Any]:
    """Return the table [project] of a member."""
    found: dict[str, Any] = tomllib.loads(manifest.read_text())["project"]
    return found


def version(root: Path = ROOT) -> str:
    """Return the version. Raises ReleaseError when a member has another one."""
    expected = (root / VERSION.relative_to(ROOT)).read_text().strip()
    for manifest in manifests(root):
        found = project(manifest)["version"]
        if found != expected:
            raise ReleaseError(
                f"{manifest.relative_to(root)} has version {found}, and {VERSION.relative_to(ROOT)} has {expected}; "
                f"`python release/members.py {expected}` writes the latter to all members"
            )
    return expected


def set_version(text: str, root: Path = ROOT) -> None:
    """Write a version to release/version.txt and to all members. Raises ReleaseError for one that is not of PEP 440."""
    try:
        new = str(Version(text))
    except InvalidVersion:
        raise ReleaseError(f"{text!r} is no version; give one such as 0.2.0 or 0.2.0rc1") from None
    for manifest in manifests(root):
        changed, num = _LINE.subn(f'version = "{new}"', manifest.read_text(), count=1)
        if num != 1:
            raise ReleaseError(f"{manifest.relative_to(root)} has no line `version = ...`; add one below its name")
        manifest.write_text(changed)
    (root / VERSION.relative_to(ROOT)).write_text(f"{new}\n")


def main(arguments: list[str]) -> int:
    """Print or set the version. Returns the exit code."""
    try:
        if arguments:
            set_version(arguments[0])
        print(version())
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Locked file of `make demo INSTALL=locked`: every package that the members need, with the hashes of its files.

usage: python release/lock.py [OPTIONS OF UV]      resolve under constraints.txt, and write constraints.locked.txt

The file holds names, versions and hashes, and no addresses: whichever index or folder serves a file, its bytes must be
these. It describes CPython 3.11 on Linux x86-64 with the CPU build of torch. Of a package that has a wheel for that
platform only wheels are locked, because installing them runs no code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
LOCKED = ROOT / "constraints.locked.txt"
RESOLVE_S = 1800
"""Longest time uv may take to resolve all packages."""
PYTHON, MACHINE, GLIBC = (3, 11), "x86_64", 28
"""Platform of the locked file: glibc 2.28 is that of the wheel of torch."""
BUILD = ("uv", "hatchling", "editables", "setuptools")
"""What installs and builds the members, and packages without a wheel: not isolated, so that all of it is locked."""
HEADER = f"""\
# Names, versions and hashes of `make demo INSTALL=locked`, written by `make lock`.
# CPython {PYTHON[0]}.{PYTHON[1]}, Linux {MACHINE}, CPU build of torch: other builds of torch have other hashes,
# and need a locked file of their own.
"""


class LockedPackage(NamedTuple):
    """One package."""

    name: str
    version: str
    hashes: tuple[str, ...]
    """SHA-256 of the files that may be installed, as hexadecimal digits."""


def tags() -> frozenset[Tag]:
    """Return the tags of wheels that the platform of the locked file accepts."""
    platforms = [f"manylinux_2_{minor}_{MACHINE}" for minor in range(GLIBC, 4, -1)]
    platforms += [f"manylinux{year}_{MACHINE}" for year in (2014, 2010, 1)]
    return frozenset(cpython_tags(PYTHON, platforms=platforms)) | frozenset(
        compatible_tags(PYTHON, platforms=platforms)
    )


def resolve(options: list[str]) -> list[LockedPackage]:
    """Resolve the members under constraints.txt with uv, which gets further options."""
    with tempfile.TemporaryDirectory() as folder:
        build, out = Path(folder) / "build.in", Path(folder) / "pylock.toml"
        build.write_text("\n".join(BUILD))
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--format", "pylock.toml"]
        uv += ["--python-version", ".".join(map(str, PYTHON)), "--python-platform", f"{MACHINE}-manylinux_2_{GLIBC}"]
        uv += ["--constraint", "constraints.txt", "--output-file", str(out), *options]
        command = [*uv, "libs/cli/pyproject.toml", str(build)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=RESOLVE_S)
        return list(packages_of(tomllib.loads(out.read_text())))


def packages_of(lock: dict[str, Any]) -> Iterator[LockedPackage]:
    """Yield the packages of a pylock.toml, without the members."""
    accepted = tags()
    for package in lock["packages"]:
        if "directory" in package:
            continue
        wheels = [file for file in package.get("wheels", ()) if parse_wheel_filename(_file(file))[3] & accepted]
        files = wheels or [package["sdist"]]
        hashes = tuple(sorted({file["hashes"]["sha256"] for file in files}))
        yield LockedPackage(canonicalize_name(package["name"]), package["version"], hashes)


def _file(entry: dict[str, Any]) -> str:
    """Return the name of a file."""
    return unquote(entry.get("name") or (entry.get("url") or entry["path"]).rpartition("/")[2])


def render(packages: list[LockedPackage]) -> str:
    """Return the locked file."""
    lines = [HEADER]
    for package in sorted(packages):
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in package.hashes)
        lines.append(f"{package.name}=={package.version} {hashes}\n")
    return "".join(lines)


def read(path: Path = LOCKED) -> list[LockedPackage]:
    """Return the packages of a locked file."""
    packages = []
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement, *options = line.split()
            name, _, version = requirement.partition("==")
            hashes = tuple(option.removeprefix("--hash=sha256:") for option in options)
            packages.append(LockedPackage(name, version, hashes))
    return packages


if __name__ == "__main__":
    LOCKED.write_text(render(resolve(sys.argv[1:])))
    print(f"{LOCKED.name}: {len(read())} packages", file=sys.stderr)

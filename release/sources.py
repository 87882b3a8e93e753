"""The files that a release is built of: a copy of the members, completed for people who have no repository.

Only files that git tracks are copied, so that nothing of a working folder gets into a release. Each member gets the
licence and a README, and needs the other members in exactly its own version. `starling-rl` is made here: it needs all
members that a run has, and has an extra for each of theirs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from members import ROOT, manifests, project

META = "starling-rl"
NOT_RUN = ("starling-sim",)
"""Members that no run has: `starling-rl` does not need them."""
INCLUDED = ("torch", "lora", "ucx")
"""Extras of members that all runs have."""
_MEMBER = re.compile(r'"(starling-[a-z]+)(\[[a-z0-9,-]+\])?"')


def copy_sources(folder: Path, version: str) -> list[str]:
    """Copy the members into `folder` and add `starling-rl`. Returns their folders, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "libs", "services", "LICENSE", f"release/{META}"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    found = manifests(folder)
    members = [project(manifest) for manifest in found]
    meta = folder / "release" / META / "pyproject.toml"
    meta.write_text(meta_manifest(members, version))
    for manifest, member in zip(found, members, strict=True):
        _complete(manifest, member, version)
    for manifest in (*found, meta):
        shutil.copy(folder / "LICENSE", manifest.with_name("LICENSE"))
    return [str(manifest.parent.relative_to(folder)) for manifest in (*found, meta)]


def _complete(manifest: Path, member: dict[str, Any], version: str) -> None:
    """Give a member a README, and its dependencies on other members their version."""
    text = _MEMBER.sub(lambda match: f'"{match[1]}{match[2] or ""}=={version}"', manifest.read_text())
    text = text.replace(f'name = "{member["name"]}=={version}"', f'name = "{member["name"]}"')
    if "readme" not in member:
        readme = f"# {member['name']}\n\n{member['description']}\n\nA part of Starling: `pip install {META}`.\n"
        manifest.with_name("README.md").write_text(readme)
        text = text.replace("\nlicense = ", '\nreadme = "README.md"\nlicense = ', 1)
    manifest.write_text(text)


def meta_manifest(members: Iterable[dict[str, Any]], version: str) -> str:
    """Return the pyproject.toml of `starling-rl`."""
    run = [member for member in members if member["name"] not in NOT_RUN]
    extras: dict[str, list[str]] = defaultdict(list)
    for member in run:
        for extra in member.get("optional-dependencies", {}):
            if extra not in INCLUDED:
                extras[extra].append(f"{member['name']}[{extra}]=={version}")
    pins = [f"{member['name']}=={version}" for member in run]
    lines = [
        "[project]",
        f'name = "{META}"',
        f'version = "{version}"',
        'description = "Reinforcement learning for large models: the `starling` command and all services of a run."',
        'readme = "README.md"',
        'license = "Apache-2.0"',
        'requires-python = ">=3.11"',
        f"dependencies = {_array(pins)}",
        "",
        "[project.optional-dependencies]",
        *(f"{extra} = {_array(needed)}" for extra, needed in sorted(extras.items())),
        "",
        "[build-system]",
        'requires = ["hatchling"]',
        'build-backend = "hatchling.build"',
        "",
        "[tool.hatch.build.targets.wheel]",
        "bypass-selection = true",
        "",
    ]
    return "\n".join(lines)


def _array(items: Iterable[str]) -> str:
    quoted = ", ".join(f'"{item}"' for item in items)
    return f"[{quoted}]"

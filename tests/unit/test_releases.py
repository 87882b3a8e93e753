"""Releases: one version, dependencies on exactly it, an extra for each of the members', and a changelog."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "release"))

from members import ReleaseError, manifests, project, set_version, version  # noqa: E402
from sources import INCLUDED, copy_sources, meta_manifest  # noqa: E402

INSTALLED_ALREADY = {"starling-weightsync": {"ucx", "lora", "torch"}, "starling-algo": {"torch"}}
"""Extras that other members need anyway."""


def copied(folder: Path) -> Path:
    """Copy what has a version."""
    for file in (*manifests(), ROOT / "release/version.txt"):
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return folder


def test_members_have_the_version_of_one_file() -> None:
    assert version() == (ROOT / "release/version.txt").read_text().strip()


def test_new_version_is_written_to_all_members(tmp_path: Path) -> None:
    root = copied(tmp_path)
    set_version("2.0rc1", root)
    assert version(root) == "2.0rc1"
    assert {project(manifest)["version"] for manifest in manifests(root)} == {"2.0rc1"}
    before = (ROOT / "libs/common/pyproject.toml").read_text()
    assert (root / "libs/common/pyproject.toml").read_text() == before.replace(f'"{version()}"', '"2.0rc1"', 1)


def test_member_of_another_version_is_named(tmp_path: Path) -> None:
    root = copied(tmp_path)
    file = root / "services/reward/pyproject.toml"
    file.write_text(file.read_text().replace('version = "', 'version = "9', 1))
    with pytest.raises(ReleaseError, match=r"services/reward/pyproject.toml has version 9.*members.py .* writes"):
        version(root)
    with pytest.raises(ReleaseError, match="is no version; give one such as"):
        set_version("1.x", root)


def test_changelog_has_sections_for_the_version_and_for_what_comes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.*?)\]", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", version()]
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def needed(members: list[dict[str, Any]], name: str) -> set[str]:
    return {extra for one in members if one["name"] == name for extra in one.get("optional-dependencies", {})}


def test_starling_rl_needs_the_members_of_a_run_and_has_their_extras() -> None:
    members = [project(manifest) for manifest in manifests()]
    meta = tomllib.loads(meta_manifest(members, "1.2"))["project"]
    names = {member["name"] for member in members} - {"starling-sim"}
    assert set(meta["dependencies"]) == {f"{name}==1.2" for name in names}
    offered = {text for needs in meta["optional-dependencies"].values() for text in needs}
    own = {
        f"{name}[{extra}]==1.2"
        for name in names
        for extra in needed(members, name) - INSTALLED_ALREADY.get(name, set())
    }
    assert offered == own
    assert {extra for extras in INSTALLED_ALREADY.values() for extra in extras} == set(INCLUDED)


def test_released_members_need_each_other_in_one_version_and_have_the_licence(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a release is made of the files that git tracks")
    folders = copy_sources(tmp_path, "1.2")
    assert {"libs/common", "services/policy", "release/starling-rl"} <= set(folders)
    for folder in map(tmp_path.joinpath, folders):
        member = project(folder / "pyproject.toml")
        extras = [text for needs in member.get("optional-dependencies", {}).values() for text in needs]
        own = [text for text in (*member["dependencies"], *extras) if text.startswith("starling-")]
        assert all(text.endswith("==1.2") for text in own), own
        assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        assert (folder / member["readme"]).read_text().startswith("# ")
    assert not list(tmp_path.rglob("__pycache__"))
    listed = subprocess.run(["git", "ls-files", "libs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all((tmp_path / name).exists() for name in listed.splitlines() if (ROOT / name).exists())

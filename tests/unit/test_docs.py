"""Links, files, modules and settings in the documentation exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import shards

from starling.cli.recipe.schema import Recipe
from starling.common.settings import iter_settings

ROOT = Path(__file__).parents[2]
FILES = sorted(shards.tracked_files())
PAGES = [name for name in FILES if name.endswith(".md")]
SETTINGS = {one.key for one in iter_settings(Recipe)}
SECTIONS = {".".join(key.split(".")[:end]) for key in SETTINGS for end in range(1, key.count(".") + 1)}
MEMBERS = ("common", "weightsync", "algo", "rewardclient", "cli", "sim", "controller", "policy", "rollout", "reward")


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_existing_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s#]+)", (ROOT / page).read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    """`controller/core/machine.py` is relative to the member's folder; other paths start at the root."""
    for name in re.findall(r"`([\w./-]+\.py)`", (ROOT / page).read_text()):
        if "/" in name and not name.startswith("path/"):
            assert any(file == name or file.endswith(f"/{name}") for file in FILES), f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_named_dotted_modules_exist(page: str) -> None:
    for name in re.findall(rf"`(starling\.(?:{'|'.join(MEMBERS)})(?:\.[a-z_0-9]+)*)`", (ROOT / page).read_text()):
        path = name.replace(".", "/")
        parent = path.rsplit("/", 1)[0]
        found = any(file.endswith((f"/{path}.py", f"/{path}/__init__.py", f"/{parent}.py")) for file in FILES)
        assert found, f"{page} names {name}"


@pytest.mark.parametrize("page", PAGES)
def test_named_settings_exist(page: str) -> None:
    """A setting is `section.key`, alone or with a value, or `--section.key` with hyphens."""
    text = (ROOT / page).read_text()
    names = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:`| = )", text)
    flags = [flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+(?:\.[a-z0-9-]+)+)", text)]
    for name in [*names, *flags]:
        is_file = name.endswith((".json", ".md", ".png", ".py", ".toml"))
        if name.partition(".")[0] in SECTIONS and not is_file and name != "model.generate":
            assert name in SETTINGS | SECTIONS, f"{page} names {name}"

"""The reference page of the command line."""

from __future__ import annotations

import re
from pathlib import Path

from starling.cli.app import GROUPS
from starling.cli.main import main
from starling.cli.reference import PATH, reference
from starling.cli.services import SERVICES

ROOT = Path(__file__).parents[3]


def test_page_is_up_to_date() -> None:
    assert (ROOT / PATH).read_text() == reference(), "run python -m starling.cli.reference"


def test_page_has_every_command() -> None:
    text = (ROOT / PATH).read_text()
    for commands in GROUPS.values():
        for name, _, _ in commands:
            pattern = rf"^- `starling {name}`: " if name in SERVICES else rf"^### starling {name}$"
            assert re.search(pattern, text, re.MULTILINE), name
    for more in ("rollout --only", "policy --replay", "keys make", "keys list", "keys revoke"):
        assert f"### starling {more}\n" in text


def test_commands_in_the_documentation_exist() -> None:
    """Every `starling COMMAND` of README and docs is one of the commands; `starling reward-0` is a service's line."""
    known = {name for commands in GROUPS.values() for name, _, _ in commands} | {"COMMAND"}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    commands = [
        (page.name, match[1])
        for page in pages
        for match in re.finditer(r"(?:`|^\$ |^ {2,4})starling ([a-z][a-z-]*+)(?!\d)", page.read_text(), re.MULTILINE)
    ]
    assert len(commands) > 50
    assert [(page, name) for page, name in commands if name not in known] == []


def test_exit_code_of_help_is_zero() -> None:
    for commands in GROUPS.values():
        for name, _, _ in commands:
            if name not in SERVICES:
                assert main([name, "--help"]) == 0

"""A recipe in the making: its settings, and notes on those that a user has to look at."""

from __future__ import annotations

from typing import Any

from starling.cli.settings.template import toml_value
from starling.common.observe.terminal import printable
from starling.common.settings import Tree

ORDER = (
    "run",
    "launch",
    "model",
    "data",
    "sft",
    "preference",
    "rl",
    "sampling",
    "evaluation",
    "policy",
    "rollout",
    "weights",
    "teacher",
    "reward",
    "controller",
    "logging",
)
"""Sections of a recipe, in the order in which they are written."""


class Draft:
    """Settings of a recipe with comments. A later value of a setting replaces an earlier one."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.notes: list[tuple[str, str]] = []
        """What to look at: setting and sentence, in the order of the translation."""

    def set(self, path: str, value: Any, note: str = "") -> None:
        """Set one setting. `note`: why it needs attention; one sentence."""
        *sections, name = path.split(".")
        below = self.tree
        for section in sections:
            below = below.setdefault(section, {})
        below[name] = value
        if note:
            self.note(path, note)

    def add(self, path: str, item: Tree, note: str = "") -> None:
        """Add a table to a list of tables, as one of `reward.scorers`."""
        section, _, name = path.rpartition(".")
        items = self.tree.setdefault(section, {}).setdefault(name, [])
        items.append(item)
        if note:
            self.note(f"{path}.{len(items) - 1}", note)

    def get(self, path: str, default: Any = None) -> Any:
        """Return a value that was set before."""
        found: Any = self.tree
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return default if found is None else found

    def note(self, path: str, text: str) -> None:
        """Say what a user has to look at, at a setting of the recipe or a section."""
        self.notes.append((path, printable(" ".join(text.split()))))  # a comment has one line

    def text(self, heading: str) -> str:
        """Return the recipe as TOML that begins with the comment `heading`; each note stands above its setting."""
        lines = [f"# {line}".rstrip() for line in heading.splitlines()]
        for section in sorted(self.tree, key=ORDER.index):
            lines += self._section(section, self.tree[section])
        return "\n".join(lines) + "\n"

    def _section(self, path: str, values: Tree) -> list[str]:
        tables = {name: value for name, value in values.items() if _is_section(path, name, value)}
        lists = {name: value for name, value in values.items() if _is_tables(value)}
        plain = {name: value for name, value in values.items() if name not in tables and name not in lists}
        notes = self._comments(path)
        lines = ["", *notes, f"[{path}]"] if plain or notes else []
        for name, value in plain.items():
            lines += [*self._comments(f"{path}.{name}"), f"{name} = {toml_value(value)}"]
        for name, value in tables.items():
            lines += self._section(f"{path}.{name}", value)
        for name, items in lists.items():
            for number, item in enumerate(items):
                lines += ["", *self._comments(f"{path}.{name}.{number}"), f"[[{path}.{name}]]"]
                lines += [f"{key} = {toml_value(value)}" for key, value in item.items()]
        return lines

    def _comments(self, path: str) -> list[str]:
        return [f"# CHECK: {text}" for where, text in self.notes if where == path]


def _is_section(path: str, name: str, value: Any) -> bool:
    """Say whether a table is a section; those whose keys a user chooses are values."""
    return isinstance(value, dict) and name not in ("rates", "rank_pattern", "alpha_pattern", "engine_args", "options")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)

"""The reference page of the command line, written from the commands: ``python -m starling.cli.reference``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from cyclopts import App
from rich.console import Console

from starling.cli.app import GROUPS, make_app
from starling.cli.command_line import PROGRAMS
from starling.cli.services import SERVICES

PATH: Final = Path("docs/reference/cli.md")
WIDTH: Final = 100
INTRODUCTION: Final = """\
# The command line

Written by `python -m starling.cli.reference`: the help of every command, as `starling COMMAND --help` prints it.
`starling settings WORD ...` searches the settings of all services, and `starling settings --toml` writes all of them
as a recipe.

Every setting of a recipe can be given as a flag (`--rl.group-size 16`) to `run`, `smoke`, `scratch`, `evaluate
--model`, `infer`, `serve`, `rollout --only` and `policy --replay`. Files stack, then the environment
(`STARLING_RL__GROUP_SIZE=16`), then flags. Exit codes: 0; 1 when a command or a run failed; 2 for a wrong command line
or setting; 130 after Ctrl-C.
"""
SERVICE_NOTE: Final = """\
Each service also has a command of its own (`starling-reward`), for machines that have only its distribution. `--help`
shows its flags and settings:

"""
FORMS: Final = {"policy": "policy-replay", "rollout": "rollout-only"}
"""Services that are also a command of another kind, with one of their flags."""
SUBCOMMANDS: Final = {"keys": ("make", "list", "revoke"), "deploy": ("systemd", "slurm", "lepton")}


def reference() -> str:
    """Return the page as Markdown."""
    app, parts = make_app(), [INTRODUCTION]
    for group, commands in GROUPS.items():
        parts.append(f"\n## {group}\n")
        if all(name in SERVICES for name, _, _ in commands):
            parts.append(SERVICE_NOTE + "".join(f"- `starling {name}`: {text}\n" for name, _, text in commands))
        for name, _, _ in commands:
            first = FORMS.get(name, "" if name in SERVICES else name)
            paths: list[tuple[str, ...]] = [(first,)] if first else []
            paths += [(name, below) for below in SUBCOMMANDS.get(name, ())]
            parts += [f"\n### {_title(path)}\n\n```text\n{_help(app, path)}\n```\n" for path in paths]
    return "".join(parts)


def _title(path: tuple[str, ...]) -> str:
    return " ".join(("starling", *(PROGRAMS.get(word, word) for word in path)))


def _help(app: App, path: tuple[str, ...]) -> str:
    out = io.StringIO()
    app.help_formatter = "plain"
    app.help_print(path, console=Console(file=out, width=WIDTH, color_system=None))
    lines = [line.rstrip() for line in out.getvalue().strip().splitlines()]
    return "\n".join(line for line, before in zip(lines, ["", *lines], strict=False) if line or before)


if __name__ == "__main__":
    PATH.write_text(reference())

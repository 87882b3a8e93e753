"""Tables of the page on migration, written from the tables of settings: ``python -m starling.cli.migrate.page``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from starling.cli.migrate.settings import Form, Outcome, Setting, table

PATH: Final = Path("docs/how-to/migrate-from-cosmos-rl.md")
BEGIN: Final = "<!-- Below: written by `python -m starling.cli.migrate.page` -->\n"
_TITLES: Final = {
    Form.TRAINING: "Settings of training files",
    Form.EVALUATION: "Settings of evaluation files",
    Form.GENERATORS: "Settings of older files for generators of videos",
}
_MARKS: Final = {Outcome.TRANSLATED: "translated", Outcome.DROPPED: "dropped", Outcome.UNSUPPORTED: "not supported"}


def tables() -> str:
    """Return the tables of all settings, as Markdown: one for each section of Cosmos-RL's files."""
    return "\n".join(line for form in Form for line in _form(form)) + "\n"


def page(text: str) -> str:
    """Return the page `text` with its tables written anew."""
    written, _, _ = text.partition(BEGIN)
    return f"{written}{BEGIN}\n{tables()}"


def _form(form: Form) -> Iterator[str]:
    yield f"## {_TITLES[form]}"
    sections: dict[str, list[Setting]] = {}
    for setting in table(form).values():
        sections.setdefault(setting.path.rpartition(".")[0], []).append(setting)
    for section, settings in sections.items():
        yield ""
        yield f"**{f'`[{section}]`' if section else 'Before all sections'}**"
        yield ""
        if len({(setting.outcome, setting.text) for setting in settings}) == 1:  # one sentence for all of them
            names = ", ".join(f"`{setting.path.rpartition('.')[2]}`" for setting in settings)
            yield f"{names}: {_MARKS[settings[0].outcome]}. {settings[0].text}"
            continue
        yield "| setting | default | |"
        yield "|---|---|---|"
        for setting in settings:
            yield f"| `{setting.path.rpartition('.')[2]}` | {_default(setting.default)} | {_text(setting)} |"
    yield ""


def _default(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _text(setting: Setting) -> str:
    text = setting.text.replace("|", "\\|")
    return text if setting.outcome is Outcome.TRANSLATED else f"*{_MARKS[setting.outcome]}*: {text}"


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text()))

"""Translation of a whole settings file of Cosmos-RL, and the report of what became of each of its keys."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starling.cli.migrate import evaluation, training
from starling.cli.migrate.draft import Draft
from starling.cli.migrate.settings import Form, Outcome
from starling.cli.migrate.source import OWN_SCRIPT, Source, shown_value
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.settings import Tree

HEADING: Final = """\
Recipe made by `starling migrate` of the Cosmos-RL settings {name}.
Check it with `starling run FILE --dry-run`. Lines that begin with `# CHECK:` need your attention."""
_TITLES: Final = {
    Outcome.TRANSLATED: "translated",
    Outcome.DROPPED: "dropped, because Starling decides it itself",
    Outcome.UNSUPPORTED: "not supported",
}
_AT_DEFAULT: Final = "It has its default, which asks for nothing."
_OWN: Final = "It is a key of your own script, which is not carried over."


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one key of the file."""

    path: str
    value: str
    """As it is shown."""
    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True)
class Migration:
    """A translated file."""

    entries: tuple[Entry, ...]
    notes: tuple[tuple[str, str], ...] = ()
    """Settings of the recipe that need attention, and why."""
    recipe: str = ""
    """TOML; empty if nothing can be made of the file."""
    refusal: str = ""
    """Why nothing can be made of it."""

    def report(self) -> list[str]:
        """Return the lines of the report: counts, then every key that was not simply translated, then notes."""
        lines = []
        for outcome, title in _TITLES.items():
            found = [entry for entry in self.entries if entry.outcome is outcome]
            colon = ":" if found and outcome is not Outcome.TRANSLATED else ""
            lines.append(f"{counted(len(found), 'key')} {title}{colon}")
            if outcome is not Outcome.TRANSLATED:
                lines += [f"  {entry.path} = {entry.value}: {entry.text}" for entry in found]
        if self.notes:
            lines.append(f"{counted(len(self.notes), 'place')} of the recipe to check:")
            lines += [f"  {path}: {text}" for path, text in self.notes]
        return lines


def migrate(tree: Tree, name: str, check: Callable[[Tree], str] = lambda recipe: "") -> Migration:
    """Translate a settings file of Cosmos-RL.

    Args:
        tree: its contents.
        name: of the file, without its suffix: the name of a run that has none.
        check: returns why a recipe does not load; empty if it does.

    Raises:
        ConfigError: a key is unknown or wrong, or the file is none of Cosmos-RL.
    """
    source = Source(tree)
    if refusal := _refusal(source):  # before unknown keys: correcting these would not make the file usable
        return Migration(_entries(source), refusal=refusal)
    source.check()
    is_evaluation = source.form is Form.EVALUATION
    draft = evaluation.translate(source, name) if is_evaluation else training.translate(source, name)
    return _finished(source, draft, name, check)


def _refusal(source: Source) -> str:
    """Return why nothing can be made of a file; empty if something can."""
    if source.form is Form.GENERATORS:
        return training.NO_GENERATORS
    return training.refusal(source) if source.form is Form.TRAINING else ""


def _finished(source: Source, draft: Draft, name: str, check: Callable[[Tree], str]) -> Migration:
    heading = HEADING.format(name=ascii(name))
    if problem := check(tomllib.loads(draft.text(heading))):
        draft.note("recipe", f"the recipe does not load yet: {problem}")
        heading = f"{heading}\nCHECK: it does not load yet: {problem!a}"
    return Migration(_entries(source), tuple(draft.notes), draft.text(heading))


def _entries(source: Source) -> tuple[Entry, ...]:
    kind = training.kind_of(source) if source.form is Form.TRAINING else None
    found = []
    for path, value in source.given.items():
        setting = source.table.get(path)
        shown = shown_value(path, value)
        if setting is None:
            if not path.startswith(OWN_SCRIPT):
                raise ConfigError(f"unknown setting {path}")
            found.append(Entry(path, shown, Outcome.UNSUPPORTED, _OWN))
        elif kind is not None and (why := training.meaningless(path, kind)):
            found.append(Entry(path, shown, Outcome.DROPPED, why))
        elif setting.outcome is Outcome.UNSUPPORTED and setting.default is not None and not source.differs(path):
            found.append(Entry(path, shown, Outcome.DROPPED, _AT_DEFAULT))
        else:
            found.append(Entry(path, shown, setting.outcome, setting.text))
    return tuple(found)

"""Reader of a settings file of Cosmos-RL: every key is known and of the right type, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from starling.cli.migrate.settings import NAMES, TYPES, Form, Setting, Table, table
from starling.common.errors import ConfigError
from starling.common.settings import Tree, nearest, shown

OWN_SCRIPT: Final = "custom."
"""Section whose keys are those of a user's own script."""
_REWARDS: Final = ("reward_args", "decode_args")
_RECIPE: Final = ("run", "rl", "launch", "sampling")
"""Sections of a recipe that no file of Cosmos-RL has."""
_SECRET_WORDS: Final = ("key", "token", "secret", "password", "credential")
_NO_SECRETS: Final = ("score_key", "tokenizer_model_name", "tokenizer_type", "unnorm_key", "input_key", "output_key")
"""Settings with such a word in their name."""
_MAX: Final = float(1 << 53)
"""Numbers beyond are refused: no setting means one."""


class Source:
    """The settings of one file, with the defaults of Cosmos-RL for those that it does not give.

    Raises:
        ConfigError: a value is of another type, or the file is none of Cosmos-RL. Unknown keys are found by `check`.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.form = form_of(tree)
        self.table = table(self.form)
        self.unknown: list[ConfigError] = []
        """One for each key that is not known."""
        self.given: dict[str, Any] = dict(_flat(tree, self.table, "", self.unknown))
        """Values by path; of a list of tables, `path[]` is that of the last one."""
        self.used: set[str] = set()
        """Settings that the translation has read."""

    def check(self) -> None:
        """Raise ConfigError if a key is unknown: the first of them."""
        if self.unknown:
            raise self.unknown[0]

    def __getitem__(self, path: str) -> Any:
        """Return the value of a setting, or its default."""
        self.used.add(path)
        return self.given.get(path, self.table[path].default)

    def has(self, path: str) -> bool:
        """Say whether the file gives a setting."""
        self.used.add(path)
        return path in self.given

    def section(self, path: str) -> Any:
        """Return a table or a list of tables of the file, or None."""
        found: Any = self.tree
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def differs(self, path: str) -> bool:
        """Say whether a setting has another value than the default."""
        return bool(self.given[path] != self.table[path].default)


def form_of(tree: Tree) -> Form:
    """Return the form that most of the top-level keys belong to. Raises ConfigError if there is none."""
    if not tree:
        raise ConfigError("the file has no settings; give a settings file of Cosmos-RL")
    if set(tree) & set(_REWARDS):
        raise ConfigError(
            "this is a rewards.toml, which needs no translation: `starling reward --config FILE` reads it"
        )
    if set(tree) & set(_RECIPE):
        raise ConfigError(
            "this is a recipe of Starling, which needs no translation: `starling run FILE --dry-run` checks it"
        )
    counts = {form: len(set(tree) & _top_level(table(form))) for form in Form}
    best = max(Form, key=lambda form: counts[form])
    if counts[best] == 0:
        known = sorted({name for form in Form for name in _top_level(table(form))})
        first = next(iter(tree))
        like = nearest(first, known)
        hint = f"did you mean {like}?" if like else f"known: {', '.join(known)}"
        raise ConfigError(f"this is no settings file of Cosmos-RL: {first} is no section of one; {hint}")
    return best


def shown_value(path: str, value: Any) -> str:
    """Return a value as reports show it: without a secret, and tables and lists of tables shortened."""
    name = path.rpartition(".")[2].lower()
    if isinstance(value, str) and name not in _NO_SECRETS and any(word in name for word in _SECRET_WORDS):
        return "..."
    if isinstance(value, dict) and value:
        return "{...}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[...]"
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value)


def _top_level(known: Table) -> set[str]:
    return {path.partition(".")[0].removesuffix("[]") for path in known} | (
        {"custom"} if "custom.dpo_beta" in known else set()
    )


def _flat(tree: Tree, known: Table, prefix: str, unknown: list[ConfigError]) -> Iterator[tuple[str, Any]]:
    """Yield the settings below `prefix` with their paths, each checked; add what is not known to `unknown`.

    Raises:
        ConfigError: a value is of another type.
    """
    for key, value in tree.items():
        path = prefix + key
        if path in known:
            _check_type(known[path], value)
            yield path, value
        elif _has_below(known, f"{path}."):
            if not isinstance(value, dict):
                raise ConfigError(f"{path} = {shown_value(path, value)} must be a table; write it as [{path}]")
            yield from _flat(value, known, f"{path}.", unknown)
        elif _has_below(known, f"{path}[]."):
            for item in _tables(path, value):
                yield from _flat(item, known, f"{path}[].", unknown)
        elif path.startswith(OWN_SCRIPT):
            yield path, value
        else:
            unknown.append(_unknown(known, prefix, key, value))


def _tables(path: str, value: Any) -> list[Tree]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigError(f"{path} = {shown_value(path, value)} must be a list of tables; write [[{path}]] above each")
    return value


def _has_below(known: Table, prefix: str) -> bool:
    return any(path.startswith(prefix) for path in known)


def _check_type(setting: Setting, value: Any) -> None:
    """Raise ConfigError unless a value is of a type, and within the limits, of the setting."""
    if "any" in setting.types:
        return
    given = f"{setting.path} = {shown_value(setting.path, value)}"
    if not any(_is_of(name, value) for name in setting.types):
        raise ConfigError(f"{given} must be {' or '.join(NAMES[name] for name in setting.types)}; correct it")
    if isinstance(value, float | int) and not isinstance(value, bool):
        if setting.least is not None and value < setting.least:
            raise ConfigError(f"{given} must be at least {setting.least:g}; correct it")
    elif isinstance(value, str) and setting.choices and value not in setting.choices:
        raise ConfigError(f"{given} must be one of {', '.join(setting.choices)}; correct it")
    elif isinstance(value, list | dict) and (kind := setting.items.get(type(value).__name__)):
        for item in value.values() if isinstance(value, dict) else value:
            if not _is_of(kind, item):
                raise ConfigError(f"{setting.path} has {shown(item)}, which must be {NAMES[kind]}; correct it")


def _is_of(name: str, value: Any) -> bool:
    """Say whether a value is of the type `name`; a number must be finite, and not be absurdly large."""
    if isinstance(value, bool):
        return name == "bool"
    if isinstance(value, float | int) and not -_MAX < value < _MAX:  # also false for NaN
        return False
    return isinstance(value, TYPES[name])


def _unknown(known: Table, prefix: str, key: str, value: Any) -> ConfigError:
    """Return the error of an unknown key, which names the nearest: in its section, else anywhere."""
    below = {
        path.removeprefix(prefix).partition(".")[0].removesuffix("[]") for path in known if path.startswith(prefix)
    }
    like = nearest(key, sorted(below), cutoff=0.6)
    hint = f"did you mean {prefix}{like}?" if like else ""
    if not hint:
        same = sorted(path for path in known if path.rpartition(".")[2] == key)
        hint = f"{same[0]} has that name; move it" if same else "correct or remove it"
    return ConfigError(f"unknown setting {prefix}{key} = {shown_value(prefix + key, value)}; {hint}")

"""A recipe with every setting: its text, its type and its default, as TOML with comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from starling.cli.recipe.schema import Recipe
from starling.common.setting_docs import setting_texts
from starling.common.setting_fields import item_of, section_of
from starling.common.settings import type_name

CHOICES: Final[dict[str, Any]] = {
    "data.source": "reasoning_gym:spell_backward",
    "data.format": "{metadata[word]}>",
    "reward.scorers[].name": "reasoning_gym:spell_backward",
    "rl.num_steps": 100,
    "model.scratch.config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}
"""Values of settings whose defaults make no run. The data are plain text: the model has no chat template."""
PRESENT: Final = ("data", "model.scratch", "reward", "reward.scorers[]")
"""Optional sections that a run with `CHOICES` needs."""
HEADER: Final = """\
# Every setting of a run, with its default. Lines that begin with `#` and no space are optional: remove the `#` to use
# one. Choose first: the model (model.path instead of [model.scratch]), data.source, [[reward.scorers]], rl.num_steps.
# Run it with `starling run FILE`; `starling settings WORD ...` searches the same list.
"""


def default_recipe() -> str:
    """Return a recipe with every setting, which `starling run` accepts as it is."""
    lines = [HEADER.rstrip("\n")]
    for name, field in Recipe.model_fields.items():
        schema = section_of(field)
        assert schema is not None, f"{name} is not a section"
        text = setting_texts(Recipe)[name]
        lines += _section(name, name, schema, _default(field), _is_present(name, field), text)
    return "\n".join(lines) + "\n"


def _section(key: str, header: str, schema: type[BaseModel], default: Any, present: bool, text: str) -> Iterator[str]:
    """Yield the lines of the section `key` with the table `header`: its values, then the sections below it."""
    off = "" if present else "#"
    table = f"[[{header}]]" if key.endswith("[]") else f"[{header}]"
    yield ""
    yield from _comment(text)
    yield f"{off}{table}"
    below, texts = [], setting_texts(schema)
    for name, field in schema.model_fields.items():
        path, value = f"{key}.{name}", getattr(default, name, None) if default is not None else _default(field)
        nested, item = section_of(field), item_of(field)
        if nested is not None:
            shown = present and (value is not None or _is_present(path, field))
            below.append((path, f"{header}.{name}", nested, value, shown, texts[name]))
            continue
        if item is not None:
            shown = present and f"{path}[]" in PRESENT
            below.append((f"{path}[]", f"{header}.{name}", item, None, shown, texts[name]))
            continue
        value = CHOICES.get(path, value)
        yield from _comment(texts[name])
        yield f"# Type: {type_name(field.annotation)}."
        absent = value is None
        yield f"{'#' if absent else off}{name} = {toml_value('' if absent else value)}"
    for arguments in below:
        yield from _section(*arguments)


def _comment(text: str) -> Iterator[str]:
    yield from (f"# {line}".rstrip() for line in text.splitlines())


def _default(field: FieldInfo) -> Any:
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _is_present(key: str, field: FieldInfo) -> bool:
    return key in PRESENT or _default(field) is not None


def toml_value(value: Any) -> str:
    """Return `value` as an inline TOML value."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float):
        return repr(value)  # also inf and nan
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows it only so


def _key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else str(toml_value(name))

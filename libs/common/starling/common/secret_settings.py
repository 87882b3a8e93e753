"""Settings that no error, log or report shows: passwords, tokens and keys.

A setting of a known type is secret by its mark, the type `Secret`. In tables of any keys, such as the `options` of a
scorer, the name decides. The value of an unknown key is secret, too, where a misspelt name could mean a secret.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from starling.common.setting_fields import item_of, section_of

HIDDEN: Final = "(hidden)"
"""What stands for the value of a secret."""


class _SecretMark:
    """Metadata of a field whose value is secret."""


Secret = Annotated[str, Field(repr=False), _SecretMark()]
"""A password, token or key, or a URL that has one."""
_NAMED: Final = re.compile(
    r"(?:^|[._-])(?:(?:api|access|secret|account|private)[._-]?keys?(?:[._-]?id)?|secrets?|password|passwd|passphrase|"
    r"token|credentials?|authorization|bearer|cookie)$|^key$",
    re.IGNORECASE,
)
"""Names of secrets in tables of any keys."""


def is_marked(field: FieldInfo) -> bool:
    """Return whether the field of a settings class is secret."""
    return any(isinstance(one, _SecretMark) for one in field.metadata)


def may_have_secrets(field: FieldInfo) -> bool:
    """Return whether the field is secret, a section with a secret in it, a list of such, or a table of any keys."""
    if is_marked(field) or dict in (typing.get_origin(field.annotation), field.annotation):
        return True
    inner = section_of(field) or item_of(field)
    return inner is not None and any(map(may_have_secrets, inner.model_fields.values()))


def is_secret(schema: type[BaseModel], path: str | Sequence[str | int]) -> bool:
    """Return whether the value at `path` below the settings of `schema` must not be shown.

    Args:
        schema: settings class.
        path: names of sections and of the setting, and numbers of members of lists, also as one text
            ``section.list[0].setting``; it need not exist.
    """
    if isinstance(path, str):
        path = [part for part in re.split(r"[.\[\]]+", path) if part]
    current: type[BaseModel] | None = schema
    for part in path:
        if isinstance(part, int) or part.isdecimal():  # the member of a list
            continue
        field = current.model_fields.get(part) if current is not None else None
        if field is None:
            if names_secret(part) or (current is not None and any(map(is_marked, current.model_fields.values()))):
                return True
            current = None
            continue
        if is_marked(field):
            return True
        current = section_of(field) or item_of(field)
    return False


def names_secret(name: str) -> bool:
    """Return whether a key that belongs to no settings class names a secret."""
    return _NAMED.search(name) is not None


def without_secrets(schema: type[BaseModel], value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Return a copy of the value at `path`, a whole tree by default, with `HIDDEN` for each secret in it."""
    if path and is_secret(schema, path):
        return HIDDEN if value else value
    if isinstance(value, dict):
        return {key: without_secrets(schema, item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(schema, item, (*path, number)) for number, item in enumerate(value)]
    return value


def without_passwords(text: str) -> str:
    """Return a text without the parts of its URLs that may have a password: what is before the host."""
    return re.sub(r"://\S*@", "://...@", text)

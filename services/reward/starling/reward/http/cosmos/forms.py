"""Form-encoded bodies of the routes of Cosmos-RL."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl

from starling.reward.http.errors import HttpError

FORM: Final = "application/x-www-form-urlencoded"
MAX_FIELDS: Final = 16
MAX_NAME_CHARACTERS: Final = 200
"""Of a uuid or a type."""


def read_form(data: bytes, content_type: str, required: tuple[str, ...]) -> dict[str, str]:
    """Return the fields of a body; of a field that is given twice, the last value.

    Args:
        data: the body.
        content_type: the header.
        required: fields that must be there.

    Raises:
        HttpError: 422; it is no form, or lacks a field.
    """
    if content_type.partition(";")[0].strip().lower() != FORM:
        raise HttpError(422, f"the body is {content_type[:100] or 'of no type'!r}; send a form, of type {FORM}")
    try:
        pairs = parse_qsl(
            data.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(data),
            max_num_fields=MAX_FIELDS,
            errors="strict",
        )
    except ValueError as error:  # also of bytes that are not UTF-8
        raise HttpError(422, f"the body is no form: {str(error)[:200]}") from None
    fields = dict(pairs)
    missing = [name for name in required if name not in fields]
    if missing:
        details = [{"type": "missing", "loc": ["body", name], "msg": "Field required"} for name in missing]
        raise HttpError(422, f"the form has no {missing[0]!r}", details=details)
    return fields


def short_field(fields: dict[str, str], name: str, default: str = "") -> str:
    """Return the field `name`, a uuid or a type. Raises HttpError when it is longer than any of them."""
    value = fields.get(name, default)
    if len(value) > MAX_NAME_CHARACTERS:
        raise HttpError(422, f"{name!r} has {len(value)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    return value

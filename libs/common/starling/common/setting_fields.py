"""Sections and lists of sections among the fields of settings."""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings class of a field that is a section, or an optional one."""
    candidates = [field.annotation, *typing.get_args(field.annotation)]
    is_union = typing.get_origin(field.annotation) in (None, typing.Union, types.UnionType)
    for candidate in candidates if is_union else []:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def item_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the settings class of the members of a field that holds a list of sections."""
    if typing.get_origin(field.annotation) not in (tuple, list):
        return None
    item = typing.get_args(field.annotation)[0]
    return item if isinstance(item, type) and issubclass(item, BaseModel) else None


def field_at(schema: type[BaseModel], keys: Sequence[str]) -> FieldInfo | None:
    """Return the field below `schema` that `keys` name, or None if there is none."""
    field = None
    current: type[BaseModel] | None = schema
    for key in keys:
        field = current.model_fields.get(key) if current is not None else None
        current = section_of(field) if field is not None else None
    return field

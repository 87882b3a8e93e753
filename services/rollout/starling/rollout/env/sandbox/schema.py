"""JSON schema of a tool, from the function's signature and docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Union

from starling.common.errors import ConfigError

_TYPES: Final[dict[Any, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    Mapping: "object",
    type(None): "null",
}
_ARGUMENT: Final = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of `function` in OpenAI's form: ``{"type": "function", "function": {...}}``.

    The description is the docstring up to its ``Args:``, those of the parameters are from there.

    Raises:
        ConfigError: a parameter cannot be given by name.
    """
    name = getattr(function, "__name__", type(function).__name__)
    description, about = _docstring(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # an annotation that exists for type checkers alone
        hints = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"Tool {name!r} has the parameter {parameter}, which cannot be given by name: write out its parameters."
            )
        described = {"description": about[parameter.name]} if parameter.name in about else {}
        properties[parameter.name] = {**type_schema(hints.get(parameter.name, Any)), **described}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; of one that says nothing to JSON, the schema that takes anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_schema(arguments[0])
    if origin is Literal:
        kinds = {_TYPES.get(type(value)) for value in arguments}
        only = {"type": kinds.pop()} if len(kinds) == 1 and None not in kinds else {}
        return {**only, "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(one) for one in arguments]}
    if origin in (list, set, tuple) and arguments:
        return {"type": "array", "items": type_schema(arguments[0])}
    if origin is dict and len(arguments) == 2:
        return {"type": "object", "additionalProperties": type_schema(arguments[1])}
    kind = _TYPES.get(origin or hint)
    return {"type": kind} if kind else {}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and what is said of each argument in a section ``Args:``."""
    description, _, section = text.partition("\nArgs:\n")
    about: dict[str, str] = {}
    indent, current = "", ""
    for line in section.splitlines():
        if line and not line[0].isspace():
            break
        own = line[: len(line) - len(line.lstrip())]
        indent = indent or own
        if (match := _ARGUMENT.match(line)) and own == indent:
            current, about[match[1]] = match[1], match[2]
        elif current and line.strip():
            about[current] += " " + line.strip()
    ends = re.split(r"\n(?:Returns|Raises|Yields|Examples?):\n", description)[0]
    return " ".join(ends.split()), about

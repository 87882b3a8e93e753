"""JSON schemas of functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import pytest

from starling.common.errors import ConfigError
from starling.rollout.env.sandbox.schema import schema_of, type_schema


def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", *, places: list[str] | None = None, more=None
) -> str:  # type: ignore[no-untyped-def]
    """Tell the weather.

    For some days.

    Args:
        city: where; a place
            of some size.
        days (int): how long.
        more: not documented further

    Returns:
        A text.
    """
    return f"{city}{days}{unit}{places}{more}"


def test_schema_is_made_from_signature_and_docstring() -> None:
    assert schema_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather. For some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where; a place of some size."},
                    "days": {"type": "integer", "description": "how long."},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "places": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                    "more": {"description": "not documented further"},
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Mapping[str, Any], {"type": "object"}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Any, {}),
        (object, {}),
    ],
)
def test_schema_of_annotations(hint: Any, schema: dict[str, Any]) -> None:
    assert type_schema(hint) == schema


def test_schema_of_undocumented_function() -> None:
    def bare(a, b=2):  # type: ignore[no-untyped-def]
        return a, b

    function = schema_of(bare)["function"]
    assert function["description"] == ""
    assert function["parameters"] == {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"]}


def test_positional_only_parameters_are_rejected() -> None:
    def many(*values: int) -> int:
        return sum(values)

    with pytest.raises(ConfigError, match=r"Tool 'many' has the parameter \*values.*: write out its parameters"):
        schema_of(many)

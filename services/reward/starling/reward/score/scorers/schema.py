"""The scorer `json_schema`: whether a completion is JSON of the form that was asked for."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.registry import Scorer

SCHEMA: Final = "schema"
"""Key of the schema in a prompt's metadata."""
_BLOCK: Final = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def make_json_schema(schema: dict[str, Any] | None = None) -> Scorer:
    """Make the scorer `json_schema`: 1 when a completion is JSON that a schema allows, else 0.

    The JSON is the last block between ``` fences, or the whole completion without one. References to other documents
    are not followed.

    Args:
        schema: a JSON Schema (draft 2020-12, or as its ``$schema`` says); without it, the ``schema`` of each row's
            metadata.

    Raises:
        ConfigError: jsonschema is not installed, or it is no schema.
    """
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise ConfigError(f"Scorer 'json_schema' needs the package jsonschema ({error}): install it.") from None

    def validator(found: Any) -> Any:
        if not isinstance(found, dict):
            raise ValueError(f"the schema is a {type(found).__name__}, not an object of JSON Schema")
        kind = validator_for(found)
        kind.check_schema(found)
        return kind(found, registry=Registry())  # without one, it would ask the network for references

    try:
        fixed = None if schema is None else validator(schema)
    except (SchemaError, ValueError) as error:
        raise ConfigError(f"Scorer 'json_schema': {getattr(error, 'message', error)}.") from None

    def matches(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        own = validator(metadata.get(SCHEMA)) if fixed is None else fixed
        blocks = _BLOCK.findall(completion)
        try:
            said = json.loads(blocks[-1] if blocks else completion, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return 0.0
        return float(own.is_valid(said))

    return matches


def _no_number(name: str) -> float:
    """Refuse NaN and infinities, which are not JSON."""
    raise ValueError(f"{name} is not JSON")

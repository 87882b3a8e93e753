"""Parsers of tool calls in the model's text: one pure function per form.

A parser takes the text of a reply and returns its calls in order; a reply without calls is the answer. What begins as a
call but cannot be parsed becomes a `Malformed`, whose text goes to the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Call:
    """A function call of the model."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """The beginning of a call that cannot be parsed."""

    problem: str
    """Error text for the model."""


Parser = Callable[[str], Sequence[Call | Malformed]]

_HERMES: Final = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_ARGUMENTS: Final = ("arguments", "parameters")
_DECODER: Final = json.JSONDecoder()
_TOO_DEEP: Final = Malformed("the call is nested too deeply")


def hermes(text: str) -> list[Call | Malformed]:
    """Read any number of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it.

    A call without its closing tag counts if its object is complete: a stop text may have cut the tag off.
    """
    return [_read(inside.strip()) for inside in _HERMES.findall(text)]


def llama(text: str) -> list[Call | Malformed]:
    """Read a reply that is nothing but ``{"name": ..., "parameters": {...}}``, as Llama 3.1 writes it.

    Several calls are separated by ``;``. A reply that is other text, or JSON of another kind, is an answer.
    """
    rest, calls = text.strip().removeprefix("<|python_tag|>").strip(), list[Call | Malformed]()
    if not re.match(r'\{\s*"(?:name|type|function|parameters)"', rest):
        return []
    while rest:
        try:
            found, end = _DECODER.raw_decode(rest)
        except ValueError as error:
            return [*calls, Malformed(f"the call is no JSON: {error}")]
        except RecursionError:
            return [*calls, _TOO_DEEP]
        calls.append(_call(found))
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return [*calls, Malformed(f"behind the call stands {rest[:40]!r}; part calls by `;`")]
        rest = rest.removeprefix(";").strip()
    return calls


PARSERS: Final[dict[str, Parser]] = {"hermes": hermes, "llama": llama}


def _read(text: str) -> Call | Malformed:
    try:
        return _call(json.loads(text))
    except ValueError as error:
        return Malformed(f"the call is no JSON: {error}")
    except RecursionError:
        return _TOO_DEEP


def _call(found: Any) -> Call | Malformed:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Malformed('the call is no object with a "name"')
    arguments: Any = next((found[key] for key in _ARGUMENTS if key in found), {})
    if isinstance(arguments, str):  # OpenAI's form has them as text
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return Malformed(f'the "arguments" of {found["name"]!r} are text, and not an object')
        except RecursionError:
            return _TOO_DEEP
    if not isinstance(arguments, dict):
        return Malformed(f'the "arguments" of {found["name"]!r} are no object')
    try:
        if not is_unicode((found["name"], arguments)):
            return Malformed('the call has half of a surrogate pair, such as "\\ud800"')
    except RecursionError:
        return _TOO_DEEP
    return Call(found["name"], arguments)


def is_unicode(value: Any) -> bool:
    """Return whether all texts in `value`, which is from JSON, can be written as UTF-8: not so `"\\ud800"` alone."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True

"""Calls of tools in a reply, as OpenAI's schema has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Final, Literal

from starling.rollout.api.messages import ReadCalls
from starling.rollout.env.parsers import PARSERS, Call, Parser

_BEGIN: Final = "<tool_call>"
"""What calls in Hermes's form begin with; text may stand before them."""


def reader_of(parser: Literal["", "hermes", "llama"], chat_template: str | Mapping[str, str] | None) -> ReadCalls:
    """Return what finds calls in replies: by `parser`, or else in the form that the chat template has."""
    if not parser:
        parser = "llama" if "python_tag" in str(chat_template) else "hermes"
    return partial(_read, PARSERS[parser])


def _read(parse: Parser, text: str) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Return the text beside the calls, and the calls; a reply with a call that cannot be read is text."""
    found = parse(text)
    calls = [call for call in found if isinstance(call, Call)]
    if not calls or len(calls) < len(found):
        return text, ()
    before, begun, _ = text.partition(_BEGIN)
    written = tuple((call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls)
    return (before.strip() or None) if begun else None, written

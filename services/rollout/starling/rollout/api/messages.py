"""Messages of a conversation: parsing, tool calls in replies, and comparison of messages that clients send again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

from starling.rollout.api.errors import ApiError
from starling.rollout.env.parsers import PARSERS, Call, Parser, is_unicode

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of clients and of chat templates, which do not know OpenAI's newer name of the system's role."""

ReadCalls = Callable[[str], tuple[str | None, tuple[tuple[str, str], ...]]]
"""Parses the tool calls in a reply: returns the text around them, and each call's name and arguments as JSON."""

MessageKey = tuple[str, str, tuple[tuple[str, str], ...]]
"""Normalised contents of a message: role, text, and its tool calls, each a name with its arguments."""

_HERMES_BEGIN: Final = "<tool_call>"
"""Beginning of a call in Hermes's form; text may precede it."""


def read_messages(given: Any) -> tuple[dict[str, Any], ...]:
    """Return a client's messages in the form of chat templates.

    Content is text: text parts are joined, and None becomes an empty text. Arguments of tool calls become objects where
    they are JSON, since templates write the JSON themselves.

    Raises:
        ApiError: they are not a conversation of text.
    """
    if not isinstance(given, list) or not given:
        raise ApiError("messages is missing or empty; give a list of {role, content}", parameter="messages")
    return tuple(_read_message(message, f"messages[{number}]") for number, message in enumerate(given))


def read_tools(given: Any) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request. Raises ApiError."""
    tools = given or []
    if not isinstance(tools, list):
        raise ApiError("tools is not a list; give a list of {type: function, function: {...}}", parameter="tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or tool.get("type", "function") != "function":
            raise ApiError(
                f"tools[{number}] is not a function; "
                "give {type: function, function: {name, description, parameters}}",
                parameter="tools",
            )
    return tuple(tools)


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Return the normalised contents of `message`, to recognise it when a client sends it again.

    White space around the text, ids of calls and the formatting of arguments do not count: clients change those, and
    templates do not write them.
    """
    calls = (call.get("function", call) for call in message.get("tool_calls") or ())
    return (
        str(message["role"]),
        _text(message.get("content")).strip(),
        tuple((str(call.get("name", "")), _canonical(call.get("arguments"))) for call in calls),
    )


def reply_message(text: str, read_calls: ReadCalls | None) -> dict[str, Any]:
    """Return a reply of the model as its client gets it."""
    content, calls = (text, ()) if read_calls is None else read_calls(text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return message


def _read_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or message["role"] not in ROLES:
        raise ApiError(f"{where} has no role of {', '.join(ROLES)}; give {{role, content}}", parameter="messages")
    read: dict[str, Any] = {"role": ROLES[message["role"]], "content": _read_content(message.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], where)
    return read


def _read_content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise ApiError(
                f"{where}: content of type {kind!r} is not supported here; give text, or a list of parts of type text",
                parameter="messages",
            )
    return _text(parts)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    given: list[Any] = calls if isinstance(calls, list) else [None]
    for call in given:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                f"{where}: a call in tool_calls is not a function; give {{id, type, function: {{name, arguments}}}}",
                parameter="messages",
            )
        arguments = _parsed(function.get("arguments"))
        read.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        if isinstance(call.get("id"), str):
            read[-1]["id"] = call["id"]
    return read


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return content or ""


def _parsed(arguments: Any) -> Any:
    """Return the object in a JSON text; anything else is returned as it is."""
    if not isinstance(arguments, str):
        return arguments if arguments is not None else {}
    try:
        parsed = json.loads(arguments or "{}")
        return parsed if isinstance(parsed, dict) and is_unicode(parsed) else arguments
    except (ValueError, RecursionError):
        return arguments


def _canonical(arguments: Any) -> str:
    return json.dumps(_parsed(arguments), sort_keys=True, ensure_ascii=False, default=str)


def make_call_reader(
    parser: Literal["", "hermes", "llama"], chat_template: str | Mapping[str, str] | None
) -> ReadCalls:
    """Return the parser of tool calls by name, or else by the form that the chat template uses."""
    if not parser:
        parser = "llama" if "python_tag" in str(chat_template) else "hermes"
    return partial(_read_reply, PARSERS[parser])


def _read_reply(parse: Parser, text: str) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Return the text around the calls, and the calls; a reply with a malformed call is text."""
    found = parse(text)
    calls = [call for call in found if isinstance(call, Call)]
    if not calls or len(calls) < len(found):
        return text, ()
    before, begun, _ = text.partition(_HERMES_BEGIN)
    written = tuple((call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls)
    return (before.strip() or None) if begun else None, written

"""The environment `tools`: the model calls functions and gets their results, until it replies without a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.settings import nearest, validate
from starling.rollout.env.base import Episode, EpisodeOutcome, EpisodeOver
from starling.rollout.env.parsers import PARSERS, Call, Malformed, Parser
from starling.rollout.env.registry import LoadedEnvironment
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError
from starling.rollout.settings import EnvironmentSettings

_KEYS: Final = ("function", "name", "description", "parameters", "timeout_s", "needs")
TEXT_FORM: Final = "\n<tool_response>\n{}\n</tool_response>\n"
"""Form of a result in a prompt of plain text, which has no messages."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that the model may call."""

    name: str
    schema: Mapping[str, Any]
    sandbox: Sandbox
    target: int
    """Its index in the sandbox."""
    timeout_s: float


def make_tools(
    settings: EnvironmentSettings,
    tools: Sequence[str | Mapping[str, Any]],
    *,
    parser: str = "hermes",
    timeout_s: float = 10.0,
    max_calls: int = 8,
    max_result_chars: int = 8192,
    max_processes: int = 16,
    memory_mb: int = 4096,
    import_s: float = 60.0,
) -> LoadedEnvironment:
    """Create the environment.

    Args:
        settings: those of the environment, for the sandbox.
        tools: each ``module:function`` or ``path/to/file.py:function``, or a table with that as `function` and,
            optionally, `name`, `description`, `parameters` (a JSON schema), `timeout_s`, and `needs`, which replaces
            the environment's: tools with the same needs share a sandbox.
        parser: how the model writes calls: ``hermes``, ``llama``, or a function of the text, as ``module:function``.
        timeout_s: limit of one call; then its process is killed, and the model gets an error.
        max_calls: limit on the calls of one reply; the model gets an error for each further one.
        max_result_chars: limit on the characters of a result.
        max_processes: limit on concurrent calls, over all episodes of the replica.
        memory_mb: limit on the address space of a call, in MiB.
        import_s: limit on the time of the imports.

    Raises:
        ConfigError: a tool or the parser cannot be used.
    """
    tables = [_table(tool) for tool in tools]
    if not tables:
        raise ConfigError("Environment 'tools' has no tools: name functions in rollout.environment.options.tools.")
    parse = _parser(parser)
    sandboxes = list[Sandbox]()

    def close() -> None:
        for sandbox in sandboxes:
            sandbox.close()

    named: dict[str, Tool] = {}
    try:
        for needs, group in _by_needs(tables, settings.needs).items():
            sandbox = Sandbox(
                [table["function"] for table in group],
                what="Tool",
                with_schemas=True,
                memory_mb=memory_mb,
                max_processes=max_processes,
                import_s=import_s,
                level=settings.sandbox,
                needs=needs,
            )
            sandboxes.append(sandbox)
            _add_named(named, group, sandbox, timeout_s)
    except BaseException:  # raised again; no sandbox may be left behind
        close()
        raise
    play = partial(use_tools, tools=named, parse=parse, max_calls=max_calls, max_chars=max_result_chars)
    return LoadedEnvironment(play, tuple(tool.schema for tool in named.values()), close)


async def use_tools(
    episode: Episode, *, tools: Mapping[str, Tool], parse: Parser, max_calls: int, max_chars: int
) -> EpisodeOutcome:
    """Play one episode. The reward is left to the scorers."""
    num_calls = num_errors = 0
    try:
        while calls := parse((await episode.reply()).text):
            results = await asyncio.gather(*(_call(call, tools) for call in calls[:max_calls]))
            texts = [text for text, _ in results]
            texts += [f"Error: at most {max_calls} calls are made at a time"] * (len(calls) - len(results))
            num_calls += len(calls)
            num_errors += len(calls) - sum(succeeded for _, succeeded in results)
            _add_results(episode, calls, [_shortened(text, max_chars) for text in texts])
    except EpisodeOver:  # the trajectory so far counts
        pass
    return EpisodeOutcome(metrics={"tool_calls": num_calls, "tool_errors": num_errors})


async def _call(call: Call | Malformed, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """Make one call; returns the text for the model, and whether it succeeded."""
    if isinstance(call, Malformed):
        return f"Error: {call.problem}", False
    tool = tools.get(call.name)
    if tool is None:
        return f"Error: there is no function {call.name!r}; there are {', '.join(tools)}", False
    try:
        async with tool.sandbox.session() as session:
            result = await session.call(tool.target, dict(call.arguments), timeout_s=tool.timeout_s)
    except SandboxError as error:
        return f"Error: {error}", False
    if isinstance(result, str):
        return result, True
    try:
        return json.dumps(result, ensure_ascii=False, default=str), True
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or too deep
        return "Error: its result cannot be written as JSON", False


def _add_results(episode: Episode, calls: Sequence[Call | Malformed], texts: Sequence[str]) -> None:
    if not episode.prompt.messages:
        for text in texts:
            episode.say_text(TEXT_FORM.format(text))
        return
    names = ({"name": call.name} if isinstance(call, Call) else {} for call in calls)
    episode.say(*({"role": "tool", **name, "content": text} for name, text in zip(names, texts, strict=True)))


def _shortened(text: str, max_chars: int) -> str:
    return (
        text
        if len(text) <= max_chars
        else f"{text[:max_chars]} ... ({counted(len(text) - max_chars, 'more character')})"
    )


def _table(tool: str | Mapping[str, Any]) -> Mapping[str, Any]:
    table = {"function": tool} if isinstance(tool, str) else tool
    for key in table:
        if key not in _KEYS:
            like = nearest(key, list(_KEYS))
            hint = f"did you mean {like!r}?" if like else f"known are {', '.join(_KEYS)}."
            raise ConfigError(f"A tool has the key {key!r}: {hint}")
    if not isinstance(table.get("function"), str):
        raise ConfigError(f'The tool {dict(table)!r} names no function: write `function = "module:function"`.')
    return table


def _by_needs(
    tables: Sequence[Mapping[str, Any]], default: SandboxNeeds
) -> dict[SandboxNeeds, list[Mapping[str, Any]]]:
    groups: dict[SandboxNeeds, list[Mapping[str, Any]]] = {}
    for table in tables:
        needs = validate(SandboxNeeds, table["needs"]) if "needs" in table else default
        groups.setdefault(needs, []).append(table)
    return groups


def _add_named(named: dict[str, Tool], tables: Sequence[Mapping[str, Any]], sandbox: Sandbox, timeout_s: float) -> None:
    """Add the tools of a sandbox by name; the settings of a table override the function's schema."""
    for target, (table, schema) in enumerate(zip(tables, sandbox.schemas, strict=True)):
        function = {**schema["function"], **{key: table[key] for key in _KEYS[1:4] if key in table}}
        name = function["name"]
        if name in named:
            raise ConfigError(f"Two tools are called {name!r}: give one of them another `name`.")
        limit_s = float(table.get("timeout_s", timeout_s))
        named[name] = Tool(name, {"type": "function", "function": function}, sandbox, target, limit_s)


def _parser(name: str) -> Parser:
    if name in PARSERS:
        return PARSERS[name]
    if not is_import_path(name):
        raise ConfigError(
            f"There is no parser {name!r} of tool calls: known are {', '.join(PARSERS)}; your own is named "
            "`module:function`."
        )
    found: Parser = import_object(name, "Parser")
    if not callable(found):
        raise ConfigError(f"Parser {name!r} is a {type(found).__name__}: name a function of the reply's text.")
    return found

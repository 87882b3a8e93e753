"""The command line of one command: its own flags, and the settings of a recipe given as flags.

A command that takes settings declares a parameter ``line: Line``. Every flag that is not one of its own is then a
setting (``--rl.group-size 16``), with its value, and reaches the command unparsed, for the loader of recipes to check.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from starling.common.errors import ConfigError

TRUTH = ("true", "false", "yes", "no", "on", "off", "t", "f", "y", "n", "1", "0")
"""Words that pydantic reads as a boolean: after a setting that is one, anything else is the next argument."""
PROGRAMS = {"rollout-only": "rollout --only", "policy-replay": "policy --replay"}
"""Commands that are written as a flag of another one."""


@dataclass(frozen=True)
class CommandLine:
    """Parts of a command line besides the parameters of its command."""

    arguments: tuple[str, ...] = ()
    """All that follows the command's name, as it was given."""
    flags: frozenset[str] = frozenset()
    """The command's own flags that were given: ``--model``."""
    settings: tuple[str, ...] = ()
    """Settings given as flags, each as one word: ``--rl.group-size=16``, or ``--launch.colocate`` for true."""


Line = Annotated[CommandLine, Parameter(parse=False)]


def define(name: str, function: Callable[..., int], usage: str, *notes: str) -> App:
    """Return the command `name`, used as ``starling NAME USAGE``; its help ends with `notes`, one paragraph each."""
    program = PROGRAMS.get(name, name)
    app = App(name=name, usage=f"Usage: starling {program} {usage}", help_epilogue="\n\n".join(notes))
    app.default(function)
    return app


def call(app: App, tokens: Sequence[str]) -> int:
    """Run the command that `tokens` name. Returns its exit code. Raises StarlingError as `parse` and the command."""
    function, bound = parse(app, tokens)
    code = function(*bound.args, **bound.kwargs)
    return code if isinstance(code, int) else 0


def parse(app: App, tokens: Sequence[str]) -> tuple[Callable[..., object], inspect.BoundArguments]:
    """Return the function of the command that `tokens` name, and its arguments.

    Raises:
        ConfigError: there is no such command, or a flag or value is not valid; the nearest one is named.
    """
    try:
        return _parse(app, list(tokens))
    except UnknownCommandError as error:
        _raise_unknown_command(app, error)
    except CycloptsError as error:
        if _names_no_subcommand(app, error):
            _raise_unknown_command(app, error)
        raise ConfigError(_sentence(error)) from None


def _parse(app: App, tokens: list[str]) -> tuple[Callable[..., object], inspect.BoundArguments]:
    path, apps, rest = app.parse_commands(tokens)
    command = apps[-1].default_command
    line = None
    if command is not None and "line" in inspect.signature(command).parameters:
        kept, settings = split(rest, flags_of(app, *path))
        flags = frozenset(token.partition("=")[0] for token in kept if token.startswith("--"))
        line = CommandLine(tuple(rest), flags, tuple(settings))
        tokens = [*path, *kept]
    function, bound, unparsed = app.parse_args(tokens, exit_on_error=False, print_error=False)
    if "line" in unparsed:
        bound.arguments["line"] = line
    _check_paths(tokens, bound.arguments)
    return function, bound


def _check_paths(tokens: Sequence[str], arguments: dict[str, Any]) -> None:
    """Raise ConfigError for an empty word that stands for a path: it would mean the present folder."""
    if "" not in tokens and not any(token.startswith("--") and token.endswith("=") for token in tokens):
        return
    fields = [vars(value) for value in arguments.values() if is_dataclass(value) and not isinstance(value, type)]
    if Path() in [*arguments.values(), *(value for each in fields for value in each.values())] and "." not in tokens:
        raise ConfigError("a path is empty; give it, and check that the shell's variable for it is set")


def flags_of(app: App, *path: str) -> frozenset[str]:
    """Return the flags of the command at `path`."""
    with app.app_stack(path):
        command = app.app_stack.current_frame[-1]
        arguments = (argument for argument in command.assemble_argument_collection() if argument.parse)
        names = (name for argument in arguments for name in argument.names)
        return frozenset(name for name in (*names, *command.help_flags) if name.startswith("-"))


def split(arguments: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that are a command's own, and the settings among them, each as one word.

    Raises:
        ConfigError: a flag is neither one of `own` nor like a setting, or a setting has no value.
    """
    kept: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, _ = token.partition("=")
        if token == "--":
            return [*kept, token, *rest], settings
        if not token.startswith("--") or len(token) < 3 or name in own:
            kept.append(token)
            continue
        _check_flag(name, own)
        if not equals and rest and not rest[0].startswith("--") and _takes_value(name, rest[0]):
            token = f"{name}={rest.pop(0)}"
        settings.append(token)
    return kept, settings


def _takes_value(name: str, following: str) -> bool:
    from starling.cli.recipe.schema import Recipe
    from starling.common.settings import is_boolean

    return following.lower() in TRUTH or not is_boolean(Recipe, name[2:].replace("-", "_").split("."))


def _check_flag(name: str, own: Collection[str]) -> None:
    """Raise ConfigError when `name` is a misspelt flag of the command and not a setting without its section."""
    from starling.common.settings import nearest

    like = None if "." in name else nearest(name, sorted(own), cutoff=0.75)
    if like is None:
        return
    from starling.cli.recipe.schema import Recipe
    from starling.common.settings import iter_settings

    if name[2:].replace("-", "_") not in {key.rpartition(".")[2] for key, *_ in iter_settings(Recipe)}:
        raise ConfigError(f"unknown flag {name}; did you mean {like}?")


def _names_no_subcommand(app: App, error: CycloptsError) -> bool:
    """Return whether a flag is missing after a word that is no subcommand, as in `starling deploy kubernetes`."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return False
    _, apps, rest = app.parse_commands([token for token in error.root_input_tokens or () if token])
    has_commands = any(not name.startswith("-") for name in apps[-1])
    takes_words = not error.argument.names[0].startswith("-")
    return has_commands and not takes_words and bool(rest) and not rest[0].startswith("-")


def _raise_unknown_command(app: App, error: CycloptsError) -> NoReturn:
    from starling.common.settings import nearest

    path, apps, rest = app.parse_commands([token for token in error.root_input_tokens or () if token])
    word = next(iter(rest), "")
    known = [name for name in apps[-1] if not name.startswith("-") and apps[-1][name].show]
    like = nearest(word, known)
    hint = f"did you mean {like!r}?" if like else f"known: {', '.join(known)}"
    program = " ".join(("starling", *path))
    raise ConfigError(f"unknown command {word!r}; {hint} ({program} --help lists all)") from None


def _sentence(error: CycloptsError) -> str:
    from starling.common.settings import nearest

    error.verbose = False
    path = [PROGRAMS.get(word, word) for word in error.command_chain or ()]
    program = " ".join(("starling", *path))
    if isinstance(error, UnusedCliTokensError):
        text = f"unexpected argument {(error.unused_tokens or [''])[0]!r}"
    elif isinstance(error, MissingArgumentError) and error.argument is not None:
        parameter = error.argument.parameter
        name = error.argument.names[0]
        if name.startswith("-"):
            flag = "" if program.endswith(f" {name}") else f" {name}"
            text = f"{name} needs a value; write `{program}{flag} {parameter.metavar or 'VALUE'}`"
        else:
            text = f"{name} is missing"
    elif isinstance(error, UnknownOptionError):
        name = (error.token.keyword or error.token.value).partition("=")[0]
        known = [known for argument in error.argument_collection for known in argument.names]
        like = nearest(name, known)
        text = f"unknown flag {name}" + (f"; did you mean {like}?" if like else "")
        if name in known:
            text = f"{name} comes after `--`, where flags end; write it before"
    else:
        text = " ".join(str(error).split())
        text = text[:1].lower() + text[1:].removesuffix(".")
    return f"{text}{' ' if text.endswith('?') else '; '}see {program} --help"

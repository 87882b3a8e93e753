"""Environments by name: loads the one that the settings name, once per replica."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.settings import nearest
from starling.rollout.env.base import Environment
from starling.rollout.settings import EnvironmentSettings

KINDS: Final[dict[str, str]] = {
    "tools": "starling.rollout.env.environments.tools:make_tools",
    "gym": "starling.rollout.env.environments.gym:make_gym",
    "agent": "starling.rollout.env.environments.agent:make_agent",
    "verifiers": "starling.rollout.env.environments.verifiers:make_verifiers",
}
"""Built-in kinds: the function that makes each from the settings and its options. Imported on use."""

if TYPE_CHECKING:
    from starling.rollout.api.server import ApiServer


def _close_nothing() -> None:
    """Default of `LoadedEnvironment.close`."""


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """An environment with what the rollout needs to know about it."""

    environment: Environment
    """With its options bound: it takes an episode only."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions that the model may call, as JSON schemas in OpenAI's form, for the prompt."""
    close: Callable[[], None] = _close_nothing
    """Ends the processes that were started for it."""
    connect: Callable[[ApiServer], None] | None = None
    """Takes the HTTP server before the first episode, for an environment whose programs are its clients."""


def make_environment(settings: EnvironmentSettings) -> LoadedEnvironment | None:
    """Load the environment of `settings`; None without one, where completions are whole trajectories.

    Raises:
        ConfigError: there is no such environment, it cannot be imported, or it does not accept the options.
    """
    kind, options = settings.kind, settings.options
    if not kind:
        return None
    if kind in KINDS:
        make: Callable[..., LoadedEnvironment] = import_object(KINDS[kind], f"Environment {kind!r}, made by")
        check_options(f"Environment {kind!r}", make, (None,), options)
        return make(settings, **options)
    if not is_import_path(kind):
        like = nearest(kind, list(KINDS))
        hint = f"did you mean {like!r}?" if like else f"known are {', '.join(KINDS)}."
        raise ConfigError(
            f"rollout.environment.kind is {kind!r}: {hint} Your own `async def` is named `module:name` or "
            "`path/to/file.py:name`."
        )
    require_no_sandbox(settings)
    found = import_object(kind, "Environment")
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"Environment {kind!r} is not an `async def`: write one that takes an episode.")
    check_options(f"Environment {kind!r}", found, (None,), options)
    return LoadedEnvironment(partial(found, **options))


def require_no_sandbox(settings: EnvironmentSettings) -> None:
    """Raise ConfigError where a sandbox is required of an environment that runs in the rollout's process."""
    if settings.sandbox != "auto":
        raise ConfigError(
            f"rollout.environment.sandbox is {settings.sandbox!r}, but the environment {settings.kind!r} runs in the "
            "rollout's process: take the kind `tools`, `gym` or `agent`, or leave it at 'auto'."
        )


def check_options(title: str, function: Callable[..., Any], positional: tuple[Any, ...], options: Any) -> None:
    """Raise ConfigError when `function` cannot be called with these arguments; does not call it."""
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **options)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [p.name for p in signature.parameters.values() if p.kind in kinds][len(positional) :]
        raise ConfigError(
            f"{title} does not take rollout.environment.options as they are ({error}); its options are: "
            f"{', '.join(names) or 'none'}."
        ) from None

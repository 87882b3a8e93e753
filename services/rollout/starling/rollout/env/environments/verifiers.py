"""The environment `verifiers`: environments of that library, with their rubrics as rewards.

Such an environment calls the model as an OpenAI client; each episode has a client of its own, whose requests are
recorded into the trajectory. Of a prompt it gets the messages, the reference as `answer`, and from the metadata `info`,
`task` and `example_id` if present.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.raised import describe_raised
from starling.common.wire.messages import Status
from starling.rollout.env.base import AgentTask, Episode, EpisodeOutcome, EpisodeOver
from starling.rollout.env.environments.agent import EpisodeEndpoint
from starling.rollout.env.registry import LoadedEnvironment, check_options, require_no_sandbox
from starling.rollout.settings import EnvironmentSettings

_raised: ContextVar[list[str]] = ContextVar("raised")
"""Exceptions of reward functions for the current trajectory, which the library would turn into a reward of 0."""


def make_verifiers(
    settings: EnvironmentSettings, environment: str, *, args: Mapping[str, Any] | None = None
) -> LoadedEnvironment:
    """Create the environment, in the main thread.

    Args:
        settings: those of the environment.
        environment: the id of an installed one, or ``module:function`` or ``path/to/file.py:function`` that returns
            one.
        args: keyword arguments of that function.

    Raises:
        ConfigError: it cannot be created, needs more than single trajectories, or is to be in a sandbox.
    """
    require_no_sandbox(settings)
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            f"rollout.environment.kind = 'verifiers' needs that library ({error}): install starling-rollout[verifiers]."
        ) from None
    with _preserved_signal_handlers():
        made = _make(environment, dict(args or {}))
    title = f"Environment {environment!r}"
    if not isinstance(made, verifiers.Environment):
        raise ConfigError(f"{title} is a {type(made).__name__}: return an environment of `verifiers`.")
    if made.message_type != "chat":
        raise ConfigError(f"{title} has message_type {made.message_type!r}: only conversations (`chat`) are recorded.")
    for rubric in _rubrics(made.rubric):
        for function in rubric.funcs:
            if rubric._is_group_func(function):
                raise ConfigError(
                    f"{title} has the reward function {function.__name__!r} over a whole group, and each trajectory is "
                    "judged by itself: remove it."
                )
        rubric.funcs[:] = map(_recording_exceptions, rubric.funcs)
    endpoint, clients = EpisodeEndpoint(), Clients()
    return LoadedEnvironment(
        partial(play_verifiers, environment=made, endpoint=endpoint, clients=clients), connect=endpoint.connect
    )


class Clients:
    """OpenAI clients that share connections: creating one from scratch takes longer than a short episode."""

    def __init__(self) -> None:
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def of(self, task: AgentTask) -> Any:
        """Return a client with the key of `task`, for the running event loop."""
        import openai

        loop = asyncio.get_running_loop()
        if loop not in self._of_loop:
            self._of_loop[loop] = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, timeout=None)
        return self._of_loop[loop].with_options(api_key=task.api_key)


async def play_verifiers(
    episode: Episode, *, environment: Any, endpoint: EpisodeEndpoint, clients: Clients
) -> EpisodeOutcome:
    """Play one episode, and score it with the rubric."""
    from verifiers.errors import EmptyModelResponseError

    async with endpoint.record(episode) as (task, recording):
        state = await environment.rollout(
            dataset_row(environment, task), clients.of(task), task.model, _sampling_args(environment)
        )
        if recording.problem is not None and not isinstance(recording.problem, EpisodeOver):
            raise recording.problem
        error = state.get("error")
        if isinstance(error, EmptyModelResponseError):
            # An empty reply, which the library rejects; the rubric scores it as it is.
            state["completion"] = [*state["completion"], {"role": "assistant", "content": ""}]
        elif error is not None and recording.problem is None:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            return EpisodeOutcome(status=Status.ENV_ERROR, problem=f"the environment raised {describe_raised(cause)}")
        return await _score(environment, state, recording.num_branches)


async def _score(environment: Any, state: Any, num_branches: int) -> EpisodeOutcome:
    metrics = {"num_branches": float(num_branches)}
    if not environment.score_rollouts:
        return EpisodeOutcome(metrics=metrics)
    raised: list[str] = []
    _raised.set(raised)
    # As a group of one: an environment without a reward function of its own can be scored in no other way.
    await environment.rubric.score_group([state])
    if raised:
        return EpisodeOutcome(status=Status.ENV_ERROR, metrics=metrics, problem=raised[0])
    metrics |= {str(name): float(value) for name, value in (state["metrics"] or {}).items()}
    return EpisodeOutcome(reward=float(state["reward"]), metrics=metrics)


def dataset_row(environment: Any, task: AgentTask) -> dict[str, Any]:
    """Return a prompt as a row of the library's datasets."""
    metadata = task.metadata
    messages: list[dict[str, str]] = list(task.messages)
    if environment.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": environment.system_prompt})
    return {
        "prompt": messages,
        "answer": metadata.get("answer", task.reference),
        "info": metadata.get("info", dict(metadata)),
        "task": metadata.get("task", environment.env_id or "default"),
        "example_id": metadata.get("example_id", 0),
    }


def _make(environment: str, args: dict[str, Any]) -> Any:
    title = f"Environment {environment!r}"
    try:
        if is_import_path(environment):
            function = import_object(environment, "Environment")
            check_options(title, function, (), args)
            return function(**args)
        import verifiers

        return verifiers.load_environment(environment, **args)
    except ConfigError:
        raise
    except Exception as error:  # user code, or a third party's, may raise anything
        raise ConfigError(f"{title} cannot be made: {describe_raised(error)}.") from error


def _sampling_args(environment: Any) -> dict[str, Any]:
    """Return the environment's own sampling parameters that apply: the length of a reply. The run sets the others."""
    longest = environment.sampling_args.get("max_tokens")
    return {} if longest is None else {"max_tokens": longest}


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield the rubrics that hold functions."""
    inner = [*getattr(rubric, "rubrics", ()), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    if not inner:
        yield rubric
    for one in inner:
        yield from _rubrics(one)


def _recording_exceptions(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function to record its exceptions in `_raised`: a failure is not a reward of 0."""

    @functools.wraps(function)
    async def wrapper(*positional: Any, **named: Any) -> Any:
        try:
            value = function(*positional, **named)
            return await value if inspect.isawaitable(value) else value
        except Exception as error:  # raised again; a user's function may raise anything
            name = getattr(function, "__name__", repr(function))
            _raised.get([]).append(f"the reward function {name!r} raised {describe_raised(error)}")
            raise

    return wrapper


@contextmanager
def _preserved_signal_handlers() -> Iterator[None]:
    """Restore the process's signal handlers: an environment replaces them when it is created, and would end the process
    without a graceful shutdown."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("an environment of `verifiers` can be created in the main thread only")
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)

"""The environment `agent`: a user's program that calls the model as an OpenAI client.

The program needs no knowledge of training. It gets an address and an API key, one key per episode: requests with that
key are recorded into the episode's trajectory (`starling.rollout.api.recording`).

    async def program(task: AgentTask) -> float:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        answer = await client.chat.completions.create(model=task.model, messages=task.messages)
        return float(answer.choices[0].message.content == task.reference)
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.rollout.env.base import Episode, EpisodeOutcome, EpisodeOver
from starling.rollout.env.episodes.episode import EpisodeError, TokenEpisode
from starling.rollout.env.registry import LoadedEnvironment, check_options, require_no_sandbox
from starling.rollout.settings import EnvironmentSettings

if TYPE_CHECKING:
    from starling.rollout.api.recording import Recording
    from starling.rollout.api.server import ApiServer


@dataclass(frozen=True, slots=True)
class AgentTask:
    """Argument of a program."""

    base_url: str
    """Address for an OpenAI client, ending in ``/v1``."""
    api_key: str
    """The key of this episode; revoked when the program has ended."""
    model: str
    """Name of the model; requests may name any."""
    messages: list[dict[str, str]]
    """The prompt as a conversation; a prompt of plain text is one user message."""
    reference: str
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The dataset row's other columns."""
    index: int = 0
    """Index of this trajectory in its group, from 0."""


@dataclass(slots=True)
class EpisodeEndpoint:
    """Access of episodes to the HTTP server, which starts after the environment is loaded."""

    server: ApiServer | None = None

    def connect(self, server: ApiServer) -> None:
        """Set the server, before the first episode."""
        self.server = server

    @asynccontextmanager
    async def record(self, episode: Episode) -> AsyncIterator[tuple[AgentTask, Recording]]:
        """Record the requests with the task's key into `episode`."""
        assert self.server is not None, "the server starts before the first episode"
        assert isinstance(episode, TokenEpisode), "a recording needs tokens"
        if episode.prompt.media:
            raise EpisodeError("an agent cannot be given images or videos: use a dataset of text")
        recording = self.server.recording(episode)
        key = self.server.keys.issue(recording)
        try:
            yield _task(episode, self.server, key), recording
        finally:
            self.server.keys.revoke(key)
            await recording.close()


def make_agent(
    settings: EnvironmentSettings,
    program: str,
    *,
    args: Mapping[str, Any] | None = None,
    limit_reward: float | None = 0.0,
) -> LoadedEnvironment:
    """Create the environment.

    Args:
        settings: those of the environment.
        program: ``module:function`` or ``path/to/file.py:function`` that takes an `AgentTask`: an ``async def``, or a
            plain function, which runs in a thread of its own. It returns the reward, an `EpisodeOutcome`, or None.
        args: further keyword arguments of the function.
        limit_reward: reward of a trajectory whose program ended because the episode had no turn or token left.

    Raises:
        ConfigError: the function cannot be imported or does not accept the arguments.
    """
    require_no_sandbox(settings)
    function = import_object(program, "Agent")
    if not callable(function):
        raise ConfigError(f"Agent {program!r} is a {type(function).__name__}: name a function.")
    check_options(f"Agent {program!r}", function, (None,), dict(args or {}))
    endpoint, bound = EpisodeEndpoint(), partial(function, **(args or {}))
    play = partial(play_agent, program=bound, endpoint=endpoint, limit_reward=limit_reward)
    return LoadedEnvironment(play, connect=endpoint.connect)


async def play_agent(
    episode: Episode, *, program: Callable[[AgentTask], Any], endpoint: EpisodeEndpoint, limit_reward: float | None
) -> Any:
    """Play one episode: run the program to its end."""
    async with endpoint.record(episode) as (task, recording):
        try:
            given = await (program(task) if inspect.iscoroutinefunction(program) else _in_thread(program, task))
        except Exception:
            # Clients wrap errors in their own: the recording knows whether the episode was over, or the engine failed.
            if isinstance(recording.problem, EpisodeOver):
                given = limit_reward
            elif recording.problem is not None:
                raise recording.problem from None
            else:
                raise
    return add_branch_metric(given, recording)


def add_branch_metric(given: Any, recording: Recording) -> Any:
    """Return a program's result with the number of its conversations added to the metrics."""
    if not isinstance(given, EpisodeOutcome):
        if given is not None and not isinstance(given, int | float):
            return given
        given = EpisodeOutcome(reward=None if given is None else float(given))
    metrics = {"num_branches": float(recording.num_branches), **given.metrics}
    return EpisodeOutcome(given.reward, metrics, given.status, given.problem)


async def _in_thread(program: Callable[[AgentTask], Any], task: AgentTask) -> Any:
    """Run a plain function in a thread of its own, so that one that hangs blocks only its episode."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return  # cancelled
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, problem = None, None
        try:
            value = program(task)
        except BaseException as error:  # noqa: BLE001 - the edge: user code may raise anything, even SystemExit
            problem = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        try:
            loop.call_soon_threadsafe(settle, value, problem)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await done


def _task(episode: TokenEpisode, server: ApiServer, key: str) -> AgentTask:
    prompt = episode.prompt
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return AgentTask(
        base_url=server.base_url,
        api_key=key,
        model=server.model,
        messages=messages or [{"role": "user", "content": prompt.text}],
        reference=prompt.reference,
        metadata=prompt.metadata,
        index=episode.index,
    )

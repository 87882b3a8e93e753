"""The environment `agent`: a program of the user's that talks to the model as an OpenAI client.

The program knows nothing of training. It is given an address and a key, and each episode has a key of its own: what is
asked for with it is recorded into the episode's trajectory (`starling.rollout.api.recording`).

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
from starling.rollout.env.registry import LoadedEnvironment, check_options

if TYPE_CHECKING:
    from starling.rollout.api.recording import Recording
    from starling.rollout.api.server import ApiServer


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What a program is given."""

    base_url: str
    """Address for an OpenAI client, ending in ``/v1``."""
    api_key: str
    """The key of this episode; not valid any more when the program has ended."""
    model: str
    """Name of the model, which is not looked at."""
    messages: list[dict[str, str]]
    """The prompt, as a conversation; a prompt of plain text is one message of the user."""
    reference: str
    """The reference answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the dataset has besides."""
    index: int = 0
    """Which of the trajectories of its group this is, from 0."""


@dataclass(slots=True)
class EpisodeEndpoint:
    """The way from an episode to the endpoint, which is there only when the replica runs."""

    server: ApiServer | None = None

    def connect(self, server: ApiServer) -> None:
        """Take `server` for all episodes."""
        self.server = server

    @asynccontextmanager
    async def record(self, episode: Episode) -> AsyncIterator[tuple[AgentTask, Recording]]:
        """Record what is asked for with the key of the task into `episode`."""
        assert self.server is not None, "the endpoint is there before the first episode"
        assert isinstance(episode, TokenEpisode), "recording knows of tokens"
        if episode.prompt.media:
            raise EpisodeError("an agent cannot be given images or videos: use a dataset of text")
        recording = self.server.recording(episode)
        key = self.server.keys.open(recording)
        try:
            yield _task(episode, self.server, key), recording
        finally:
            self.server.keys.close(key)
            await recording.close()


def make_agent(
    program: str, *, args: Mapping[str, Any] | None = None, limit_reward: float | None = 0.0
) -> LoadedEnvironment:
    """Make the environment.

    Args:
        program: ``module:function`` or ``path/to/file.py:function`` that takes an `AgentTask`: an ``async def``, or a
            plain function, which is called in a thread of its own. It returns the reward, an `EpisodeOutcome`, or
            nothing.
        args: what it takes by name besides.
        limit_reward: reward of a trajectory whose program ended because the episode had no turn or token left.

    Raises:
        ConfigError: it cannot be imported, or not be called so.
    """
    function = import_object(program, "Agent")
    if not callable(function):
        raise ConfigError(f"Agent {program!r} is a {type(function).__name__}: name a function.")
    check_options(f"Agent {program!r}", function, (None,), dict(args or {}))
    line, bound = EpisodeEndpoint(), partial(function, **(args or {}))
    play = partial(play_agent, program=bound, line=line, limit_reward=limit_reward)
    return LoadedEnvironment(play, connect=line.connect)


async def play_agent(
    episode: Episode, *, program: Callable[[AgentTask], Any], line: EpisodeEndpoint, limit_reward: float | None
) -> Any:
    """Play one episode: run the program to its end."""
    async with line.record(episode) as (task, recording):
        try:
            given = await (program(task) if inspect.iscoroutinefunction(program) else _in_thread(program, task))
        except Exception:
            # Whatever a client makes of it: that the episode is over is no failure, and one of the engine's is not the
            # program's.
            if isinstance(recording.problem, EpisodeOver):
                given = limit_reward
            elif recording.problem is not None:
                raise recording.problem from None
            else:
                raise
    return with_branches(given, recording)


def with_branches(given: Any, recording: Recording) -> Any:
    """Return what a program gave, with how many conversations it had in its metrics."""
    if not isinstance(given, EpisodeOutcome):
        if given is not None and not isinstance(given, int | float):
            return given
        given = EpisodeOutcome(reward=None if given is None else float(given))
    metrics = {"num_branches": float(recording.num_branches), **given.metrics}
    return EpisodeOutcome(given.reward, metrics, given.status, given.problem)


async def _in_thread(program: Callable[[AgentTask], Any], task: AgentTask) -> Any:
    """Call a plain function in a thread of its own: one that never returns keeps nobody waiting but its episode."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return  # cancelled: nobody asks any more
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, problem = None, None
        try:
            value = program(task)
        except BaseException as error:  # noqa: BLE001 - the edge: a user's code may raise anything, even SystemExit
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

"""The environment `agent`: a user's program that calls the model as an OpenAI client.

The program needs no knowledge of training. It gets an address and an API key, one key per episode: requests with that
key are recorded into the episode's trajectory (`starling.rollout.api.recording`).

    async def program(task: AgentTask) -> float:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        answer = await client.chat.completions.create(model=task.model, messages=task.messages)
        return float(answer.choices[0].message.content == task.reference)
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starling.rollout.env.base import AgentTask, Episode, EpisodeOutcome, EpisodeOver
from starling.rollout.env.episodes.episode import EpisodeError, TokenEpisode
from starling.rollout.env.registry import LoadedEnvironment
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError
from starling.rollout.settings import EnvironmentSettings

if TYPE_CHECKING:
    from starling.rollout.api.recording import Recording
    from starling.rollout.api.server import ApiServer


@dataclass(slots=True)
class EpisodeEndpoint:
    """Access of episodes to the HTTP server, which starts after the environment is loaded."""

    server: ApiServer | None = None
    listener: socket.socket | None = None
    """Where programs in a sandbox reach the server, if not at its own address."""

    def connect(self, server: ApiServer) -> None:
        """Set the server, before the first episode."""
        self.server = server
        if self.listener is not None:
            server.listen_also(self.listener)

    def listen(self, listener: socket.socket) -> None:
        """Let the server accept connections at `listener` too, as soon as there is one."""
        self.listener = listener
        if self.server is not None:
            self.server.listen_also(listener)

    @property
    def base_url(self) -> str:
        """The server's base URL as seen by programs."""
        assert self.server is not None, "the server starts before the first episode"
        if self.listener is None:
            return self.server.base_url
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"

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
            yield _task(episode, self.server, self.base_url, key), recording
        finally:
            self.server.keys.revoke(key)
            await recording.close()


def make_agent(
    settings: EnvironmentSettings,
    program: str,
    *,
    args: Mapping[str, Any] | None = None,
    limit_reward: float | None = 0.0,
    max_processes: int = 256,
    memory_mb: int = 8192,
    import_s: float = 60.0,
) -> LoadedEnvironment:
    """Create the environment.

    Args:
        settings: those of the environment, for the sandbox.
        program: ``module:function`` or ``path/to/file.py:function`` that takes an `AgentTask`: an ``async def`` or a
            plain function. Each episode calls it in a process of its own. It returns the reward, an `EpisodeOutcome`,
            or None.
        args: further keyword arguments of the function.
        limit_reward: reward of a trajectory whose program ended because the episode had no turn or token left.
        max_processes: limit on concurrent episodes in this replica; further ones wait.
        memory_mb: limit on the address space of each process, in MiB.
        import_s: limit on the time of the import.

    Raises:
        ConfigError: the function cannot be imported or does not accept the arguments.
    """
    endpoint = EpisodeEndpoint()
    sandbox = Sandbox(
        [program],
        what="Agent",
        memory_mb=memory_mb,
        max_processes=max_processes,
        import_s=import_s,
        level=settings.sandbox,
        needs=settings.needs,
        arguments=tuple(args or {}),
        on_listener=endpoint.listen,
    )
    bound = dict(args or {})
    play = partial(play_agent, sandbox=sandbox, args=bound, endpoint=endpoint, limit_reward=limit_reward)
    return LoadedEnvironment(play, close=sandbox.close, connect=endpoint.connect)


async def play_agent(
    episode: Episode,
    *,
    sandbox: Sandbox,
    args: Mapping[str, Any],
    endpoint: EpisodeEndpoint,
    limit_reward: float | None,
) -> Any:
    """Play one episode: run the program to its end."""
    async with endpoint.record(episode) as (task, recording):
        try:
            async with sandbox.session() as session:
                given = await session.play(0, task, args)
        except SandboxError:
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


def _task(episode: TokenEpisode, server: ApiServer, base_url: str, key: str) -> AgentTask:
    prompt = episode.prompt
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    return AgentTask(
        base_url=base_url,
        api_key=key,
        model=server.model,
        messages=messages or [{"role": "user", "content": prompt.text}],
        reference=prompt.reference,
        metadata=dict(prompt.metadata),
        index=episode.index,
    )

"""Runner of a replica's episodes, in an event loop of its own, next to the engine's thread.

engine's thread:   begin ─────────> episodes ──reply──> EngineQueue ──> engine     cancel, expire
event loop:                            └──> PlayedGroup ──put──> inbox of the engine's thread

An environment is user code, and its failures cost only its own trajectory: an exception, a timeout, a result of a
wrong type. `expire` notices from outside when an environment blocks the event loop; the runner then abandons that loop
and starts a new one.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Final

import structlog

from starling.common.counts import counted
from starling.common.raised import describe_raised
from starling.common.ranges import MAX_METRIC_CHARACTERS, MAX_METRICS
from starling.common.wire.messages import Status, Wait
from starling.rollout.engine.base import RequestError
from starling.rollout.engine.preparation import PreparedPrompt
from starling.rollout.engine.queue import EngineQueue, GenerationError, QueueClosedError
from starling.rollout.env.base import EpisodeOutcome, EpisodeOver
from starling.rollout.env.episodes.episode import EpisodeTask, TokenEpisode, generate_through
from starling.rollout.env.episodes.trajectory import EndedEpisode, PlayedGroup, failed_episode, group_trajectories
from starling.rollout.env.registry import LoadedEnvironment
from starling.rollout.env.sandbox.messages import PROBLEM_CHARS
from starling.rollout.env.timeouts import PausableClock, PausableTimeouts
from starling.rollout.settings import EnvironmentSettings

log = structlog.get_logger(__name__)

MAX_SHOWN: Final = 80
"""Characters of a wrong value in a sentence."""
GRACE_S: Final = 5.0
"""How long after its time limit an episode may take to end, before its event loop counts as blocked."""
STOP_S: Final = 2.0
"""How long the event loop may take to end when the process ends."""


@dataclass(slots=True)
class _EpisodeGroup:
    """The episodes of one lease."""

    task: EpisodeTask
    begun_at: float
    """By the runner's pausable clock."""
    min_version: int
    num_completions: int
    loop: asyncio.AbstractEventLoop
    limits: PausableTimeouts
    future: Future[None] = field(init=False)
    timed_out: bool = False


class EpisodeRunner:
    """Plays the episodes of groups. Created, called and closed by one thread.

    Args:
        settings: limits of an episode.
        environment: the environment.
        tokenizer: the model's; the runner uses a copy, since a tokenizer is not thread-safe.
        engine_queue: the request queue of the engine.
        put: takes each `PlayedGroup`, from the event loop.
        max_model_len: limit on the tokens of a sequence.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        environment: LoadedEnvironment,
        tokenizer: Any,
        engine_queue: EngineQueue,
        put: Callable[[object], None],
        *,
        max_model_len: int,
    ) -> None:
        self._settings, self._environment, self._engine_queue = settings, environment, engine_queue
        self.tokenizer = tokenizer
        self._tokenizer = copy.deepcopy(tokenizer)
        self._put, self._max_model_len = put, max_model_len
        self._groups: dict[str, _EpisodeGroup] = {}
        self._closed = False
        self._loop = _start_loop()
        self._limits, self._clock = PausableTimeouts(), PausableClock()
        self._paused = False

    def begin(self, prepared: PreparedPrompt) -> None:
        """Play the episodes of a group whose prompt is prepared; puts a `PlayedGroup` when all have ended."""
        message, settings = prepared.message, self._settings
        task = EpisodeTask(
            lease=message.lease,
            prompt=message.prompt,
            prompt_ids=prepared.ids,
            sampling=message.sampling,
            max_turns=settings.max_turns,
            turn_max_tokens=settings.turn_max_tokens,
            max_model_len=self._max_model_len,
            max_branches=settings.max_branches,
            tools=self._environment.tools,
            tensors=prepared.tensors,
        )
        begun_at, version = self._clock.at(time.monotonic()), message.min_version
        group = _EpisodeGroup(task, begun_at, version, message.num_completions, self._loop, self._limits)
        self._groups[message.lease] = group
        group.future = asyncio.run_coroutine_threadsafe(self._play_group(group), self._loop)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the time limits of episodes: they do not count while no engine could generate."""
        if self._clock.set_paused(paused, time.monotonic()):
            self._paused = paused
            of_loops = {group.loop: group.limits for group in self._groups.values()} | {self._loop: self._limits}
            for loop, limits in of_loops.items():
                loop.call_soon_threadsafe(limits.set_paused, paused)

    def take(self, lease: str) -> bool:
        """Remove the group of `lease`; returns False when it was cancelled, so that its result is to be dropped."""
        return self._groups.pop(lease, None) is not None

    def cancel(self, lease: str) -> None:
        """Cancel the episodes of a group."""
        group = self._groups.pop(lease, None)
        if group is not None:
            group.future.cancel()

    def cancel_all(self) -> list[str]:
        """Cancel all groups; return their leases."""
        leases = list(self._groups)
        for lease in leases:
            self.cancel(lease)
        return leases

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Put groups as failed whose event loop is blocked beyond their time limit; returns no failed leases."""
        limit_s, now = self._settings.timeout_s, self._clock.at(now)
        for lease, group in self._groups.items():
            if group.timed_out or now - group.begun_at <= limit_s + GRACE_S:
                continue
            group.timed_out = True
            log.warning("environment_stuck", lease=lease)
            if group.loop is self._loop:
                self._loop, self._limits = _start_loop(), PausableTimeouts(paused=self._paused)
            problem = f"the environment took longer than {limit_s:g} s and could not be stopped: it must not block"
            self._put(_played_group(group, [failed_episode(problem)] * group.num_completions))
        return []

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return the wait for episodes at `now`, since the oldest group began."""
        if not self._groups:
            return ()
        since_s = self._clock.at(now) - min(group.begun_at for group in self._groups.values())
        left_s = max(0.0, self._settings.timeout_s + GRACE_S - since_s)
        what = f"episodes of {counted(len(self._groups), 'group')}"
        return (Wait(what=what, on="environment", since_s=max(0.0, since_s), seconds_left=left_s),)

    def close(self) -> None:
        """Cancel all episodes and close the environment. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.cancel_all()
        ended, cancelling = threading.Event(), list[asyncio.Task[None]]()  # a loop holds only weak references to tasks
        self._loop.call_soon_threadsafe(lambda: cancelling.append(self._loop.create_task(_cancel_all(ended))))
        if not ended.wait(STOP_S):  # a blocked loop dies with the process
            log.warning("environment_stuck")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._environment.close()

    # --- in the event loop -------------------------------------------------------------------------------------------

    async def _play_group(self, group: _EpisodeGroup) -> None:
        try:
            episodes = await asyncio.gather(*(self._play(group, index) for index in range(group.num_completions)))
        except QueueClosedError:  # the replica leaves and returns its leases
            return
        self._put(_played_group(group, episodes))

    async def _play(self, group: _EpisodeGroup, index: int) -> EndedEpisode:
        """Play one episode to its end, however it ends."""
        task = group.task
        episode = TokenEpisode(task, index, self._tokenizer, partial(generate_through, self._engine_queue))
        limit_s, own = self._settings.timeout_s, asyncio.current_task()
        try:
            async with group.limits.within(limit_s) as limit:
                given: object = await self._environment.environment(episode)
            return episode.end(outcome_of(given))
        except EpisodeOver:
            return episode.end(EpisodeOutcome())
        except (GeneratorExit, QueueClosedError):
            raise
        except GenerationError as error:
            return episode.end(EpisodeOutcome(status=Status.INFRA_LOST, problem=str(error)))
        except RequestError as error:
            return episode.end(EpisodeOutcome(status=Status.ENV_ERROR, problem=str(error)))
        except BaseException as error:  # the edge: user code may raise anything, even SystemExit
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                problem = f"the environment took longer than {limit_s:g} s"
            else:
                log.warning("environment_failed", lease=task.lease, index=index, exc_info=error)
                problem = f"the environment raised {describe_raised(error)}"
            return episode.end(EpisodeOutcome(status=Status.ENV_ERROR, problem=problem))


def outcome_of(given: object) -> EpisodeOutcome:
    """Convert what an environment returned to an `EpisodeOutcome`; an invalid result is a failure."""
    if given is None:
        return EpisodeOutcome()
    if isinstance(given, Real) and not isinstance(given, EpisodeOutcome):
        given = EpisodeOutcome(reward=float(given))
    if not isinstance(given, EpisodeOutcome):
        problem = f"the environment returned a {type(given).__name__}: return a number, an EpisodeOutcome or None"
        return EpisodeOutcome(status=Status.ENV_ERROR, problem=problem)
    if problem := metrics_problem(given.metrics):
        return EpisodeOutcome(status=Status.ENV_ERROR, problem=problem)
    numbers = {"the reward": given.reward, **{f"the metric {name!r}": one for name, one in given.metrics.items()}}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            problem = f"the environment returned {repr(value)[:MAX_SHOWN]} as {name}: return a finite number"
            return EpisodeOutcome(status=Status.ENV_ERROR, problem=problem)
    reward = None if given.reward is None else float(given.reward)
    metrics = {str(name): float(value) for name, value in given.metrics.items()}
    return EpisodeOutcome(reward, metrics, given.status, given.problem[:PROBLEM_CHARS])


def metrics_problem(metrics: Mapping[str, float]) -> str:
    """Return why an environment may not return `metrics`; empty if it may."""
    if len(metrics) > MAX_METRICS:
        return f"the environment returned {len(metrics)} metrics: return at most {MAX_METRICS}"
    longest = max([len(str(name)) for name in metrics], default=0)
    if longest > MAX_METRIC_CHARACTERS:
        return (
            f"the environment returned a metric whose name has {longest} characters: use at most "
            f"{MAX_METRIC_CHARACTERS}"
        )
    return ""


def _played_group(group: _EpisodeGroup, episodes: list[EndedEpisode]) -> PlayedGroup:
    task = group.task
    return group_trajectories(
        task.lease,
        task.prompt_ids,
        episodes,
        temperature=task.sampling.temperature,
        min_version=group.min_version,
        tensors=task.tensors,
    )


async def _cancel_all(ended: threading.Event) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    ended.set()


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name="episodes", daemon=True).start()
    return loop

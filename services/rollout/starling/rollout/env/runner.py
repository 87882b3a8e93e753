"""The episodes of a replica, in an event loop of their own, beside the thread that holds the engine.

holder's thread:   begin ─────────> episodes ──reply──> door ──> engine     forget, expire
event loop:                            └──> Played ──put──> holder's inbox

An environment is the user's code, and what it does wrong costs its own trajectory: an exception, a time too long, a
result that is none. One that blocks the loop itself is noticed from outside, by `expire`; the loop is then left to
itself, and a new one goes on.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Final

import structlog

from starling.common.wire.messages import Status, Wait
from starling.rollout.engine.base import RequestError
from starling.rollout.env.base import EpisodeOutcome, EpisodeOver
from starling.rollout.env.episodes.episode import EpisodeTask, TokenEpisode, ask_through
from starling.rollout.env.episodes.trajectory import EndedEpisode, PlayedGroup, gather
from starling.rollout.env.registry import LoadedEnvironment
from starling.rollout.env.sandbox.fork_server import describe
from starling.rollout.env.timeouts import PausableClock, PausableTimeouts
from starling.rollout.settings import EnvironmentSettings
from starling.rollout.shell.preparation import PreparedPrompt
from starling.rollout.shell.request_queue import EngineQueue, GenerationError, QueueClosedError

log = structlog.get_logger(__name__)

GRACE_S: Final = 5.0
"""How long after its time an episode may take to end, before its loop is taken to be stuck."""
STOP_S: Final = 2.0
"""How long the loop may take to end at the end of the process."""


@dataclass(slots=True)
class _Group:
    """The episodes of one lease."""

    task: EpisodeTask
    begun_at: float
    """As the runner's clock of usable time showed it."""
    min_version: int
    num_completions: int
    loop: asyncio.AbstractEventLoop
    limits: PausableTimeouts
    future: Future[None] = field(init=False)
    given_up: bool = False


class EpisodeRunner:
    """Plays the episodes of groups. Made, called and closed by one thread.

    Args:
        settings: bounds of an episode.
        chosen: the environment.
        tokenizer: the model's; a copy is used, for one tokenizer does not stand two threads.
        door: to the engine.
        put: takes each `PlayedGroup`, from the event loop.
        max_model_len: most tokens of a sequence.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        chosen: LoadedEnvironment,
        tokenizer: Any,
        door: EngineQueue,
        put: Callable[[object], None],
        *,
        max_model_len: int,
    ) -> None:
        self._settings, self._chosen, self._door = settings, chosen, door
        self.tokenizer = tokenizer
        self._tokenizer = copy.deepcopy(tokenizer)
        self._put, self._max_model_len = put, max_model_len
        self._groups: dict[str, _Group] = {}
        self._closed = False
        self._loop = _start_loop()
        self._limits, self._time = PausableTimeouts(), PausableClock()
        self._held = False

    def begin(self, prepared: PreparedPrompt) -> None:
        """Play the episodes of a group whose prompt is prepared; `PlayedGroup` is put when all have ended."""
        message, settings = prepared.message, self._settings
        task = EpisodeTask(
            lease=message.lease,
            prompt=message.prompt,
            prompt_ids=prepared.ids,
            sampling=message.sampling,
            max_turns=settings.max_turns,
            turn_max_tokens=settings.turn_max_tokens,
            max_model_len=self._max_model_len,
            tools=self._chosen.tools,
            tensors=prepared.tensors,
        )
        begun_at, version = self._time.at(time.monotonic()), message.min_version
        group = _Group(task, begun_at, version, message.num_completions, self._loop, self._limits)
        self._groups[message.lease] = group
        group.future = asyncio.run_coroutine_threadsafe(self._play_group(group), self._loop)

    def hold(self, held: bool) -> None:
        """Let the time of episodes count no more, while there is no engine that could generate for them, or again."""
        if self._time.hold(held, time.monotonic()):
            self._held = held
            of_loops = {group.loop: group.limits for group in self._groups.values()} | {self._loop: self._limits}
            for loop, limits in of_loops.items():
                loop.call_soon_threadsafe(limits.hold, held)

    def take(self, lease: str) -> bool:
        """Return whether what was put for `lease` is still wanted; it is not again."""
        return self._groups.pop(lease, None) is not None

    def forget(self, lease: str) -> None:
        """Want a group no longer: its environments are cancelled."""
        group = self._groups.pop(lease, None)
        if group is not None:
            group.future.cancel()

    def forget_all(self) -> list[str]:
        """Want no group any longer; return their leases."""
        leases = list(self._groups)
        for lease in leases:
            self.forget(lease)
        return leases

    def expire(self, now: float) -> list[tuple[str, str]]:
        """Put the groups as failures whose loop does not even notice that their time is over; no lease fails itself."""
        limit_s, now = self._settings.timeout_s, self._time.at(now)
        for lease, group in self._groups.items():
            if group.given_up or now - group.begun_at <= limit_s + GRACE_S:
                continue
            group.given_up = True
            log.warning("environment_stuck", lease=lease)
            if group.loop is self._loop:
                self._loop, self._limits = _start_loop(), PausableTimeouts(held=self._held)
            problem = f"the environment took longer than {limit_s:g} s and could not be stopped: it must not block"
            self._put(_gathered(group, [_failure(problem)] * group.num_completions))
        return []

    def waits(self, now: float) -> tuple[Wait, ...]:
        """Return what is waited for at `now`: the group that began first."""
        if not self._groups:
            return ()
        since_s = self._time.at(now) - min(group.begun_at for group in self._groups.values())
        left_s = max(0.0, self._settings.timeout_s + GRACE_S - since_s)
        what = f"episodes of {len(self._groups)} groups"
        return (Wait(what=what, on="environment", since_s=max(0.0, since_s), seconds_left=left_s),)

    def close(self) -> None:
        """Cancel everything, and end what the environment started. A second call changes nothing."""
        if self._closed:
            return
        self._closed = True
        self.forget_all()
        ended, cancelling = threading.Event(), list[asyncio.Task[None]]()  # a loop keeps no task that nobody refers to
        self._loop.call_soon_threadsafe(lambda: cancelling.append(self._loop.create_task(_cancel_all(ended))))
        if not ended.wait(STOP_S):  # a loop that is stuck dies with the process
            log.warning("environment_stuck")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._chosen.close()

    # --- in the event loop -------------------------------------------------------------------------------------------

    async def _play_group(self, group: _Group) -> None:
        try:
            episodes = await asyncio.gather(*(self._play(group, index) for index in range(group.num_completions)))
        except QueueClosedError:  # the replica leaves, and its leases go back
            return
        self._put(_gathered(group, episodes))

    async def _play(self, group: _Group, index: int) -> EndedEpisode:
        """Play one episode to its end, whatever that is."""
        task = group.task
        episode = TokenEpisode(task, index, self._tokenizer, partial(ask_through, self._door))
        limit_s, own = self._settings.timeout_s, asyncio.current_task()
        try:
            async with group.limits.within(limit_s) as limit:
                given: object = await self._chosen.environment(episode)
            return episode.end(outcome_of(given))
        except EpisodeOver:
            return episode.end(EpisodeOutcome())
        except (GeneratorExit, QueueClosedError):
            raise
        except GenerationError as error:
            return episode.end(EpisodeOutcome(status=Status.INFRA_LOST, problem=str(error)))
        except RequestError as error:
            return episode.end(EpisodeOutcome(status=Status.ENV_ERROR, problem=str(error)))
        except BaseException as error:  # the edge: a user's code may raise anything, even SystemExit
            if isinstance(error, asyncio.CancelledError) and own is not None and own.cancelling():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                problem = f"the environment took longer than {limit_s:g} s"
            else:
                log.warning("environment_failed", lease=task.lease, index=index, exc_info=error)
                problem = f"the environment raised {describe(error)}"
            return episode.end(EpisodeOutcome(status=Status.ENV_ERROR, problem=problem))


def outcome_of(given: object) -> EpisodeOutcome:
    """Return what an environment returned as an `EpisodeOutcome`; one that is none is a failure."""
    if given is None:
        return EpisodeOutcome()
    if isinstance(given, Real) and not isinstance(given, EpisodeOutcome):
        given = EpisodeOutcome(reward=float(given))
    if not isinstance(given, EpisodeOutcome):
        problem = f"the environment returned a {type(given).__name__}: return a number, an Outcome or None"
        return EpisodeOutcome(status=Status.ENV_ERROR, problem=problem)
    numbers = {"the reward": given.reward, **{f"the metric {name!r}": one for name, one in given.metrics.items()}}
    for name, value in numbers.items():
        if value is not None and not (isinstance(value, Real) and math.isfinite(value)):
            problem = f"the environment returned {value!r} as {name}: return a finite number"
            return EpisodeOutcome(status=Status.ENV_ERROR, problem=problem)
    reward = None if given.reward is None else float(given.reward)
    metrics = {str(name): float(value) for name, value in given.metrics.items()}
    return EpisodeOutcome(reward, metrics, given.status, given.problem)


def _gathered(group: _Group, episodes: list[EndedEpisode]) -> PlayedGroup:
    task = group.task
    return gather(
        task.lease,
        task.prompt_ids,
        episodes,
        temperature=task.sampling.temperature,
        min_version=group.min_version,
        tensors=task.tensors,
    )


def _failure(problem: str) -> EndedEpisode:
    return EndedEpisode([], [], [], [], [], Status.ENV_ERROR, problem=problem)


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

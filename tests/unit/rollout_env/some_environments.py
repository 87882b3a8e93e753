"""User environments, some of which misbehave."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starling.rollout.env.base import Episode, EpisodeOutcome

SEEN: list[str] = []


async def two_turns(episode: Episode, *, word: str = "try again", reward: float = 1.0) -> EpisodeOutcome:
    await episode.reply(max_tokens=6)
    episode.say({"role": "user", "content": word})
    await episode.reply(max_tokens=5)
    return EpisodeOutcome(reward=reward + episode.index, metrics={"turns": episode.num_turns})


async def forever(episode: Episode) -> None:
    while True:
        await episode.reply(max_tokens=2)


async def raises(episode: Episode) -> None:
    await episode.reply(max_tokens=2)
    if episode.index == 1:
        raise KeyError("map")


async def exits(episode: Episode) -> None:
    raise SystemExit(3)


async def cancels_its_own(episode: Episode) -> None:
    task = asyncio.create_task(episode.reply())
    task.cancel()
    await task


async def sleeps(episode: Episode) -> None:
    await episode.reply(max_tokens=2)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        SEEN.append("cancelled")
        raise


async def blocks(episode: Episode) -> None:
    SEEN.append("blocked")
    time.sleep(3600)


async def returns_text(episode: Episode) -> Any:
    await episode.reply(max_tokens=2)
    return "fine"


async def returns_nan(episode: Episode) -> float:
    await episode.reply(max_tokens=2)
    return float("nan")


async def measures(episode: Episode, *, num_metrics: int, num_characters: int) -> EpisodeOutcome:
    """Metrics whose names have characters of four bytes each."""
    await episode.reply(max_tokens=2)
    return EpisodeOutcome(metrics={f"{n:\U0001f600>{num_characters}}": 1.0 for n in range(num_metrics)})


async def stops(episode: Episode, *, stop: list[str]) -> int:
    """Reward: the tokens of the first reply."""
    reply = await episode.reply(stop=stop)
    return len(reply.token_ids)


async def speaks_wrongly(episode: Episode) -> None:
    episode.say_text("so")
    episode.say({"role": "user", "content": "x"})


def no_coroutine(episode: Episode) -> None:
    pass

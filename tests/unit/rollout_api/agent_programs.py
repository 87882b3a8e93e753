"""Programs written against OpenAI's client, as a user would write them: none knows of training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

from starling.rollout.env.base import EpisodeOutcome
from starling.rollout.env.environments.agent import AgentTask

TOLD: dict[int, list[str]] = {}
"""What each program was told, by the index of its trajectory."""


def client_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def converse(task: AgentTask, *, turns: int = 3) -> float:
    """Talk in several turns, and add an own system message; a reply that goes back is stripped, as some clients do."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}, *task.messages]
    told = TOLD[task.index] = []
    async with client_of(task) as client:
        for turn in range(turns):
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, max_completion_tokens=6, temperature=0.3
            )
            assert answer.starling["overruled"] == ["temperature"]  # type: ignore[attr-defined]
            told.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": told[-1].strip()})
            messages.append({"role": "user", "content": f"and {turn}?"})
    return float(len(told))


def plain(task: AgentTask) -> None:
    """Talk without asyncio, and stream."""
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        pieces = client.chat.completions.create(
            model=task.model,
            messages=task.messages,
            max_tokens=5,
            stream=True,  # type: ignore[arg-type]
        )
        TOLD[task.index] = ["".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)]


async def branching(task: AgentTask) -> EpisodeOutcome:
    """Say something, ask twice for the next reply, go on from the first one, and have a word with somebody else."""
    first: list[Any] = list(task.messages)
    async with client_of(task) as client:

        async def ask(messages: list[Any]) -> str:
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
            return answer.choices[0].message.content or ""

        one = await ask(first)
        second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "next"}]
        two, other = await asyncio.gather(ask(second), ask(second))
        beside = await ask([{"role": "user", "content": "who are you?"}])
        three = await ask([*second, {"role": "assistant", "content": two}, {"role": "user", "content": "last"}])
        TOLD[task.index] = [one, two, other, beside, three]
    return EpisodeOutcome(reward=0.5, metrics={"asked": 5.0})


async def rewriting(task: AgentTask) -> float:
    """Change what the model said before going on."""
    async with client_of(task) as client:
        messages: list[Any] = list(task.messages)
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
        messages += [{"role": "assistant", "content": "I said else"}, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
    return 1.0


async def endless(task: AgentTask) -> float:
    """Talk until somebody ends it."""
    messages: list[Any] = list(task.messages)
    async with client_of(task) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "more"})


async def greedy(task: AgentTask) -> float:
    """Ask for what an episode cannot give."""
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, n=4)  # type: ignore[arg-type]
    return 0.0


async def failing(task: AgentTask) -> float:
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, max_tokens=3)  # type: ignore[arg-type]
    raise ValueError("the disk is full")


def hanging(task: AgentTask) -> None:
    """Never return: only the end of the process ends it."""
    import threading

    threading.Event().wait()


async def leaking(task: AgentTask) -> float:
    """Keep the key for later."""
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, max_tokens=3)  # type: ignore[arg-type]
    TOLD[-1] = [task.base_url, task.api_key]
    return 1.0


@contextmanager
def told() -> Iterator[dict[int, list[str]]]:
    """Begin with nothing told."""
    TOLD.clear()
    yield TOLD

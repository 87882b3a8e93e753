"""User programs written against OpenAI's client, without any code for training."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from starling.rollout.env.base import AgentTask, EpisodeOutcome


def write_notes(folder: str, task: AgentTask, texts: list[str]) -> None:
    """Write what a program got, for the test: it runs in a process of its own."""
    (Path(folder) / f"{task.index}.json").write_text(json.dumps(texts))


def client_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)


async def converse(task: AgentTask, *, notes: str, turns: int = 3) -> float:
    """Converse in several turns with a system message; returned replies are stripped, as some clients do."""
    messages: list[Any] = [{"role": "system", "content": "be brief"}, *task.messages]
    results: list[str] = []
    async with client_of(task) as client:
        for turn in range(turns):
            answer = await client.chat.completions.create(
                model="gpt-4o", messages=messages, max_completion_tokens=6, temperature=0.3
            )
            assert answer.starling["overruled"] == ["temperature"]  # type: ignore[attr-defined]
            results.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": results[-1].strip()})
            messages.append({"role": "user", "content": f"and {turn}?"})
    write_notes(notes, task, results)
    return float(len(results))


def plain(task: AgentTask, *, notes: str) -> None:
    """Stream a reply without asyncio."""
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        pieces = client.chat.completions.create(
            model=task.model,
            messages=task.messages,
            max_tokens=5,
            stream=True,  # type: ignore[arg-type]
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    write_notes(notes, task, [text])


async def branching(task: AgentTask, *, notes: str) -> EpisodeOutcome:
    """Request the next reply twice, continue from the first one, and start another conversation."""
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
    write_notes(notes, task, [one, two, other, beside, three])
    return EpisodeOutcome(reward=0.5, metrics={"asked": 5.0})


async def rewriting(task: AgentTask) -> float:
    """Rewrite the model's reply before the next request."""
    async with client_of(task) as client:
        messages: list[Any] = list(task.messages)
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
        messages += [{"role": "assistant", "content": "I said else"}, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
    return 1.0


async def endless(task: AgentTask) -> float:
    """Request replies in an endless loop."""
    messages: list[Any] = list(task.messages)
    async with client_of(task) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=4)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "more"})


async def greedy(task: AgentTask) -> float:
    """Send requests that an episode rejects."""
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, n=4)  # type: ignore[arg-type]
    return 0.0


async def crowding(task: AgentTask, *, notes: str) -> float:
    """Send more requests at a time, larger ones, and more conversations than an episode may have."""
    async with client_of(task) as client:

        async def ask(text: str, **more: Any) -> str:
            messages: list[Any] = [{"role": "user", "content": text}]
            try:
                await client.chat.completions.create(model="m", messages=messages, max_tokens=3, **more)
            except openai.APIStatusError as error:
                return f"{error.status_code} {error.message}"
            return "200"

        at_once = await asyncio.gather(*(ask(str(number)) for number in range(4)))
        beyond = [await ask(str(number)) for number in (5, 6, 7)]
        tools = [{"type": "function", "function": {"name": "add", "description": "x" * (2 << 20)}}]
        write_notes(notes, task, [*sorted(at_once), "-", *beyond, "-", await ask("8", extra_body={"tools": tools})])
    return 1.0


async def failing(task: AgentTask) -> float:
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, max_tokens=3)  # type: ignore[arg-type]
    raise ValueError("the disk is full")


def hanging(task: AgentTask) -> None:
    """Never return: only the end of the process ends it."""
    import threading

    threading.Event().wait()


async def leaking(task: AgentTask, *, notes: str) -> float:
    """Store the key for use after the episode."""
    async with client_of(task) as client:
        await client.chat.completions.create(model="m", messages=task.messages, max_tokens=3)  # type: ignore[arg-type]
    write_notes(notes, task, [task.api_key])
    return 1.0


def nosy(task: AgentTask, *, path: str, port: int) -> float:
    """Look for what belongs to the service."""
    import socket

    with pytest.raises(OSError):
        Path(path).read_text()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return 1.0

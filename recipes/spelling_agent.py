"""An agent for recipes/agent.toml: it asks a model to spell a word backward, and once more when that was wrong."""

from __future__ import annotations

from typing import Any

import openai

from starling.rollout.env.base import AgentTask

CLIENT = openai.AsyncOpenAI(base_url="http://given.for.each.episode", api_key="likewise")
"""One for all: its copies share their connections."""


async def spell(task: AgentTask) -> float:
    """Return 1 for a word that was right at once, and a half for one that was right the second time."""
    client = CLIENT.with_options(base_url=task.base_url, api_key=task.api_key)
    messages: list[Any] = [*task.messages]
    for reward in (1.0, 0.5):
        answer = await client.chat.completions.create(model=task.model, messages=messages, max_tokens=10)
        spelt = answer.choices[0].message.content or ""
        if spelt == task.reference:
            return reward
        messages += [{"role": "assistant", "content": spelt}, *task.messages]
    return 0.0

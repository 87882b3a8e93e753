"""Environments written for `verifiers`, on a dataset of a few rows."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [
    {"question": "hello", "answer": "e", "info": {"word": "one"}},
    {"question": "world", "answer": "o", "info": {"word": "two"}},
]
SEEN: list[Any] = []
"""Arguments of the reward functions."""


def rows() -> Dataset:
    return Dataset.from_list(ROWS)


def share(completion: Any, answer: str) -> float:
    """Return the share of the expected letter in the reply."""
    text = "".join(message["content"] or "" for message in completion if message["role"] == "assistant")
    SEEN.append((completion, answer))
    return text.count(answer) / max(1, len(text))


async def length(completion: Any, info: dict[str, str]) -> float:
    return float(len(completion) + 100 * len(info["word"]))


def single() -> vf.Environment:
    rubric = vf.Rubric(funcs=[share, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=rows(), system_prompt="be brief", rubric=rubric)


class Nagging(vf.MultiTurnEnv):
    """Says `more` after each reply."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": f"more {len(state['trajectory'])}"}]


def several(max_turns: int = 3) -> vf.Environment:
    return Nagging(dataset=rows(), max_turns=max_turns, rubric=vf.Rubric(funcs=[share]))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one.
    """
    return a + b


def tools() -> vf.Environment:
    return vf.ToolEnv(dataset=rows(), tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[share]))


def raising(completion: Any) -> float:
    raise KeyError("no such file")


def broken() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[raising]))


def ranked(completions: list[Any]) -> list[float]:
    return [float(at) for at in range(len(completions))]


def over_groups() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[ranked]))


def of_text() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=rows(), message_type="completion", rubric=vf.Rubric(funcs=[share]))


def nothing() -> int:
    return 7


def impossible() -> vf.Environment:
    raise RuntimeError("no data here")

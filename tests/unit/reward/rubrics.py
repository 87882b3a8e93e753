"""Rubrics written for `verifiers`."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def text_of(completion: Any) -> str:
    return "".join(message["content"] for message in completion)


def right(completion: Any, answer: str) -> float:
    return float(text_of(completion) == answer)


async def shortest(completions: list[Any]) -> list[float]:
    """Return 1 for the shortest of a group."""
    least = min(len(text_of(one)) for one in completions)
    return [float(len(text_of(one)) == least) for one in completions]


def described(state: Any, prompt: Any, info: dict[str, Any], task: str) -> float:
    assert state["is_truncated"] is False
    return float(prompt[-1]["content"] == "1 + 1?") + 10 * float(info["level"]) + 100 * float(task == "sums")


def fails_on_x(completion: Any) -> float:
    if text_of(completion) == "x":
        raise KeyError("no such answer")
    return 1.0


def fails_always(completions: list[Any]) -> list[float]:
    raise RuntimeError("no group is good enough")


class Short(vf.Rubric):
    def __init__(self, weight: float = 0.5) -> None:
        super().__init__(funcs=[right, shortest], weights=[1.0, weight])


def in_groups() -> vf.Rubric:
    return vf.RubricGroup([vf.Rubric(funcs=[right]), vf.Rubric(funcs=[shortest], weights=[2.0])])


def environment() -> vf.Environment:
    rows = Dataset.from_list([{"question": "q", "answer": "a"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[shortest]))


ready = vf.Rubric(funcs=[described])


def brittle() -> vf.Rubric:
    return vf.Rubric(funcs=[fails_on_x])


def observed() -> vf.Rubric:
    return vf.Rubric(funcs=[right, fails_on_x], weights=[1.0, 0.0])


def broken() -> vf.Rubric:
    return vf.Rubric(funcs=[right, fails_always])


def none() -> int:
    return 7


def impossible() -> vf.Rubric:
    raise RuntimeError("no data here")

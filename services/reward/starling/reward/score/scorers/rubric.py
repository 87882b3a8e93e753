"""The scorer `verifiers_rubric`: rubrics of that library, whose functions may compare all completions of a prompt."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.raised import describe_raised
from starling.reward.core.samples import PromptText

_TITLE: Final = "Scorer 'verifiers_rubric'"
_SCORE: Final = "score"
MESSAGES: Final = "messages"
"""Key of the conversation in a prompt's metadata, in place of its text."""


class RubricError(Exception):
    """A reward function failed; the text is a sentence."""


class VerifiersRubric:
    """Scores the completions of a prompt by a rubric, which sees them as a group.

    Args:
        rubric: ``module:attribute`` or ``path/to/file.py:attribute``: a rubric, its class, or a function that returns a
            rubric or an environment that has one.
        args: keyword arguments of the class or function.
        functions: whether each reward function is a score of its own besides ``score``, the weighted sum; `key` of the
            recipe then names what counts.

    Raises:
        ConfigError: an option is not valid; on `setup`, the rubric cannot be made.
    """

    scope = "groupwise"

    def __init__(self, rubric: str, args: dict[str, Any] | None = None, functions: bool = False) -> None:
        if not is_import_path(rubric):
            raise ConfigError(f"{_TITLE}: rubric must be `module:Rubric` or `path/to/file.py:Rubric`, not {rubric!r}.")
        self._name, self._args, self._shows_functions = rubric, dict(args or {}), functions
        self._problems: list[str] = []
        """Of reward functions, which the library would turn into a reward of 0."""

    def setup(self) -> None:
        """Import the rubric."""
        import verifiers

        found = import_object(self._name, "Rubric")
        if callable(found) and not isinstance(found, verifiers.Rubric):
            try:
                found = found(**self._args)
            except Exception as error:  # a user's, or a third party's, may raise anything
                raise ConfigError(f"{_TITLE}: {self._name!r} cannot be made: {describe_raised(error)}.") from error
        rubric = found.rubric if isinstance(found, verifiers.Environment) else found
        if not isinstance(rubric, verifiers.Rubric):
            raise ConfigError(f"{_TITLE}: {self._name!r} is a {type(rubric).__name__}, and no rubric of `verifiers`.")
        names = list[str]()
        for one in _holders(rubric):
            names += [str(function.__name__) for function in one.funcs]
            one.funcs[:] = [
                self._guarded(function, is_group=one._is_group_func(function), counts=bool(weight))
                for function, weight in zip(one.funcs, one.weights, strict=True)
            ]
        if not names:
            raise ConfigError(f"{_TITLE}: {self._name!r} has no reward function.")
        self._functions = tuple(dict.fromkeys(names)) if self._shows_functions else ()
        if _SCORE in self._functions:
            raise ConfigError(
                f"{_TITLE}: {self._name!r} has a reward function `score`: rename it, or leave functions out."
            )
        self.keys = (_SCORE, *self._functions)
        self._rubric = rubric
        self._loop = asyncio.new_event_loop()  # one for all groups: a rubric's clients belong to it

    def score(self, batch: Any) -> dict[str, list[float | None]]:
        """Return the scores of a group; None where a reward function failed.

        Raises:
            RubricError: all have failed.
        """
        self._problems.clear()
        rows = zip(batch.prompts, batch.references, batch.metadata, batch.completions, batch.statuses, strict=True)
        states = [_state(PromptText(prompt, reference, more), *rest) for prompt, reference, more, *rest in rows]
        self._loop.run_until_complete(self._rubric.score_group(states))
        columns = {_SCORE: [_finite(state["reward"]) for state in states]}
        for name in self._functions:
            columns[name] = [_finite((state["metrics"] or {}).get(name)) for state in states]
        if self._problems and all(value is None for value in columns[_SCORE]):
            raise RubricError(self._problems[0])
        for problem in dict.fromkeys(self._problems):
            print(problem, file=sys.stderr)
        return columns

    def _guarded(self, function: Callable[..., Any], *, is_group: bool, counts: bool) -> Callable[..., Any]:
        """Wrap a reward function: an exception makes NaN, which no sum hides, and not the library's 0."""

        @functools.wraps(function)
        async def guarded(*positional: Any, **named: Any) -> Any:
            try:
                value = function(*positional, **named)
                return await value if inspect.isawaitable(value) else value
            except Exception as error:  # a user's function may raise anything
                name = getattr(function, "__name__", repr(function))
                self._problems.append(f"the reward function {name!r} raised {describe_raised(error)}")
                if not counts:
                    raise  # the library writes it into its log, and it is no part of the sum
                group = next((one for one in named.values() if is_group and isinstance(one, list)), [])
                return [math.nan] * len(group) if is_group else math.nan

        return guarded


def _holders(rubric: Any) -> Iterator[Any]:
    """Yield the rubrics that hold functions, of a rubric that may be a group of others."""
    inner = [*getattr(rubric, "rubrics", ()), *(one.rubric for one in getattr(rubric, "env_map", {}).values())]
    if not inner:
        yield rubric
    for one in inner:
        yield from _holders(one)


def _state(prompt: PromptText, completion: str, status: str) -> Any:
    """Return a completion as the library's state of a finished rollout."""
    from verifiers.types import State

    metadata: Mapping[str, Any] = prompt.metadata
    messages = metadata.get(MESSAGES)
    if not isinstance(messages, list) or not messages:
        messages = [{"role": "user", "content": prompt.text}]
    return State(
        input={
            "prompt": messages,
            "answer": metadata.get("answer", prompt.reference),
            "info": metadata.get("info", dict(metadata)),
            "task": metadata.get("task", "default"),
            "example_id": metadata.get("example_id", 0),
        },
        completion=[{"role": "assistant", "content": completion}],
        is_completed=True,
        is_truncated=status == "truncated",
        trajectory=[],
        reward=None,
        advantage=None,
        metrics=None,
        timing={"start_time": 0.0, "generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
        error=None,
    )


def _finite(value: Any) -> float | None:
    """Return a score, or None if a function that counts has failed. An infinite one is refused as any scorer's."""
    return None if value is None or math.isnan(value) else float(value)

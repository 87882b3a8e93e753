"""Scorers that are classes, for the tests of batches: some good ones, and some that misbehave."""

from __future__ import annotations

import os
import time
from typing import Any


class Lengths:
    """Two scores of each completion; the options say how large a batch is, and whom to call."""

    keys = ("length", "batch")
    batch_size = 4

    def __init__(self, offset: float = 0.0, scope: str = "pointwise") -> None:
        self.offset, self.scope = offset, scope
        self.is_set_up = False

    def setup(self) -> None:
        self.is_set_up = True

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert self.is_set_up
        return {
            "length": [len(text) + self.offset for text in batch.completions],
            "batch": [len(batch)] * len(batch),
        }


class Rank:
    """The rank of a completion in its group, by length: what a judge of whole groups returns."""

    scope = "groupwise"

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert len(set(batch.prompts)) == 1
        order = sorted(range(len(batch)), key=lambda one: len(batch.completions[one]))
        return {"score": [float(order.index(one)) for one in range(len(batch))]}


class Fields:
    """Checks every field of a batch."""

    batch_size = 8

    def score(self, batch: Any) -> dict[str, list[float]]:
        assert batch.references == ("r",) * len(batch)
        assert batch.prompts == ("p",) * len(batch)
        assert [one["k"] for one in batch.metadata] == [1] * len(batch)
        assert batch.num_tokens == (1,) * len(batch)
        assert batch.statuses == ("ok",) * len(batch)
        assert batch.rewards == (None,) * len(batch)
        return {"score": [1.0] * len(batch)}


class Acting:
    """Does with a batch what one of its completions says."""

    batch_size = 8

    def score(self, batch: Any) -> Any:
        number = len(batch)
        for text in batch.completions:
            match text:
                case "raise":
                    raise ValueError("a bad one")
                case "exit":
                    os._exit(3)
                case "hang":
                    time.sleep(1000)
                case "nan":
                    return {"score": [float("nan")] * number}
                case "few":
                    return {"score": [1.0] * (number - 1)}
                case "text":
                    return {"score": "x" * number}
                case "keys":
                    return {"other": [1.0] * number}
                case "list":
                    return [1.0] * number
        instead = {"none": None, "reason": "it is\ntoo long"}
        return {"score": [instead.get(text, 1.0) for text in batch.completions]}


class OnceLost:
    """Ends its worker at the first try of a completion, which is the name of a file, and scores it at the second."""

    def score(self, batch: Any) -> dict[str, list[float]]:
        (name,) = batch.completions
        with open(name, "a") as file:
            file.write("tried\n")
        with open(name) as file:
            tries = len(file.readlines())
        if tries == 1:
            os._exit(3)
        return {"score": [float(tries)]}


class NoScore:
    """Has no method `score`."""


class Failing:
    """Cannot be set up."""

    def setup(self) -> None:
        raise OSError("no such model")

    def score(self, batch: Any) -> dict[str, list[float]]:
        return {"score": [1.0]}


class Declaring:
    """Declares what its options say."""

    def __init__(self, **declared: Any) -> None:
        for name, value in declared.items():
            setattr(self, name, value)

    def score(self, batch: Any) -> dict[str, list[float]]:
        return {"score": [1.0] * len(batch)}


class HalfNone:
    """Says how often it was called; its other score is always None."""

    keys = ("calls", "none")
    batch_size = 8

    def __init__(self) -> None:
        self.num_calls = 0

    def score(self, batch: Any) -> dict[str, list[Any]]:
        self.num_calls += 1
        return {"calls": [self.num_calls] * len(batch), "none": [None] * len(batch)}


class LongProblem:
    """Raises a long text for a whole group."""

    scope = "groupwise"

    def score(self, batch: Any) -> dict[str, list[float]]:
        raise ValueError("x" * 400)


class Named:
    """One score, which has a name."""

    keys = ("brightness",)

    def score(self, batch: Any) -> dict[str, list[float]]:
        return {"brightness": [0.5] * len(batch)}

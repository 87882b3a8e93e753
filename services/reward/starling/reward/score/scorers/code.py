"""The scorer `code`: the share of tests that the program in the completion passes, each run in a session of its own."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.sandbox.execution import run_python
from starling.reward.score.scorers.registry import Scorer

_BLOCK: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def make_code(timeout_s: float = 5.0, memory_mb: int = 1024, partial: bool = False) -> Scorer:
    """Make the scorer `code`.

    The program is the last block between ``` fences, or the whole completion without one. The tests are the row's
    metadata ``tests``, a list of ``{"input": ..., "output": ...}`` whose texts are given to and expected from the
    program; without it, the reference is Python code that runs after the program and raises if it is wrong.

    Args:
        timeout_s: limit of one test, in seconds; give the scorer's own `timeout_s` room for all tests.
        memory_mb: limit on the address space of a program, in MiB.
        partial: return the share of tests that pass, instead of 1 for all and 0 otherwise.

    Raises:
        ConfigError: a limit is not above 0.
    """
    for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb)):
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"Scorer 'code': {name} must be a number above 0, not {value!r}.")

    def passes(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        program = program_of(completion)
        tests = metadata.get("tests")
        if tests is None:
            result = run_python(program, check=reference, timeout_s=timeout_s, memory_mb=int(memory_mb))
            return float(result.finished)
        passed = 0
        for test in tests:
            given, expected = str(test["input"]), str(test["output"])
            result = run_python(program, stdin=given, timeout_s=timeout_s, memory_mb=int(memory_mb))
            if result.status == 0 and _lines(result.output) == _lines(expected):
                passed += 1
            elif not partial:
                return 0.0
        return passed / len(tests)

    return passes


def program_of(completion: str) -> str:
    """Return the last block of code in a completion, or all of it."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _lines(text: str) -> list[str]:
    """Return the lines without white space at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]

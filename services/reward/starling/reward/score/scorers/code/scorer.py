"""The scorer `code`: the share of tests that the program in the completion passes, each run in a session of its own.

The process that runs the program has nothing of what is expected of it: what it prints, and what its functions return,
is compared in the worker, and code of tests runs in another session, which calls the program's functions.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from starling.common.errors import ConfigError
from starling.common.sandbox.budget import TimeBudget
from starling.common.sandbox.execution import OUTPUT_BYTES, has_executor, run_python
from starling.common.sandbox.program_runs import call_function, check_program, compiled, run_compiled
from starling.reward.score.scorers.code.blocks import LANGUAGES, Language, Source, program_of
from starling.reward.score.scorers.code.compare import Rule, same_output, same_value
from starling.reward.score.scorers.code.datasets import CallTest, CodeTest, OutputTest, Test, read_tests
from starling.reward.score.scorers.options import check_choices, check_positive
from starling.reward.score.scorers.registry import Scorer

_STANDARDS: Final = tuple(f"{kind}{year}" for kind in ("gnu++", "c++") for year in (11, 14, 17, 20, 23))


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of the scorer, see `make_code`."""

    timeout_s: float
    memory_mb: int
    compile_timeout_s: float
    compile_memory_mb: int
    compiler_options: tuple[str, ...]
    compare: Rule
    tolerance: float
    language: Language | None
    """None for all."""
    partial: bool
    time_limit_s: float


def make_code(
    timeout_s: float = 5.0,
    memory_mb: int = 1024,
    partial: bool = False,
    language: str = "auto",
    compare: str = "lines",
    tolerance: float = 0.0,
    cpp_standard: str = "gnu++17",
    compile_timeout_s: float = 30.0,
    compile_memory_mb: int = 2048,
    time_limit_s: float = 9.0,
) -> Scorer:
    """Make the scorer `code`.

    The program is the last block of Python or C++ between fences, or the whole completion without one (see `blocks`);
    the tests are those of the row, in the forms of known data sets (see `datasets`).

    Args:
        timeout_s: limit of one test, in seconds.
        memory_mb: limit on the address space of a program, in MiB.
        partial: return the share of tests that pass, instead of 1 for all and 0 otherwise.
        language: ``python`` or ``cpp``; ``auto`` for both.
        compare: how outputs are compared: ``lines``, ``tokens`` or ``exact``, see `same_output`.
        tolerance: by how much numbers in outputs and results may differ, absolutely or relatively; 0 for not at all.
        cpp_standard: of g++.
        compile_timeout_s: limit of a compilation, in seconds. A program is compiled once for all of its tests.
        compile_memory_mb: limit on the address space of the compiler, in MiB.
        time_limit_s: limit of the compilation and all tests together, in seconds; tests that are left then are not
            passed. By default nine tenths of the scorer's `timeout_s`: a program that took all of that would have no
            reward, which is better than 0.

    Raises:
        ConfigError: an option is not valid, or a language cannot be run.
    """
    check_positive(
        "code", timeout_s=timeout_s, memory_mb=memory_mb, compile_timeout_s=compile_timeout_s,
        compile_memory_mb=compile_memory_mb, time_limit_s=time_limit_s,
    )  # fmt: skip
    _check_tolerance(tolerance)
    check_choices(
        "code", language=(language, ("auto", *LANGUAGES)), compare=(compare, get_args(Rule)),
        cpp_standard=(cpp_standard, _STANDARDS),
    )  # fmt: skip
    _check_compiler(language)
    options = _Options(
        float(timeout_s), int(memory_mb), float(compile_timeout_s), int(compile_memory_mb),
        (f"-std={cpp_standard}", "-O2", "-pipe", "-w"), _RULES[compare], float(tolerance), _LANGUAGE_OF[language],
        partial, time_limit_s,
    )  # fmt: skip

    def passes(completion: str, reference: str, prompt_text: str, metadata: dict[str, Any]) -> float:
        tests = read_tests(metadata, reference)
        program = program_of(completion, options.language)
        return 0.0 if program is None else _score(program, tests, options)

    return passes


_RULES: Final[dict[str, Rule]] = {rule: rule for rule in get_args(Rule)}
_LANGUAGE_OF: Final[dict[str, Language | None]] = {"auto": None, "python": "python", "cpp": "cpp"}


def _check_tolerance(tolerance: float) -> None:
    """Raise ConfigError unless it is a number that a tolerance can be."""
    if not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
        raise ConfigError(f"Scorer 'code': tolerance must be a number from 0 to below 1, not {tolerance!r}.")


def _check_compiler(language: str) -> None:
    """Raise ConfigError where programs in C++ alone are wanted and none can be compiled."""
    if language == "cpp" and has_executor() and shutil.which("g++") is None:
        raise ConfigError("Scorer 'code': language 'cpp' needs the program g++ on this machine; install it.")


def _score(program: Source, tests: Sequence[Test], options: _Options) -> float:
    """Return the share of tests that a program passes, or, without `partial`, whether it passes all."""
    passed, budget = 0, TimeBudget(options.time_limit_s)
    with _ready(program, options, budget) as run:
        for number, test in enumerate(tests):
            if number and budget.is_spent:
                _say_late(number, len(tests), options.time_limit_s)
                break
            if run is not None and run.passes(test):
                passed += 1
            elif not options.partial:
                return 0.0
    return passed / len(tests) if options.partial else float(passed == len(tests))


@contextlib.contextmanager
def _ready(program: Source, options: _Options, budget: TimeBudget) -> Iterator[_Python | _Cpp | None]:
    """Yield what runs the tests of a program; None if it cannot be compiled."""
    if program.language == "python":
        yield _Python(program.text, options, budget)
        return
    with compiled(
        program.text,
        options=options.compiler_options,
        timeout_s=options.compile_timeout_s,
        memory_mb=options.compile_memory_mb,
        budget=budget,
    ) as made:
        yield None if made is None else _Cpp(made, options, budget)


def _say_late(num: int, num_tests: int, time_limit_s: float) -> None:
    print(
        f"a program was still right when its time was over, after {num} of {num_tests} tests and {time_limit_s:g} s: "
        "raise timeout_s of the scorer if they need more",
        file=sys.stderr,
    )


@dataclass(frozen=True, slots=True)
class _Python:
    """A program in Python."""

    text: str
    options: _Options
    budget: TimeBudget

    def passes(self, test: Test) -> bool:
        """Return whether the program passes a test."""
        options = self.options
        match test:
            case OutputTest():
                result = run_python(
                    self.text,
                    stdin=test.input,
                    timeout_s=options.timeout_s,
                    memory_mb=options.memory_mb,
                    output_bytes=_room(test),
                    budget=self.budget,
                )
                return result.status == 0 and _prints(result.output, test, options)
            case CallTest():
                called = call_function(
                    self.text,
                    test.function,
                    test.arguments,
                    timeout_s=options.timeout_s,
                    memory_mb=options.memory_mb,
                    budget=self.budget,
                )
                same = (same_value(called.value, one, tolerance=options.tolerance) for one in test.outputs)
                return called.returned and any(same)
            case CodeTest():
                return check_program(
                    _completed(self.text, test),
                    test.code,
                    setup=test.setup,
                    entry_points=test.entry_points,
                    timeout_s=options.timeout_s,
                    memory_mb=options.memory_mb,
                    budget=self.budget,
                ).finished


@dataclass(frozen=True, slots=True)
class _Cpp:
    """A compiled program. It passes no test that calls a function of Python."""

    made: int
    """Its descriptor."""
    options: _Options
    budget: TimeBudget

    def passes(self, test: Test) -> bool:
        """Return whether the program passes a test."""
        if not isinstance(test, OutputTest):
            return False
        result = run_compiled(
            self.made,
            stdin=test.input,
            timeout_s=self.options.timeout_s,
            memory_mb=self.options.memory_mb,
            output_bytes=_room(test),
            budget=self.budget,
        )
        return result.status == 0 and _prints(result.output, test, self.options)


def _room(test: OutputTest) -> int:
    """Return how many bytes of output are read: more than what is expected, so that too much is not cut to it."""
    return max(OUTPUT_BYTES, 2 * len(test.output.encode("utf-8", "replace")))


def _prints(output: str, test: OutputTest, options: _Options) -> bool:
    return same_output(output, test.output, rule=options.compare, tolerance=options.tolerance)


def _completed(text: str, test: CodeTest) -> str:
    """Return the program with the beginning that its prompt has, where it goes on from that or may need its imports."""
    if not test.prompt:
        return text
    defines = any(
        line.startswith((f"def {name}(", f"async def {name}("))
        for name in test.entry_points
        for line in text.splitlines()
    )
    return f"{test.prompt}\n{text}" if defines else test.prompt + text

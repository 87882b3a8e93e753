"""What a worker has done with a program besides running it: call a function, test it, compile it and run that.

In each case the process that runs the program has nothing of what is expected of it. Every function raises
`ExecutionError` as `run_python` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starling.common.sandbox.budget import TimeBudget
from starling.common.sandbox.execution import OUTPUT_BYTES, ExecutionError, ProgramResult, run_program
from starling.common.sandbox.programs.session import Program

RESULT_BYTES: Final = 16 << 20
"""A longer result of a function, as JSON, is none."""
_MFD_EXEC: Final = 0x10
_MOST_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True)
class CallResult:
    """End of a call of a program's function."""

    returned: bool
    """Whether it returned something that is JSON, in time."""
    value: Any = None
    """What that is: tuples and sets are lists."""


def call_function(
    code: str,
    function: str,
    arguments: Sequence[Any],
    *,
    timeout_s: float,
    memory_mb: int,
    budget: TimeBudget | None = None,
) -> CallResult:
    """Run a Python program, and call one of its functions, or a method of its class `Solution`.

    Args:
        code: the program.
        function: name of the function.
        arguments: JSON values.
        timeout_s: limit on all, in seconds.
        memory_mb: limit on the address space, in MiB.
        budget: time that it shares with other programs, as in all functions here.
    """
    program = Program("call", timeout_s, memory_mb, code=code, function=function, arguments=tuple(arguments))
    with _file("result", 0) as result:
        if not run_program(program, passed_fd=result, budget=budget).finished:
            return CallResult(returned=False)
        text = os.pread(result, RESULT_BYTES + 1, 0)
    if len(text) > RESULT_BYTES:
        return CallResult(returned=False)
    try:
        return CallResult(returned=True, value=json.loads(text))
    except (ValueError, RecursionError):
        return CallResult(returned=False)


def check_program(
    code: str,
    tests: str,
    *,
    setup: str = "",
    entry_points: Sequence[str] = (),
    timeout_s: float,
    memory_mb: int,
    budget: TimeBudget | None = None,
) -> ProgramResult:
    """Run a Python program in one session, and the code of tests that call it in another one.

    Args:
        code: the program.
        tests: raise an exception if it is wrong. Names that are neither theirs nor Python's are the program's.
        setup: code that runs before the tests, with their names; skipped if it cannot be compiled.
        entry_points: names that are the program's also where Python or `setup` has such a name.
        timeout_s: limit on all, in seconds.
        memory_mb: limit on the address space of each of both processes, in MiB.
    """
    check = Program("check", timeout_s, memory_mb, code=tests, setup=setup, entry_points=tuple(entry_points))
    mine, theirs = socket.socketpair()
    with mine, theirs:
        server = Program("serve", timeout_s, memory_mb, code=code)

        def close() -> None:  # each of both sessions sees the end of the other one
            mine.close()
            theirs.close()

        peer = (server, theirs.fileno())
        return run_program(check, passed_fd=mine.fileno(), peer=peer, when_sent=close, budget=budget)


@contextlib.contextmanager
def compiled(
    code: str, *, options: Sequence[str], timeout_s: float, memory_mb: int, budget: TimeBudget | None = None
) -> Iterator[int | None]:
    """Compile C++ source with g++, and yield a descriptor of the program; None if it cannot be compiled.

    Args:
        code: the source.
        options: of g++.
        timeout_s: limit in seconds.
        memory_mb: limit on the address space of each process of the compiler, in MiB.
    """
    if shutil.which("g++") is None:
        raise ExecutionError("this machine has no program `g++` to compile it: install g++")
    with _file("program", os.MFD_ALLOW_SEALING | _MFD_EXEC) as made:
        program = Program("compile", timeout_s, memory_mb, code=code, compiler_options=tuple(options))
        if not run_program(program, passed_fd=made, budget=budget).finished:
            yield None
            return
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, _MOST_SEALS)  # no test changes it for the next one
        yield made


def run_compiled(
    made: int,
    *,
    stdin: str,
    timeout_s: float,
    memory_mb: int,
    output_bytes: int = OUTPUT_BYTES,
    budget: TimeBudget | None = None,
) -> ProgramResult:
    """Run a program that `compiled` has made; the other arguments are those of `run_python`."""
    program = Program("binary", timeout_s, memory_mb, stdin=stdin)
    return run_program(program, passed_fd=made, output_bytes=output_bytes, budget=budget)


@contextlib.contextmanager
def _file(name: str, flags: int) -> Iterator[int]:
    """Yield a descriptor of a file without a name, in memory."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | flags)
    except OSError:  # Linux before 6.3 does not know the flag, and makes every such file executable
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | flags & ~_MFD_EXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

"""First steps of a session that runs a program: by the kind of the program, what is executed and what is reported.

    python    Python source; after it `check`, with its names
    call      Python source; then one call of a function, whose result becomes JSON in the file that was passed
    serve     Python source; then calls over the socket that was passed, from a session of kind `check`
    check     code of a data set, whose unknown names are those of the program at the other end of the socket
    compile   C++ source; the program becomes the content of the file that was passed
    binary    the program in the file that was passed

It imports only the standard library: the process that forks sessions has nothing else in its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from starling.common.sandbox import syscalls
from starling.common.sandbox.programs.imports import borrowed_names
from starling.common.sandbox.programs.remote import Names, Peer

Kind = Literal["python", "call", "serve", "check", "compile", "binary"]
TOKEN_BYTES: Final = 16
BEGUN: Final = b"b"
"""First byte of a report: all is there that the program needs. What goes wrong before says nothing of the program."""
PROGRAM_BYTES: Final = 256 << 20
"""Limit on the size of a compiled program."""
_REPORT, _PASSED = 63, 62
"""Numbers of the descriptors that a program must not have, and that are left open."""
_COMPILER: Final = "g++"
_Ran = tuple[int, bool]
"""Exit status, and whether the program ran to its end."""


@dataclass(frozen=True, slots=True)
class Program:
    """Description of a program. A worker writes it into a file without a name, which the session alone reads."""

    kind: Kind
    timeout_s: float
    """Limit in seconds; the worker measures it."""
    memory_mb: int
    """Limit on the address space of each process, in MiB."""
    code: str = ""
    """The source; of `check` the code of the data set."""
    check: str = ""
    """Of `python`: code that runs after it, in the same module."""
    stdin: str = ""
    function: str = ""
    """Of `call`: the function's name, which may be that of a method of a class `Solution`."""
    arguments: tuple[Any, ...] = ()
    """Of `call`: JSON values."""
    setup: str = ""
    """Of `check`: code that runs before."""
    entry_points: tuple[str, ...] = ()
    """Of `check`: names that are the program's also where `setup` or Python has such a name."""
    compiler_options: tuple[str, ...] = ()
    """Of `compile`."""


def be_program(descriptors: Sequence[int]) -> NoReturn:
    """Run the program of a request in this process, and report that it has come to its end.

    Args:
        descriptors: the description after a token, the pipes for the output and the report, and what else its kind has.
    """
    status = 1
    try:
        described, output, report, *passed = descriptors
        with os.fdopen(described, "rb") as file:
            file.seek(0)
            token = file.read(TOKEN_BYTES)
            program = Program(**json.loads(file.read()))
        given = os.memfd_create("stdin", 0)
        os.write(given, program.stdin.encode())
        os.lseek(given, 0, os.SEEK_SET)
        # Numbers that are in use are moved out of the way of those that the descriptors get.
        kept = [os.dup(one) for one in (given, output, report, *passed)]
        for descriptor, number in zip(kept, (0, 1, _REPORT, _PASSED), strict=False):
            os.dup2(descriptor, number, inheritable=number < 2)
        os.dup2(1, 2)
        os.closerange(3, _PASSED if passed else _REPORT)
        os.closerange(_REPORT + 1, 1024)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(tempfile.gettempdir())
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        status, finished = _RUN[program.kind](program, lambda: os.write(_REPORT, BEGUN))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(_REPORT, bytes([status]) + (token if finished else bytes(len(token))))
    finally:
        os._exit(status)


def _run_python(program: Program, begin: Callable[[], object]) -> _Ran:
    _limit_memory(program)
    begin()

    def run() -> None:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program.code, "<program>", "exec"), names)
        if program.check:
            exec(compile(program.check, "<check>", "exec"), names)

    return _reported(run)


def _run_call(program: Program, begin: Callable[[], object]) -> _Ran:
    _limit_memory(program)
    begin()

    def run() -> None:
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(program.code, "<program>", "exec"), names)
        found = names.get(program.function)
        if found is None:
            found = getattr(names["Solution"](), program.function)
        result = found(*program.arguments)
        with os.fdopen(_PASSED, "w", closefd=False) as file:
            json.dump(result, file, default=_as_json)

    return _reported(run)


def _as_json(value: Any) -> Any:
    """Return what JSON has instead of a value: a list for a tuple-like one, and a number for one of numpy."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    return list(value)


def _run_server(program: Program, begin: Callable[[], object]) -> _Ran:
    _limit_memory(program)
    begin()
    peer = Peer(socket.socket(fileno=_PASSED))
    peer.say_hello()  # before the program runs: what it does is counted from now on

    def run() -> None:
        names: dict[str, Any] = {"__name__": "solution"}
        exec(compile(program.code, "<program>", "exec"), names)
        peer.serve(names)

    return _reported(run)


def _run_check(program: Program, begin: Callable[[], object]) -> _Ran:
    peer = Peer(socket.socket(fileno=_PASSED))
    if not peer.await_hello():
        return 1, False
    _limit_memory(program)
    begin()

    def run() -> None:
        names = Names(peer)
        names["__name__"] = "__main__"
        names.update(borrowed_names(program.setup, program.code, tested=program.entry_points))
        with contextlib.suppress(SyntaxError):  # the beginning of a function that the program completes
            exec(compile(program.setup, "<setup>", "exec"), names)
        for name in program.entry_points:
            names[name] = peer.get(name)
        exec(compile(program.code, "<tests>", "exec"), names)

    return _reported(run)


def _run_compiler(program: Program, begin: Callable[[], object]) -> _Ran:
    begin()
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/program.cpp", f"{folder}/program"
        with open(source, "w", encoding="utf-8") as file:
            file.write(program.code)
        command = [shutil.which(_COMPILER) or _COMPILER, *program.compiler_options, "-o", target, source]
        status = _run_process(program, lambda: os.execv(command[0], command))
        if status or os.path.getsize(target) > PROGRAM_BYTES:
            return 1, False
        with open(target, "rb") as made, os.fdopen(_PASSED, "wb", closefd=False) as file:
            shutil.copyfileobj(made, file)
    return 0, True


def _run_binary(program: Program, begin: Callable[[], object]) -> _Ran:
    begin()
    status = _run_process(program, lambda: os.execve(_PASSED, ["program"], dict(os.environ)))
    return min(status, 1), status == 0


def _run_process(program: Program, execute: Callable[[], object]) -> int:
    """Execute a program in a child; return its exit status, 1 if a signal ended it."""
    child = os.fork()
    if not child:
        try:
            _limit_memory(program)
            with contextlib.suppress(OSError, ValueError):  # a recursion may be as deep as the memory allows
                _, most = resource.getrlimit(resource.RLIMIT_STACK)
                resource.setrlimit(resource.RLIMIT_STACK, (most, most))
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(ignored, signal.SIG_DFL)
            execute()
        finally:
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


def _limit_memory(program: Program) -> None:
    syscalls.set_limits([(resource.RLIMIT_AS, program.memory_mb << 20)])


def _reported(run: Callable[[], None]) -> _Ran:
    """Run Python code of a model or a data set; return its exit status, and whether it ran to its end."""
    try:
        run()
    except SystemExit as end:
        return (0 if end.code in (None, 0) else 1), False
    except BaseException:  # noqa: BLE001 - a program may raise anything
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        return 1, False
    return 0, True


_RUN: Final[dict[str, Callable[[Program, Callable[[], object]], _Ran]]] = {
    "python": _run_python,
    "call": _run_call,
    "serve": _run_server,
    "check": _run_check,
    "compile": _run_compiler,
    "binary": _run_binary,
}

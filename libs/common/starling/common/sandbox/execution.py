"""Execution of Python programs that a model wrote, each in a session of its own that has nothing of its caller.

A worker calls `start_executor` before it imports user code. That forks a process with nothing in its memory but this
module, which forks a session for each program: without network, with its own `/proc` and `/tmp`, and killed with
everything that it has started. User code then calls `run_python`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any, Final, NoReturn

from starling.common.sandbox import syscalls
from starling.common.sandbox.inside import Sessions

OUTPUT_BYTES: Final = 1 << 20
"""Limit on what a program may print; the rest is dropped."""
_LENGTH: Final = struct.Struct("<I")
_GRACE_S: Final = 30.0
"""How long after a program's limit the executor may take to answer."""
_CHUNK: Final = 1 << 16
_TOKEN_BYTES: Final = 16
_REPORT_BYTES: Final = 1 + _TOKEN_BYTES


class ExecutionError(Exception):
    """A program could not be run; that says nothing of the program."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """End of a program."""

    status: int
    """0 if the program ended without an error, -1 at the time limit, 1 otherwise."""
    output: str
    """What it printed, on both channels."""
    finished: bool
    """Whether it, and `check`, ran to their ends, and did not exit before. A program that looks for it can pretend."""


@dataclass(frozen=True, slots=True)
class _Program:
    code: str
    check: str
    stdin: str
    timeout_s: float
    memory_mb: int


_line: socket.socket | None = None


def has_executor() -> bool:
    """Return whether this process can run programs."""
    return _line is not None


def start_executor(mechanism: str) -> None:
    """Fork the executor of this process, which ends with it. Called once, before user code is imported."""
    global _line
    mine, theirs = socket.socketpair()
    if os.fork() == 0:
        mine.close()
        _execute_all(theirs, mechanism)
    theirs.close()
    _line = mine


def run_python(
    code: str, *, check: str = "", stdin: str = "", timeout_s: float = 5.0, memory_mb: int = 1024
) -> ProgramResult:
    """Run a Python program, and then `check` with its names, in a session of their own.

    Args:
        code: the program.
        check: Python code that runs after it, in the same module; an exception is a failure.
        stdin: what the program reads.
        timeout_s: limit on both together, in seconds.
        memory_mb: limit on the address space, in MiB.

    Raises:
        ExecutionError: this process has no executor, as in the worker of a scorer that declares needs, or it has ended.
    """
    if _line is None:
        raise ExecutionError(
            "programs can be run in workers of the reward service only, in a sandbox, and not by a scorer that "
            "declares needs, which the programs would get, too"
        )
    request = json.dumps(asdict(_Program(code, check, stdin, timeout_s, memory_mb))).encode()
    _line.settimeout(timeout_s + _GRACE_S)
    try:
        _line.sendall(_LENGTH.pack(len(request)) + request)
        body = _receive(_line)
    except OSError as error:
        raise ExecutionError(f"the executor does not answer ({error})") from None
    if body is None:
        raise ExecutionError("the executor has ended")
    answer: dict[str, Any] = json.loads(body)
    if "problem" in answer:
        raise ExecutionError(answer["problem"])
    return ProgramResult(**answer)


# --- in the executor -----------------------------------------------------------------------------------------------


def _execute_all(line: socket.socket, mechanism: str) -> NoReturn:
    try:
        syscalls.die_with_parent()
        os.closerange(3, line.fileno())
        os.closerange(line.fileno() + 1, 1024)
        sessions = Sessions(mechanism, _be_program, network=False)
        sessions.prepare()
        while (body := _receive(line)) is not None:
            try:
                answer: dict[str, Any] = asdict(_run(body, sessions))
            except OSError as error:
                answer = {"problem": f"no process can be started for it: {error}"}
            reply = json.dumps(answer).encode()
            line.sendall(_LENGTH.pack(len(reply)) + reply)
            sessions.prepare()
        sessions.kill_all()
    finally:
        os._exit(0)


def _run(request: bytes, sessions: Sessions) -> ProgramResult:
    token = secrets.token_bytes(_TOKEN_BYTES)
    limit_s = float(json.loads(request)["timeout_s"])
    with contextlib.ExitStack() as read:
        with contextlib.ExitStack() as passed:
            described = os.memfd_create("program", os.MFD_CLOEXEC)
            (output, output_write), (report, report_write) = os.pipe(), os.pipe()
            for stack, descriptors in ((read, (output, report)), (passed, (described, output_write, report_write))):
                for descriptor in descriptors:
                    stack.callback(os.close, descriptor)
            with os.fdopen(described, "wb", closefd=False) as file:
                file.write(token + request)
            until = time.monotonic() + limit_s
            pid = sessions.start([described, output_write, report_write])
        try:
            printed, reported = _collect(output, report, until)
        finally:
            sessions.kill(pid)
    text = bytes(printed[:OUTPUT_BYTES]).decode("utf-8", "replace")
    if reported is None:
        return ProgramResult(-1, text, finished=False)
    status = reported[0] if reported else 1
    return ProgramResult(status, text, finished=reported == b"\0" + token)


def _collect(output: int, report: int, until: float) -> tuple[bytearray, bytes | None]:
    """Read what the program prints and its report, until both are closed; no report at the time limit."""
    printed, reported = bytearray(), bytearray()
    poller = select.poll()
    for descriptor in (output, report):
        poller.register(descriptor, select.POLLIN)
    left = {output: printed, report: reported}
    while report in left and len(reported) < _REPORT_BYTES:  # what a child prints after its end does not count
        ready = poller.poll(max(0.0, until - time.monotonic()) * 1000)
        if not ready:
            return printed, None
        for descriptor, _ in ready:
            data = os.read(descriptor, _CHUNK)
            if not data:
                poller.unregister(descriptor)
                del left[descriptor]
            elif len(left[descriptor]) <= OUTPUT_BYTES:
                left[descriptor].extend(data)
    if report in left:
        poller.unregister(report)
    while output in left and poller.poll(0):  # a child may hold it open
        data = os.read(output, _CHUNK)
        if not data or len(printed) > OUTPUT_BYTES:
            break
        printed += data
    return printed, bytes(reported)


def _be_program(descriptors: list[int]) -> NoReturn:
    """Run the program of a request in this process, and report that it has come to its end."""
    status = 1
    try:
        passed, output, report = descriptors
        with os.fdopen(passed, "rb") as file:
            file.seek(0)
            token = file.read(_TOKEN_BYTES)
            program = _Program(**json.loads(file.read()))
        given = os.memfd_create("stdin", 0)
        os.write(given, program.stdin.encode())
        os.lseek(given, 0, os.SEEK_SET)
        for descriptor, standard in ((given, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        kept = os.dup2(report, 63, inheritable=False)
        os.closerange(3, 63)
        os.closerange(64, 1024)
        syscalls.set_limits([(resource.RLIMIT_AS, program.memory_mb << 20)])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.chdir(tempfile.gettempdir())
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        status, finished = _run_source(program)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os.write(kept, bytes([status]) + (token if finished else bytes(len(token))))
    finally:
        os._exit(status)


def _run_source(program: _Program) -> tuple[int, bool]:
    """Return the exit status, and whether the program ran to its end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(program.code, "<program>", "exec"), names)
        if program.check:
            exec(compile(program.check, "<check>", "exec"), names)
    except SystemExit as end:
        return (0 if end.code in (None, 0) else 1), False
    except BaseException:  # noqa: BLE001 - a program may raise anything
        with contextlib.suppress(BaseException):
            traceback.print_exc()
        return 1, False
    return 0, True


def _receive(line: socket.socket) -> bytes | None:
    head = _receive_exactly(line, _LENGTH.size)
    return None if head is None else _receive_exactly(line, _LENGTH.unpack(head)[0])


def _receive_exactly(line: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = line.recv(size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)

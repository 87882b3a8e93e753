"""Execution of Python programs that a model wrote, each in a session of its own that has nothing of its caller.

A worker calls `start_executor` before it imports user code. That forks a process with nothing in its memory but this
module, which forks a session for each program: without network, with its own `/proc` and `/tmp`, and killed with
everything that it has started. User code then calls `run_python`. The executor only passes descriptors on: the worker
describes the program in a file without a name, the session alone reads it, and the worker reads what it prints.

The sessions of several workers run at the same time. The time limit of a program does not count the time in which it
waits for a processor that others have: the program of another completion could otherwise make it fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Final, NoReturn

from starling.common.sandbox import syscalls
from starling.common.sandbox.budget import TimeBudget
from starling.common.sandbox.inside import Sessions, send_descriptors
from starling.common.sandbox.programs.session import BEGUN, TOKEN_BYTES, Program, be_program
from starling.common.sandbox.shortage import PROBED_EVERY_S, shortage_of_user
from starling.common.sandbox.usage import MEASURED_EVERY_S, UNKNOWN, Meter, Usage, busy_s, waited_s

OUTPUT_BYTES: Final = 1 << 20
"""Limit on what a program may print; the rest is dropped."""
_GRACE_S: Final = 30.0
"""How long the executor may take to start or to kill a session."""
_MOST_SESSIONS: Final = 2
_MOST_DESCRIPTORS: Final = 8
"""Of a session: the program with its token, the writing ends of the pipes for its output and its report, and what else
its kind has."""
_KILLED: Final = b"killed"
"""Answer of the executor; what was short while the session ran may follow it."""
_MEASURED_S: Final = 0.1
"""It costs too much to find out for how long a shorter program has waited for a processor."""
_START, _MEASURE, _KILL = b"s", b"m", b"k"
"""Requests to the executor."""
_ANSWER_BYTES: Final = 1 << 12
_CHUNK: Final = 1 << 16
_REPORT_BYTES: Final = 2 + TOKEN_BYTES


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


_line: socket.socket | None = None


def has_executor() -> bool:
    """Return whether this process can run programs."""
    return _line is not None


def start_executor(mechanism: str) -> None:
    """Fork the executor of this process, which ends with it. Called once, before user code is imported."""
    global _line
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        mine.close()
        _execute_all(theirs, mechanism)
    theirs.close()
    _line = mine


def run_python(
    code: str,
    *,
    check: str = "",
    stdin: str = "",
    timeout_s: float = 5.0,
    memory_mb: int = 1024,
    output_bytes: int = OUTPUT_BYTES,
    budget: TimeBudget | None = None,
) -> ProgramResult:
    """Run a Python program, and then `check` with its names, in a session of their own.

    Args:
        code: the program.
        check: Python code that runs after it, in the same module; an exception is a failure.
        stdin: what the program reads.
        timeout_s: limit on both together, in seconds, without those in which others have the processors.
        memory_mb: limit on the address space, in MiB.
        output_bytes: limit on what it may print; the rest is dropped.
        budget: time that it shares with other programs.

    Where the executor has ended, this process ends, too: it could run no further program.

    Raises:
        ExecutionError: this process has no executor, as in the worker of a scorer that declares needs; or the program
            cannot be started, or has failed while others of its user may have had what it needs.
    """
    return run_program(
        Program("python", timeout_s, memory_mb, code=code, check=check, stdin=stdin),
        output_bytes=output_bytes,
        budget=budget,
    )


def run_program(
    program: Program,
    *,
    passed_fd: int | None = None,
    peer: tuple[Program, int] | None = None,
    output_bytes: int = OUTPUT_BYTES,
    when_sent: Callable[[], object] = lambda: None,
    budget: TimeBudget | None = None,
) -> ProgramResult:
    """Run a program in a session of its own, as `run_python` does.

    Args:
        program: what to run.
        passed_fd: descriptor that its kind has besides; the caller closes it.
        peer: a program that runs in another session at the same time, and its descriptor; of its end nothing is known.
        output_bytes: limit on what it may print; the rest is dropped.
        when_sent: called when the sessions have the descriptors, to close those of which they wait for the end.
        budget: time that it shares with other programs.

    Raises:
        ExecutionError: see `run_python`.
    """
    if _line is None:
        raise ExecutionError(
            "programs can be run in workers of the reward service only, in a sandbox, and not by a scorer that "
            "declares needs, which the programs would get, too"
        )
    if budget is not None:
        program = replace(program, timeout_s=budget.limit(program.timeout_s))
    try:
        return _run(_line, program, passed_fd, peer, output_bytes, when_sent, budget)
    except (BrokenPipeError, ConnectionResetError):
        _end_without_executor()
    except OSError as error:
        raise ExecutionError(f"the program cannot be run ({error})") from None


def _run(
    line: socket.socket,
    program: Program,
    passed_fd: int | None,
    peer: tuple[Program, int] | None,
    output_bytes: int,
    when_sent: Callable[[], object],
    budget: TimeBudget | None,
) -> ProgramResult:
    token = secrets.token_bytes(TOKEN_BYTES)
    with contextlib.ExitStack() as read:
        with contextlib.ExitStack() as passed:
            (output, output_write), (report, report_write) = os.pipe(), os.pipe()
            for stack, descriptors in ((read, (output, report)), (passed, (output_write, report_write))):
                for descriptor in descriptors:
                    stack.callback(os.close, descriptor)
            own = [_described(program, token, passed), output_write, report_write]
            sessions = [own if passed_fd is None else [*own, passed_fd]]
            if peer is not None:
                nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                passed.callback(os.close, nowhere)
                described = _described(peer[0], secrets.token_bytes(TOKEN_BYTES), passed)
                sessions.append([described, nowhere, nowhere, peer[1]])
            line.settimeout(_GRACE_S)
            num_oom_kills, busy_before_s = _num_oom_kills(), busy_s(unknown=0.0)
            send_descriptors(line, _START + bytes(map(len, sessions)), list(chain.from_iterable(sessions)))
        when_sent()
        try:
            begun = time.monotonic()
            delay_s = partial(_delay_s, line, program.timeout_s, begun, busy_before_s)
            printed, reported, in_time = _collect(output, report, program.timeout_s, delay_s, output_bytes)
            if budget is not None:
                budget.charge(_taken_s(time.monotonic() - begun, delay_s))
        finally:
            shortage = _end_session(line)
    if not reported.startswith(BEGUN):
        raise ExecutionError("its process ended, or its time was over, before it had what a program needs")
    text = bytes(printed[:output_bytes]).decode("utf-8", "replace")
    ended = bytes(reported[len(BEGUN) :])
    if shortage and not (in_time and ended.startswith(b"\0")):
        raise ExecutionError(f"it failed, perhaps for want of what programs of other completions had: {shortage}")
    if not in_time:
        return ProgramResult(-1, text, finished=False)
    if not ended and _num_oom_kills() != num_oom_kills:
        raise ExecutionError("the kernel has ended processes for want of memory, perhaps also this one")
    return ProgramResult(ended[0] if ended else 1, text, finished=ended == b"\0" + token)


def _described(program: Program, token: bytes, passed: contextlib.ExitStack) -> int:
    """Return a descriptor of a file without a name that describes a program, which `passed` closes."""
    described = os.memfd_create("program", os.MFD_CLOEXEC)
    passed.callback(os.close, described)
    with os.fdopen(described, "wb", closefd=False) as file:
        file.write(token + json.dumps(asdict(program)).encode())
    return described


def _num_oom_kills() -> int:
    """Return how many processes the kernel has ended for want of memory since the machine started, 0 if it is not said.

    It ends the largest process, which need not be the one that took the memory.
    """
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/vmstat", "rb") as file:
        return int(file.read().partition(b"\noom_kill ")[2].split(None, 1)[0])
    return 0


def _end_session(line: socket.socket) -> str:
    """Let the executor kill the session, and wait until it has; return what its user lacked meanwhile.

    Raises:
        ExecutionError: there was no session.
    """
    answer = _ask(line, _KILL)
    if not answer.startswith(_KILLED):
        raise ExecutionError(answer.decode("utf-8", "replace"))
    return answer.removeprefix(_KILLED).decode("utf-8", "replace")


def _ask(line: socket.socket, request: bytes) -> bytes:
    """Send the executor a request and return its answer; end this process if there is none.

    The service then starts another worker. In this one each further program would fail, or get the answer that belongs
    to an earlier one.
    """
    answer = b""
    with contextlib.suppress(OSError):
        line.send(request)
        answer = line.recv(_ANSWER_BYTES)
    return answer or _end_without_executor()


def _end_without_executor() -> NoReturn:
    os.write(2, b"the process that starts programs has ended, or does not answer\n")
    os._exit(1)


def _taken_s(wall_s: float, delay_s: Callable[[], float]) -> float:
    """Return for how many of the seconds of a program it had a processor, or did not want one."""
    return wall_s if wall_s < _MEASURED_S else wall_s - delay_s()


def _delay_s(line: socket.socket, timeout_s: float, begun: float, busy_before_s: float) -> float:
    """Return for how many seconds the session's program has waited for a processor that others had."""
    usage = Usage(*json.loads(_ask(line, _MEASURE)))
    return waited_s(usage, limit_s=timeout_s, wall_s=time.monotonic() - begun, busy_before_s=busy_before_s)


def _collect(
    output: int, report: int, timeout_s: float, delay_s: Callable[[], float], output_bytes: int = OUTPUT_BYTES
) -> tuple[bytearray, bytearray, bool]:
    """Read what the program prints and its report, until it has ended; return both, and whether it ended in time.

    That is within `timeout_s` after the first byte of its report, besides `delay_s`, which is asked for then. A program
    can print all the time, and read both pipes itself.
    """
    printed, reported = bytearray(), bytearray()
    until = time.monotonic() + _GRACE_S
    poller = select.poll()
    for descriptor in (output, report):
        os.set_blocking(descriptor, False)
        poller.register(descriptor, select.POLLIN)
    left = {output: printed, report: reported}
    end = until
    while report in left and len(reported) < _REPORT_BYTES:  # what a child prints after its end does not count
        has_begun = bool(reported)
        for descriptor, _ in poller.poll(max(0.0, end - time.monotonic()) * 1000):
            if not _read(descriptor, left[descriptor], output_bytes):
                poller.unregister(descriptor)
                del left[descriptor]
        now = time.monotonic()  # before the delay is measured: until the answer is read, the program may wait again
        if reported and not has_begun:
            end = until = now + timeout_s
        elif report in left and len(reported) < _REPORT_BYTES and now >= end:
            end = until + delay_s()
            if end <= now:
                return printed, reported, False
            end = max(end, time.monotonic() + MEASURED_EVERY_S)
    while output in left and len(printed) <= output_bytes:  # a child may hold it open, and print on
        size = len(printed)
        if not _read(output, printed, output_bytes) or len(printed) == size or time.monotonic() >= end:
            break
    return printed, reported, True


def _read(descriptor: int, into: bytearray, limit: int) -> bool:
    """Read what a pipe has now, and drop what is beyond `limit` bytes; return whether it is open."""
    try:
        data = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return True
    if len(into) <= limit:
        into += data
    return bool(data)


# --- in the executor -----------------------------------------------------------------------------------------------


def _execute_all(line: socket.socket, mechanism: str) -> NoReturn:
    """Start and kill sessions, one after another. What a program is stays in its descriptors, which no one reads here.

    Each session is a copy of this process, so that it could find in its memory what this process has ever read.
    """
    try:
        syscalls.die_with_parent()
        os.closerange(3, line.fileno())
        os.closerange(line.fileno() + 1, 1024)
        sessions = Sessions(mechanism, be_program, leave=line.close, network=False)
        while True:
            sessions.prepare()
            data, descriptors, _, _ = socket.recv_fds(line, 1 + _MOST_SESSIONS, _MOST_DESCRIPTORS)
            if not data:
                break
            answer = _run_sessions(line, sessions, descriptors, data[1:])
            line.send(answer)
        sessions.kill_all()
    finally:
        os._exit(0)


def _run_sessions(line: socket.socket, sessions: Sessions, descriptors: list[int], sizes: bytes) -> bytes:
    """Start sessions, and kill them when the worker says so; return the answer to the worker.

    Args:
        line: the socket of the worker.
        sessions: starts them.
        descriptors: of one session after the other.
        sizes: number of descriptors of each.
    """
    pids, shortage = list[int](), shortage_of_user()
    answer = _KILLED
    try:
        for size in sizes:
            own, descriptors = descriptors[:size], descriptors[size:]
            try:
                pids.append(sessions.start(own))
            finally:
                for descriptor in own:  # the worker sees the ends of the pipes when the session alone has them
                    os.close(descriptor)
    except OSError as error:
        answer = f"no process can be started for it: {error}".encode()
        for descriptor in descriptors:
            os.close(descriptor)
    request = _MEASURE
    while request == _MEASURE:
        while not _has_request(line):
            shortage = shortage or shortage_of_user()
        request = line.recv(1)
        if request == _MEASURE:
            line.send(json.dumps(_usage_of(pids)).encode())
    shortage = shortage or shortage_of_user()
    for pid in pids:
        sessions.kill(pid)
    return answer + (shortage.encode() if answer == _KILLED else b"")


def _usage_of(pids: list[int]) -> Usage:
    """Return the use of processors by sessions of which one waits for another."""
    measured = [Meter(pid).usage() for pid in pids] or [UNKNOWN]
    processor_s, delay_s, is_whole = zip(*measured, strict=True)
    return Usage(sum(processor_s), sum(delay_s), all(is_whole))


def _has_request(line: socket.socket) -> bool:
    """Return whether the worker has sent something, or ended, within `PROBED_EVERY_S`."""
    poller = select.poll()
    poller.register(line, select.POLLIN)
    return bool(poller.poll(PROBED_EVERY_S * 1000))

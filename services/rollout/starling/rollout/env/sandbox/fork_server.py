"""The keeper of sandboxed processes: it imports what a user named, once, and forks a process for each session.

    python -P -u -m starling.rollout.env.sandbox.fork_server FD

It speaks over the socket FD only, and runs nothing but imports itself. A forked process serves one session over a
socket of its own: what it does to modules and memory ends with it. The keeper reaps it when told to, never before: so
the number of its process group cannot have passed to another when it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

from setproctitle import setproctitle

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.rollout.env.sandbox.messages import (
    LENGTH,
    CallFunction,
    CallRaised,
    CallReturned,
    FromForkServer,
    FromSession,
    ImportFailed,
    KillSession,
    MakeObject,
    SandboxSetup,
    StartSession,
    TargetsImported,
    ToSession,
    encode,
    frame,
    to_keeper,
    to_session,
)
from starling.rollout.env.sandbox.schema import schema_of

MESSAGE_BYTES: Final = 1 << 17
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_FILE_BYTES: Final = 1 << 30
_PROBLEM_LENGTH: Final = 2000


def main(argv: list[str]) -> None:
    """Serve the rollout over the socket `argv[1]` until it goes."""
    control = socket.socket(fileno=int(argv[1]))
    os.set_inheritable(control.fileno(), False)  # what a tool starts must not hold the line open
    setproctitle("starling-tools")
    sys.path.append(os.getcwd())  # last: a file of the user's must not take the place of a library's module
    setup = to_keeper.decode(control.recv(MESSAGE_BYTES))
    assert isinstance(setup, SandboxSetup), "it is said first"
    limit(setup.memory_mb)
    signal.setitimer(signal.ITIMER_REAL, setup.import_s)  # an import that never ends, of a rollout that has gone
    answer, targets = prepare(setup)
    signal.setitimer(signal.ITIMER_REAL, 0)
    with contextlib.suppress(BrokenPipeError):
        control.send(encode(answer))
        if isinstance(answer, TargetsImported):
            gc.freeze()  # pages that the collector touches would be copied in every process
            keep(control, targets)


def limit(memory_mb: int) -> None:
    """Bound what this process and those that it forks may take, and let none of them gain rights."""
    size = memory_mb << 20
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
    ):
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (bound, bound))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def prepare(setup: SandboxSetup) -> tuple[FromForkServer, list[Any]]:
    """Import what is named."""
    targets: list[Any] = []
    try:
        for name in setup.names:
            found = import_object(name, setup.what)
            if not callable(found):
                raise ConfigError(f"{setup.what} {name!r} is a {type(found).__name__}: name something to call.")
            targets.append(found)
        return TargetsImported(tuple(schema_of(target) for target in targets) if setup.described else ()), targets
    except ConfigError as error:
        return ImportFailed(_sayable(str(error))), []


def keep(control: socket.socket, targets: list[Any]) -> None:
    """Fork a process for each session, and kill it when it ends."""
    sessions: dict[int, int] = {}
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not data:
                return
            message = to_keeper.decode(data)
            if isinstance(message, StartSession):
                sessions[message.session] = _fork(control, descriptors[0], targets)
                os.close(descriptors[0])
            elif isinstance(message, KillSession) and message.session in sessions:
                _kill(sessions.pop(message.session))
    finally:
        for pid in sessions.values():
            _kill(pid)


def _fork(control: socket.socket, descriptor: int, targets: list[Any]) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        if os.getppid() == keeper:  # it may have ended before we asked
            with socket.socket(fileno=descriptor) as line:
                serve(line, targets)
    finally:
        os._exit(0)  # no handler of the keeper's, and nothing flushed twice
    raise AssertionError("a forked process does not come back")


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the first finds nothing before the process has a group of its own
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def serve(line: socket.socket, targets: list[Any]) -> None:
    """Answer the calls of one session, one after the other, until the line ends."""
    made: Any = None
    while (body := _receive(line)) is not None:
        message: ToSession = to_session.decode(body)
        try:
            if isinstance(message, MakeObject):
                made = targets[message.target](**message.options)
                answer: FromSession = CallReturned(None)
            else:
                answer = CallReturned(_invoke(message, made, targets))
            sent = frame(encode(answer))
        except BaseException as error:  # noqa: BLE001 - the edge: a user's code may raise anything, even SystemExit
            sent = frame(encode(CallRaised(describe(error))))
        line.sendall(sent)


def _invoke(message: CallFunction, made: Any, targets: list[Any]) -> Any:
    function: Callable[..., Any] = getattr(made, message.method) if message.target < 0 else targets[message.target]
    given = function(*message.positional, **message.named)
    return asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given


async def _awaited(given: Any) -> Any:
    return await given


def _receive(line: socket.socket) -> bytes | None:
    head = _exactly(line, LENGTH.size)
    return None if head is None else _exactly(line, LENGTH.unpack(head)[0])


def _exactly(line: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = line.recv(size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)


def describe(error: BaseException) -> str:
    """Say an error in words: ``ZeroDivisionError: division by zero``."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the text of a user's exception is the user's code too
        text = "(its text cannot be had)"
    return _sayable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _sayable(text: str) -> str:
    """Bound the text, and replace what UTF-8 cannot carry."""
    text = text if len(text) <= _PROBLEM_LENGTH else text[: _PROBLEM_LENGTH - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv)

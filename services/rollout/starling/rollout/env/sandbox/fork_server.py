"""Fork server of sandboxed processes: imports the user's code once and forks a process for each session.

    python -P -u -m starling.rollout.env.sandbox.fork_server FD

It communicates over the socket FD only, and runs nothing of the user's code but the imports. A forked process serves
one session over its own socket: its changes to modules and memory end with it. How
these processes are isolated from each other and from the machine is decided in `starling.common.sandbox`.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final

from setproctitle import setproctitle

from starling.common.errors import ConfigError
from starling.common.importing import import_object
from starling.common.raised import describe_type
from starling.common.sandbox.inside import Sessions, settle
from starling.common.sandbox.usage import UNKNOWN, Meter
from starling.rollout.env.base import AgentTask, EpisodeOutcome
from starling.rollout.env.sandbox.messages import (
    LENGTH,
    PROBLEM_CHARS,
    SESSION_BEGUN,
    CallFunction,
    CallProgram,
    CallRaised,
    CallReturned,
    FromForkServer,
    FromSession,
    ImportFailed,
    KillSession,
    MakeObject,
    MeasureSession,
    ProgramEnded,
    SandboxSetup,
    SessionUsage,
    StartSession,
    TargetsImported,
    ToSession,
    decode_to_fork_server,
    decode_to_session,
    encode,
    frame,
)
from starling.rollout.env.sandbox.schema import schema_of

MESSAGE_BYTES: Final = 1 << 17
BACKLOG: Final = 1024


def main(argv: list[str]) -> None:
    """Serve the rollout over the socket `argv[1]` until it closes."""
    control = socket.socket(fileno=int(argv[1]))
    os.set_inheritable(control.fileno(), False)  # what a tool starts must not keep the socket open
    setproctitle("starling-tools")
    sys.path.append(os.getcwd())  # last, so that a user's file cannot shadow a library's module
    setup = decode_to_fork_server.decode(control.recv(MESSAGE_BYTES))
    assert isinstance(setup, SandboxSetup), "the first message is the setup"
    settle(setup.mechanism, memory_mb=setup.memory_mb, max_tasks=setup.max_tasks)
    signal.setitimer(signal.ITIMER_REAL, setup.import_s)  # ends an import that hangs after the rollout has gone
    answer, targets = prepare(setup)
    signal.setitimer(signal.ITIMER_REAL, 0)
    with contextlib.suppress(BrokenPipeError):
        _send_ready(control, answer, listens=setup.listens)
        if isinstance(answer, TargetsImported):
            gc.freeze()  # pages that the collector touches would be copied in every fork
            run_sessions(control, targets, setup)


def _has_coroutines(target: Any) -> bool:
    methods = vars(target).values() if inspect.isclass(target) else ()
    return any(map(inspect.iscoroutinefunction, (target, *methods)))


def _send_ready(control: socket.socket, answer: FromForkServer, *, listens: bool) -> None:
    if not (listens and isinstance(answer, TargetsImported)):
        control.send(encode(answer))
        return
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        socket.send_fds(control, [encode(answer)], [listener.fileno()])


def prepare(setup: SandboxSetup) -> tuple[FromForkServer, list[Any]]:
    """Import the names of `setup`."""
    targets: list[Any] = []
    try:
        for name in setup.names:
            found = import_object(name, setup.what)
            if not callable(found):
                raise ConfigError(f"{setup.what} {name!r} is a {type(found).__name__}: name something to call.")
            if setup.arguments is not None:
                from starling.rollout.env.registry import check_options  # loads pydantic, which tools do not need

                check_options(f"{setup.what} {name!r}", found, (None,), dict.fromkeys(setup.arguments))
            targets.append(found)
        if any(map(_has_coroutines, targets)):
            import asyncio  # noqa: F401 - once, and not in each session; without coroutines it is not needed

        schemas = tuple(schema_of(target) for target in targets) if setup.with_schemas else ()
        return TargetsImported(schemas), targets
    except ConfigError as error:
        return ImportFailed(_bounded(str(error))), []


def run_sessions(control: socket.socket, targets: list[Any], setup: SandboxSetup) -> None:
    """Start a process for each session, and kill it at the session's end."""

    def serve_one(descriptors: list[int]) -> None:
        serve(socket.socket(fileno=descriptors[0]), targets)

    sessions = Sessions(
        setup.mechanism,
        serve_one,
        leave=control.close,
        network=setup.network,
        writable=setup.writable,
        shows_imports=True,
    )
    pids, meters = dict[int, int](), dict[int, Meter]()
    try:
        while True:
            sessions.prepare()
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not data:
                return
            message = decode_to_fork_server.decode(data)
            if isinstance(message, StartSession):
                # At the limit on processes, the closed socket tells the rollout.
                with contextlib.suppress(OSError), socket.socket(fileno=descriptors[0]) as connection:
                    pids[message.session] = pid = sessions.start([connection.fileno()])
                    meters[message.session] = Meter(pid)
            elif isinstance(message, MeasureSession):
                meter = meters.get(message.session)
                if not message.begin:
                    control.send(encode(SessionUsage(message.session, UNKNOWN if meter is None else meter.usage())))
                elif meter is not None:
                    meter.begin()
            elif isinstance(message, KillSession) and message.session in pids:
                del meters[message.session]
                sessions.kill(pids.pop(message.session), wait=False)
    finally:
        sessions.kill_all()


def serve(connection: socket.socket, targets: list[Any]) -> None:
    """Answer the calls of one session, one after another, until its socket closes."""
    with contextlib.suppress(BrokenPipeError):  # the episode has ended
        connection.sendall(SESSION_BEGUN)
    made: Any = None
    while (body := _receive(connection)) is not None:
        message: ToSession = decode_to_session.decode(body)
        try:
            if isinstance(message, MakeObject):
                made = targets[message.target](**message.options)
                answer: FromSession = CallReturned(None)
            elif isinstance(message, CallProgram):
                answer = _play(message, targets)
            else:
                answer = CallReturned(_invoke(message, made, targets))
            sent = frame(encode(answer))
        except BaseException as error:  # noqa: BLE001 - the edge: user code may raise anything, even SystemExit
            sent = frame(encode(CallRaised(describe_type(error))))
        connection.sendall(sent)


def _invoke(message: CallFunction, made: Any, targets: list[Any]) -> Any:
    function: Callable[..., Any] = getattr(made, message.method) if message.target < 0 else targets[message.target]
    returned = function(*message.positional, **message.named)
    return _run_coroutine(returned) if inspect.isawaitable(returned) else returned


def _play(message: CallProgram, targets: list[Any]) -> FromSession:
    given = targets[message.target](AgentTask(**message.task), **message.named)
    if inspect.isawaitable(given):
        given = _run_coroutine(given)
    if isinstance(given, EpisodeOutcome):
        metrics = {str(name): float(value) for name, value in given.metrics.items()}
        return ProgramEnded(given.reward, metrics, given.status, given.problem)
    return CallReturned(given)


def _run_coroutine(returned: Awaitable[Any]) -> Any:
    import asyncio  # most tools need none of it, and it doubles the fork server's start

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def _receive(connection: socket.socket) -> bytes | None:
    head = _receive_exactly(connection, LENGTH.size)
    return None if head is None else _receive_exactly(connection, LENGTH.unpack(head)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        data = connection.recv(size - len(parts))
        if not data:
            return None
        parts += data
    return bytes(parts)


def _bounded(text: str) -> str:
    """Limit the text's length, and replace what UTF-8 cannot encode."""
    text = text if len(text) <= PROBLEM_CHARS else text[: PROBLEM_CHARS - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main(sys.argv)

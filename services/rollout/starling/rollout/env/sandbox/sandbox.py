"""Sandbox for user code: each session runs in a process of its own, so that a failure costs one call.

    rollout ──control socket──> fork server (imports once) ──fork──> one process per session, with its own socket

The fork server runs in a sandbox of `starling.common.sandbox`, and each session in one inside of it, so far as the
machine permits: with a file system that shows the interpreter, the packages and the code, a user, network, `/proc` and
`/tmp` of its own, and none of the rollout's environment variables. Everything that a session has started is killed at
its end or at a timeout. What it sends is decoded as from an attacker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import msgspec

from starling.common.errors import ConfigError, StarlingError
from starling.common.sandbox.inside import SEND_AGAIN_S, SEND_S
from starling.common.sandbox.launch import BoxProcess, choose, report
from starling.common.sandbox.settings import SandboxLevel, SandboxNeeds
from starling.common.sandbox.threads import start_thread, started_thread
from starling.common.sandbox.usage import MEASURED_EVERY_S, UNKNOWN, Usage, busy_s, waited_s
from starling.common.sandbox.view import view_of
from starling.rollout.env.base import AgentTask, EpisodeOutcome
from starling.rollout.env.sandbox.messages import (
    FRAME_LIMIT_BYTES,
    LENGTH,
    PROBLEM_CHARS,
    SESSION_BEGUN,
    VALUES_LIMIT_BYTES,
    CallFunction,
    CallProgram,
    CallReturned,
    KillSession,
    MakeObject,
    MeasureSession,
    ProgramEnded,
    SandboxSetup,
    StartSession,
    TargetsImported,
    TextReturned,
    ToSession,
    decode_from_fork_server,
    decode_from_session,
    decode_usage,
    encode,
    frame,
)

MESSAGE_BYTES: Final = 1 << 17
DEFAULT_NEEDS: Final = SandboxNeeds()
BACKLOG: Final = 1024
_END_S: Final = 5.0
"""How long a killed fork server may take to be gone."""
_MEASURE_S: Final = 30.0
"""How long the fork server may take to measure a session."""
_START_S: Final = 120.0
"""How long it may take to start a session, and its process to begin."""


class SandboxError(StarlingError):
    """A call failed: its exception, or the end of its process, as text."""


class SandboxTimeoutError(SandboxError):
    """A call took too long; its process is killed."""


class Sandbox:
    """A fork server and its sessions. May be used from any thread and event loop."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        what: str,
        with_schemas: bool = False,
        memory_mb: int = 4096,
        max_processes: int = 16,
        import_s: float = 60.0,
        level: SandboxLevel = "auto",
        needs: SandboxNeeds = DEFAULT_NEEDS,
        arguments: tuple[str, ...] | None = None,
        on_listener: Callable[[socket.socket], None] | None = None,
    ) -> None:
        """Start the fork server, and wait until it has imported everything.

        Args:
            names: ``module:attribute`` or ``path/to/file.py:attribute``, each a callable.
            what: kind of the names, as the beginning of an error: ``Tool``.
            with_schemas: set `schemas` from the functions' signatures.
            memory_mb: limit on the address space of each process, in MiB.
            max_processes: limit on concurrent sessions; further ones wait.
            import_s: limit on the time of the imports.
            level: how strong the sandbox must be.
            needs: what the code may reach.
            arguments: names of the arguments of programs (`SandboxSession.play`), which are checked.
            on_listener: takes a listening socket that the code can connect to, if it cannot connect to any other; again
                for each new fork server.

        Raises:
            ConfigError: one of them cannot be imported or called, the imports take too long, or the machine does not
                offer the level.
        """
        self.sandboxing = choose(level)
        """How the sandbox is made."""
        report(self.sandboxing, what.lower())
        mechanism, self._on_listener, self._needs = self.sandboxing.mechanism, on_listener, needs
        listens = on_listener is not None and not needs.network and self.sandboxing.isolates
        limits = (memory_mb, import_s, mechanism, needs.max_tasks, needs.network or listens, arguments, listens)
        writable = tuple(map(str, needs.writable_paths))
        self._setup = SandboxSetup(tuple(names), what, with_schemas, *limits, writable)
        self._ports = self._open_port() if mechanism == "landlock" and not needs.network else ()
        self._max_processes = max_processes
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._semaphores = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._replacing, self._measuring = started_thread("sandbox-start"), started_thread("sandbox-measure")
        self._fork_server, self.schemas = self._start()

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """Open a session with a process of its own, which is killed at the end.

        Raises:
            SandboxError: no process can be started.
        """
        semaphore = self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_processes))
        async with semaphore:
            number = next(self._numbers)
            mine, theirs = socket.socketpair()
            with contextlib.ExitStack() as left, theirs:
                left.enter_context(mine)
                fork_server = self._fork_server
                try:
                    await fork_server.open_in_turn(number, theirs)
                except OSError:  # the fork server has ended
                    loop = asyncio.get_running_loop()
                    fork_server = await loop.run_in_executor(self._replacing, self._replace, fork_server)
                    fork_server.open(number, theirs)
                left.pop_all()
            connection: asyncio.StreamWriter | socket.socket = mine
            try:
                mine.setblocking(False)
                reader, connection = await asyncio.open_unix_connection(sock=mine)
                yield SandboxSession(reader, connection, partial(fork_server.measured, number))
            finally:
                fork_server.end(number)
                connection.close()

    def close(self) -> None:
        """End the fork server and all sessions."""
        with self._lock:
            self._fork_server.close()

    def _open_port(self) -> tuple[int, ...]:
        """Listen at a port to which alone Landlock lets the code connect."""
        if self._on_listener is None:
            return ()
        listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._on_listener(listener)
        return (listener.getsockname()[1],)

    def _start(self) -> tuple[_ForkServer, tuple[dict[str, Any], ...]]:
        view = view_of(self._needs, self._setup.names)
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", "starling.rollout.env.sandbox.fork_server"]
            process = BoxProcess(
                [*command, str(theirs.fileno())],
                self.sandboxing,
                self._needs,
                view,
                pass_fds=(theirs.fileno(),),
                inherits_path=True,
                ports=self._ports,
                what=self._setup.what.lower(),
            )
        fork_server = _ForkServer(connection, process, self._measuring)
        try:
            schemas, listener = _await_ready(connection, process, self._setup)
            if listener is not None and self._on_listener is not None:
                self._on_listener(listener)
            return fork_server, schemas
        except BaseException:  # raised again; the sandbox's processes may not outlive the failed start
            process.kill()
            fork_server.close()
            raise

    def _replace(self, gone: _ForkServer) -> _ForkServer:
        """Return a fork server other than `gone`, starting one unless another thread has."""
        with self._lock:
            if self._fork_server is gone:
                gone.close()
                try:
                    self._fork_server, _ = self._start()
                except (ConfigError, OSError) as error:
                    raise SandboxError(f"no process can be started for it: {error}") from error
            return self._fork_server


class SandboxSession:
    """Connection to one process. Calls run one after another.

    Time limits do not count the time in which a call waits for a processor that others have (`waited_s`): what another
    episode runs could otherwise make it fail. The limit of the episode ends it in any case.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, measure: Callable[[bool], Awaitable[Usage]]
    ) -> None:
        """`measure` returns how the session's processes have used processors since its start, or since it was called
        with True."""
        self._reader, self._writer, self._measure = reader, writer, measure
        self._has_begun = self._had_call = False

    async def make(self, target: int, options: dict[str, Any], *, timeout_s: float) -> None:
        """Create the session's object by calling name number `target` with `options`. Raises SandboxError."""
        await self._request(MakeObject(target, options), timeout_s)

    async def invoke(self, method: str, *positional: Any, timeout_s: float, **named: Any) -> Any:
        """Call a method of the session's object; its result has passed MessagePack. Raises SandboxError."""
        return await self._request(CallFunction(-1, method, positional, named), timeout_s)

    async def call(self, target: int, named: dict[str, Any], *, timeout_s: float) -> Any:
        """Call name number `target` itself; its result has passed MessagePack. Raises SandboxError."""
        return await self._request(CallFunction(target, "", (), named), timeout_s)

    async def play(self, target: int, task: AgentTask, named: Mapping[str, Any]) -> Any:
        """Call name number `target` as a program; its result is an `EpisodeOutcome`, or has passed MessagePack.

        It has no time limit of its own. Raises SandboxError.
        """
        return await self._request(CallProgram(target, asdict(task), dict(named)), None)

    async def _request(self, message: ToSession, timeout_s: float | None) -> Any:
        try:
            request = frame(encode(message))
        except (OverflowError, ValueError, TypeError, RecursionError) as error:  # models write any number and text
            raise SandboxError(f"its arguments cannot be passed on ({type(error).__name__}: {error})") from None
        try:
            await self._begin()
            exchange = self._exchange(request)
            body = await (exchange if timeout_s is None else self._in_time(exchange, timeout_s))
        except (OSError, EOFError):
            raise SandboxError("it ended its process") from None
        try:
            answer = decode_from_session(body)
        except (msgspec.MsgspecError, RecursionError, ValueError):
            if len(body) > VALUES_LIMIT_BYTES:
                raise SandboxError(f"it returned {len(body) >> 20} MiB that are not one text; return less") from None
            raise SandboxError("it sent something that is no answer") from None
        if isinstance(answer, CallReturned | TextReturned):
            return answer.value
        if isinstance(answer, ProgramEnded):
            problem = answer.problem[:PROBLEM_CHARS]
            return EpisodeOutcome(answer.reward, answer.metrics, answer.status, problem)
        raise SandboxError(answer.problem[:PROBLEM_CHARS])

    async def _begin(self) -> None:
        """Wait until the session's process has begun: the end of another session may take the fork server's time."""
        if self._has_begun:
            return
        try:
            async with asyncio.timeout(_START_S):
                await self._reader.readexactly(len(SESSION_BEGUN))
        except TimeoutError:
            raise SandboxError(f"its process had not begun after {_START_S:g} s") from None
        self._has_begun = True

    async def _exchange(self, request: bytes) -> bytes:
        self._writer.write(request)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > FRAME_LIMIT_BYTES:
            raise SandboxError(f"it returned {length >> 20} MiB; return less")
        return await self._reader.readexactly(length)

    async def _in_time(self, exchange: Coroutine[Any, Any, bytes], timeout_s: float) -> bytes:
        """Return what `exchange` does, within `timeout_s` without the time for which the call waits for a processor."""
        begun, busy_before_s = time.monotonic(), busy_s(unknown=0.0)
        task = asyncio.create_task(exchange)
        try:
            if self._had_call and not await _is_done(task, begun + min(timeout_s, MEASURED_EVERY_S)):
                await self._measure(True)  # short calls are not measured
            self._had_call, end = True, begun + timeout_s
            while not await _is_done(task, end):
                now = time.monotonic()  # before it is measured: until the answer is read, the call may wait again
                usage, end = await self._measure(False), begun + timeout_s
                end += waited_s(usage, limit_s=timeout_s, wall_s=now - begun, busy_before_s=busy_before_s)
                if end <= now and not task.done():
                    raise SandboxTimeoutError(f"it took longer than {timeout_s:g} s")
                end = max(end, time.monotonic() + MEASURED_EVERY_S)
            return task.result()
        finally:
            task.cancel()


async def _is_done(task: asyncio.Task[bytes], until: float) -> bool:
    """Return whether a task is done, at the latest at `until` (monotonic seconds)."""
    done, _ = await asyncio.wait([task], timeout=max(0.0, until - time.monotonic()))
    return bool(done)


class _ForkServer:
    """The fork server's process, and the control socket to it."""

    def __init__(self, connection: socket.socket, process: BoxProcess, measuring: ThreadPoolExecutor) -> None:
        """Take both over; `measuring` has one thread."""
        self._connection, self.process, self._measuring = connection, process, measuring

    def open(self, number: int, theirs: socket.socket) -> None:
        """Start a process that serves the socket `theirs`. Raises OSError when the fork server is busy or has ended."""
        socket.send_fds(self._connection, [encode(StartSession(number))], [theirs.fileno()], socket.MSG_DONTWAIT)

    async def open_in_turn(self, number: int, theirs: socket.socket) -> None:
        """As `open`, once the fork server reads, and the kernel takes another descriptor
        (`starling.common.sandbox.inside.send_descriptors`).

        Raises:
            OSError: the fork server has ended.
            SandboxError: it does not read, or the kernel takes none.
        """
        begun = time.monotonic()
        while True:
            try:
                self.open(number, theirs)
                return
            except OSError as error:
                if error.errno not in (errno.ETOOMANYREFS, errno.EAGAIN):
                    raise
                limit_s = SEND_S if error.errno == errno.ETOOMANYREFS else _START_S
                if time.monotonic() > begun + limit_s:
                    raise SandboxError(f"no process can be started for it: {error}") from None
            await asyncio.sleep(SEND_AGAIN_S)

    async def measured(self, number: int, begin: bool) -> Usage:
        """Return how the processes of a session have used processors, or count from now on."""
        return await asyncio.get_running_loop().run_in_executor(self._measuring, self._measure, number, begin)

    def _measure(self, number: int, begin: bool) -> Usage:
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._connection.send(encode(MeasureSession(number, begin)))
            until, poller = time.monotonic() + _MEASURE_S, select.poll()
            poller.register(self._connection, select.POLLIN)
            while not begin and poller.poll(max(0.0, until - time.monotonic()) * 1000):
                answer = decode_usage.decode(self._connection.recv(MESSAGE_BYTES))
                if answer.session == number:  # else it is late
                    return answer.usage
        return UNKNOWN

    def end(self, number: int) -> None:
        """Kill the process of a session; if the fork server has ended, its processes have too."""
        message = encode(KillSession(number))
        try:
            self._connection.send(message, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is busy
            with contextlib.suppress(OSError):
                start_thread(threading.Thread(target=self._send, args=(message,), daemon=True))
        except OSError:
            pass

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        """End the fork server, and wait until it is gone."""
        self._connection.close()
        self.process.wait(_END_S)
        self.process.close()


def _await_ready(
    connection: socket.socket, process: BoxProcess, setup: SandboxSetup
) -> tuple[tuple[dict[str, Any], ...], socket.socket | None]:
    """Return the schemas of the functions, and the socket that listens in the sandbox if there is one."""
    subject = f"{setup.what} {', '.join(map(repr, setup.names))}"
    with contextlib.suppress(BrokenPipeError):  # `recv` tells
        connection.send(encode(setup))
    poller, until = select.poll(), time.monotonic() + setup.import_s
    poller.register(connection, select.POLLIN)
    if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
        raise ConfigError(
            f"{subject}: importing took longer than {setup.import_s:g} s; make the modules import faster."
        )
    data, descriptors = b"", list[int]()
    with contextlib.suppress(ConnectionResetError):  # it has ended before it read its setup
        data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    listener = socket.socket(fileno=descriptors[0]) if descriptors else None
    if not data:
        why = process.problem and f" ({process.problem})"
        raise ConfigError(f"{subject}: importing ended the process{why}; see its output, and the limit memory_mb.")
    try:
        answer = decode_from_fork_server.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        raise ConfigError(f"{subject}: while it was imported, something wrote into the sandbox's socket.") from None
    if isinstance(answer, TargetsImported):
        return answer.schemas, listener
    raise ConfigError(answer.problem)

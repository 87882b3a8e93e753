"""Sandbox for user code: each session runs in a process of its own, so that a failure costs one call.

    rollout ──control socket──> fork server (imports once) ──fork──> one process per session, with its own socket

A process has none of the rollout's environment variables (keys, addresses), limited memory and files, no new
privileges, and its own process group, which is killed as a whole at the end of the session or at a timeout. That
protects the rollout from mistakes, not from malice: the code runs as the same user and has the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from starling.common.errors import ConfigError, StarlingError
from starling.rollout.env.sandbox.messages import (
    FRAME_LIMIT_BYTES,
    LENGTH,
    CallFunction,
    CallReturned,
    KillSession,
    MakeObject,
    SandboxSetup,
    StartSession,
    TargetsImported,
    ToSession,
    decode_from_fork_server,
    decode_from_session,
    encode,
    frame,
)

MESSAGE_BYTES: Final = 1 << 17
_END_S: Final = 5.0
"""How long a killed fork server may take to be gone."""


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
    ) -> None:
        """Start the fork server, and wait until it has imported everything.

        Args:
            names: ``module:attribute`` or ``path/to/file.py:attribute``, each a callable.
            what: kind of the names, as the beginning of an error: ``Tool``.
            with_schemas: set `schemas` from the functions' signatures.
            memory_mb: limit on the address space of each process, in MiB.
            max_processes: limit on concurrent sessions; further ones wait.
            import_s: limit on the time of the imports.

        Raises:
            ConfigError: one of them cannot be imported or called, or the imports take too long.
        """
        self._setup = SandboxSetup(tuple(names), what, with_schemas, memory_mb, import_s)
        self._max_processes = max_processes
        self._semaphores: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._semaphores = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._fork_server, self.schemas = _start(self._setup)

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
                    fork_server.open(number, theirs)
                except OSError:  # the fork server has ended
                    fork_server = await asyncio.to_thread(self._replace, fork_server)
                    fork_server.open(number, theirs)
                left.pop_all()
            connection: asyncio.StreamWriter | socket.socket = mine
            try:
                mine.setblocking(False)
                reader, connection = await asyncio.open_unix_connection(sock=mine)
                yield SandboxSession(reader, connection)
            finally:
                fork_server.end(number)
                connection.close()

    def close(self) -> None:
        """End the fork server and all sessions."""
        with self._lock:
            self._fork_server.close()

    def _replace(self, gone: _ForkServer) -> _ForkServer:
        """Return a fork server other than `gone`, starting one unless another thread has."""
        with self._lock:
            if self._fork_server is gone:
                gone.close()
                try:
                    self._fork_server, _ = _start(self._setup)
                except (ConfigError, OSError) as error:
                    raise SandboxError(f"no process can be started for it: {error}") from error
            return self._fork_server


class SandboxSession:
    """Connection to one process. Calls run one after another."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def make(self, target: int, options: dict[str, Any], *, timeout_s: float) -> None:
        """Create the session's object by calling name number `target` with `options`. Raises SandboxError."""
        await self._request(MakeObject(target, options), timeout_s)

    async def invoke(self, method: str, *positional: Any, timeout_s: float, **named: Any) -> Any:
        """Call a method of the session's object; its result has passed MessagePack. Raises SandboxError."""
        return await self._request(CallFunction(-1, method, positional, named), timeout_s)

    async def call(self, target: int, named: dict[str, Any], *, timeout_s: float) -> Any:
        """Call name number `target` itself; its result has passed MessagePack. Raises SandboxError."""
        return await self._request(CallFunction(target, "", (), named), timeout_s)

    async def _request(self, message: ToSession, timeout_s: float) -> Any:
        try:
            request = frame(encode(message))
        except (OverflowError, ValueError, TypeError, RecursionError) as error:  # models write any number and text
            raise SandboxError(f"its arguments cannot be passed on ({type(error).__name__}: {error})") from None
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(request)
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if length > FRAME_LIMIT_BYTES:
                    raise SandboxError(f"it returned {length >> 20} MiB; return less")
                answer = decode_from_session.decode(await self._reader.readexactly(length))
        except TimeoutError:
            raise SandboxTimeoutError(f"it took longer than {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise SandboxError("it ended its process") from None
        if isinstance(answer, CallReturned):
            return answer.value
        raise SandboxError(answer.problem)


class _ForkServer:
    """The fork server's process, and the control socket to it."""

    def __init__(self, connection: socket.socket, child: subprocess.Popen[bytes]) -> None:
        self._connection, self._child = connection, child

    def open(self, number: int, theirs: socket.socket) -> None:
        """Start a process that serves the socket `theirs`. Raises OSError when the fork server has ended."""
        socket.send_fds(self._connection, [encode(StartSession(number))], [theirs.fileno()])

    def end(self, number: int) -> None:
        """Kill the process of a session; if the fork server has ended, its processes have too."""
        with contextlib.suppress(OSError):
            self._connection.send(encode(KillSession(number)))

    def close(self) -> None:
        """End the fork server, and wait until it is gone."""
        self._connection.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(_END_S)


def _start(setup: SandboxSetup) -> tuple[_ForkServer, tuple[dict[str, Any], ...]]:
    connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "starling.rollout.env.sandbox.fork_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # tools may print
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=_environment(),
        )
    fork_server = _ForkServer(connection, child)
    try:
        return fork_server, _await_ready(connection, setup)
    except BaseException:
        child.kill()
        fork_server.close()
        raise


def _await_ready(connection: socket.socket, setup: SandboxSetup) -> tuple[dict[str, Any], ...]:
    subject = f"{setup.what} {', '.join(map(repr, setup.names))}"
    connection.send(encode(setup))
    poller, until = select.poll(), time.monotonic() + setup.import_s
    poller.register(connection, select.POLLIN)
    if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
        raise ConfigError(
            f"{subject}: importing took longer than {setup.import_s:g} s; make the modules import faster."
        )
    data = connection.recv(MESSAGE_BYTES)
    if not data:
        raise ConfigError(f"{subject}: importing ended the process; see its output, and the limit memory_mb.")
    answer = decode_from_fork_server.decode(data)
    if isinstance(answer, TargetsImported):
        return answer.schemas
    raise ConfigError(answer.problem)


def _environment() -> dict[str, str]:
    """Return the whole environment of user code: enough to find modules and programs."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
        "OMP_NUM_THREADS": "1",
    }

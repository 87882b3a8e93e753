"""Code of others in processes of its own: what it breaks, takes or never returns from costs one call.

    rollout ──control──> keeper (imports once) ──fork──> a process for each session, with a socket to the rollout

A process has nothing of the rollout's environment (no keys, no addresses), bounds on memory and files, no way to gain
rights, and a session of its own, which is killed as a whole when it ends or takes too long. That protects the rollout
from mistakes. It is no prison: the code runs as the same user and reaches the network.
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
    encode,
    frame,
    from_keeper,
    from_session,
)

MESSAGE_BYTES: Final = 1 << 17
_END_S: Final = 5.0
"""How long a killed keeper may take to be gone."""


class SandboxError(StarlingError):
    """A call did not give a result: what it raised, or that its process ended, in words."""


class SandboxTimeoutError(SandboxError):
    """A call took too long; its process is killed."""


class Sandbox:
    """A keeper, and the sessions that it has processes for. May be used from any thread and event loop."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        what: str,
        described: bool = False,
        memory_mb: int = 4096,
        max_processes: int = 16,
        import_s: float = 60.0,
    ) -> None:
        """Start a keeper, and wait until it has imported everything.

        Args:
            names: ``module:attribute`` or ``path/to/file.py:attribute``, each something to call.
            what: what each is to be, as the beginning of a sentence: ``Tool``.
            described: have `schemas` made from the functions' signatures.
            memory_mb: most MiB of address space of each process.
            max_processes: most sessions at a time; others wait.
            import_s: how long the imports may take.

        Raises:
            ConfigError: one of them cannot be imported or called, or the imports take too long.
        """
        self._setup = SandboxSetup(tuple(names), what, described, memory_mb, import_s)
        self._max_processes = max_processes
        self._room: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]
        self._room = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._keeper, self.schemas = _start(self._setup)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[SandboxSession]:
        """Have a process of one's own; it is killed at the end.

        Raises:
            SandboxError: no process can be had.
        """
        room = self._room.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_processes))
        async with room:
            number = next(self._numbers)
            mine, theirs = socket.socketpair()
            with contextlib.ExitStack() as left, theirs:
                left.enter_context(mine)
                keeper = self._keeper
                try:
                    keeper.open(number, theirs)
                except OSError:  # it has gone
                    keeper = await asyncio.to_thread(self._replace, keeper)
                    keeper.open(number, theirs)
                left.pop_all()
            line: asyncio.StreamWriter | socket.socket = mine
            try:
                mine.setblocking(False)
                reader, line = await asyncio.open_unix_connection(sock=mine)
                yield SandboxSession(reader, line)
            finally:
                keeper.end(number)
                line.close()

    def close(self) -> None:
        """End the keeper and all processes."""
        with self._lock:
            self._keeper.close()

    def _replace(self, gone: _Keeper) -> _Keeper:
        """Return a keeper that is not `gone`, a new one where nobody has made one yet."""
        with self._lock:
            if self._keeper is gone:
                gone.close()
                try:
                    self._keeper, _ = _start(self._setup)
                except (ConfigError, OSError) as error:
                    raise SandboxError(f"no process can be started for it: {error}") from error
            return self._keeper


class SandboxSession:
    """A line to one process. Calls are made one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def make(self, target: int, options: dict[str, Any], *, timeout_s: float) -> None:
        """Make the object of this session: call name number `target` with `options`. Raises SandboxError."""
        await self._say(MakeObject(target, options), timeout_s)

    async def invoke(self, method: str, *positional: Any, timeout_s: float, **named: Any) -> Any:
        """Call a method of the session's object; what it returns has passed MessagePack. Raises SandboxError."""
        return await self._say(CallFunction(-1, method, positional, named), timeout_s)

    async def call(self, target: int, named: dict[str, Any], *, timeout_s: float) -> Any:
        """Call name number `target` itself; what it returns has passed MessagePack. Raises SandboxError."""
        return await self._say(CallFunction(target, "", (), named), timeout_s)

    async def _say(self, message: ToSession, timeout_s: float) -> Any:
        try:
            said = frame(encode(message))
        except (OverflowError, ValueError, TypeError, RecursionError) as error:  # a model may write any number or text
            raise SandboxError(f"its arguments cannot be passed on ({type(error).__name__}: {error})") from None
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(said)
                await self._writer.drain()
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                if length > FRAME_LIMIT_BYTES:
                    raise SandboxError(f"it returned {length >> 20} MiB; return less")
                answer = from_session.decode(await self._reader.readexactly(length))
        except TimeoutError:
            raise SandboxTimeoutError(f"it took longer than {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise SandboxError("it ended its process") from None
        if isinstance(answer, CallReturned):
            return answer.value
        raise SandboxError(answer.problem)


class _Keeper:
    """The keeper's process, and the line to it."""

    def __init__(self, line: socket.socket, child: subprocess.Popen[bytes]) -> None:
        self._line, self._child = line, child

    def open(self, number: int, theirs: socket.socket) -> None:
        """Have a process serve the socket `theirs`. Raises OSError when the keeper has gone."""
        socket.send_fds(self._line, [encode(StartSession(number))], [theirs.fileno()])

    def end(self, number: int) -> None:
        """Have a process killed; with a keeper that has gone, it has gone too."""
        with contextlib.suppress(OSError):
            self._line.send(encode(KillSession(number)))

    def close(self) -> None:
        """End the keeper, and wait until it is gone."""
        self._line.close()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(_END_S)


def _start(setup: SandboxSetup) -> tuple[_Keeper, tuple[dict[str, Any], ...]]:
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "starling.rollout.env.sandbox.fork_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # tools may print
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=_environment(),
        )
    keeper = _Keeper(line, child)
    try:
        return keeper, _await_ready(line, setup)
    except BaseException:
        child.kill()
        keeper.close()
        raise


def _await_ready(line: socket.socket, setup: SandboxSetup) -> tuple[dict[str, Any], ...]:
    subject = f"{setup.what} {', '.join(map(repr, setup.names))}"
    line.send(encode(setup))
    poller, until = select.poll(), time.monotonic() + setup.import_s
    poller.register(line, select.POLLIN)
    if not poller.poll(max(0.0, until - time.monotonic()) * 1000):
        raise ConfigError(
            f"{subject}: importing took longer than {setup.import_s:g} s; make the modules import faster."
        )
    data = line.recv(MESSAGE_BYTES)
    if not data:
        raise ConfigError(f"{subject}: importing ended the process; see what it said, and the bound memory_mb.")
    answer = from_keeper.decode(data)
    if isinstance(answer, TargetsImported):
        return answer.schemas
    raise ConfigError(answer.problem)


def _environment() -> dict[str, str]:
    """Return all the environment that code of others gets: enough to find modules and programs."""
    return {
        "PATH": os.defpath,
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
        "OMP_NUM_THREADS": "1",
    }

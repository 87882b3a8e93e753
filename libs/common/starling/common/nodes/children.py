"""The ranks of a replica on one host: forked children of a process, each of which has a pipe for requests and answers.

The kernel kills them when that process ends. When one of them ends by itself, all have to: the others could be waiting
for it in a collective operation. Where an engine forks its own workers, the child is not a rank but their parent.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.files import open_own
from starling.common.observe import log as service_log
from starling.common.observe.parent import die_with_parent
from starling.common.observe.process import EXIT_FAILED, end_process, set_title

END: Final = b""
"""Frame that ends a child."""
END_S: Final = 10.0
"""How long children may take to exit at the end."""
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the parent handles for all; a terminal or a scheduler may send them to every process."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """The first rank of a host that has ended."""

    what: str
    """Which one, and how, as the beginning of a sentence."""
    log: str
    was_killed: bool
    """By a signal: the others of the replica may have ended because of it."""


@dataclass
class _Child:
    rank: int
    pid: int
    connection: Connection
    log: Path
    status: int | None = None
    """Exit code once it has ended; -n when signal n killed it."""


class RankProcesses:
    """Forks, watches and ends ranks."""

    def __init__(
        self, name: str, received: Callable[[int, bytes], None], lost: Callable[[Loss], None], *, label: str = "rank"
    ) -> None:
        """Prepare for ranks of the replica `name`.

        Args:
            name: of the replica.
            received: called with a rank and a frame that it has sent, in a thread of that rank.
            lost: called when ranks have ended that were not to, in the threads of these ranks.
            label: what titles, logs and losses call a child, before its number.
        """
        self._label = label
        self._name, self._received, self._lost = name, received, lost
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._ending = False

    def start(
        self, ranks: Sequence[int], folder: Path, log_form: Any, serve: Callable[[int, Connection], None]
    ) -> None:
        """Fork `ranks`, before any device or thread pool is in use.

        Args:
            ranks: their numbers.
            folder: of the run; the children write their logs below it.
            log_form: as in `run.log_format`.
            serve: called in each child with its rank and its end of the pipe; its end is the child's.

        Raises:
            ConfigError: a log cannot be written.
        """
        for rank in ranks:
            path = folder / "logs" / f"{self._name}.{self._label}-{rank}.log"
            descriptor = _open_log(path)
            ours, theirs = Pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for connection in (ours, *(child.connection for child in self._children)):
                    connection.close()
                _run_child(
                    f"{self._name}.{self._label}-{rank}", parent, descriptor, log_form, partial(serve, rank, theirs)
                )
            theirs.close()
            os.close(descriptor)
            self._children.append(_Child(rank, pid, ours, path))
        for child in self._children:
            threading.Thread(target=self._listen, args=(child,), name=f"rank-{child.rank}", daemon=True).start()

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        """Send a frame to all of them.

        Args:
            frame: to be sent.
            timeout_s: how long a child may read nothing while the buffer of its pipe is full; None for no limit.

        Raises:
            TimeoutError: a child has read nothing for that long. Nothing more can be sent to it.
        """
        for child in self._children:
            if timeout_s is not None:
                _limit_writes(child.connection, timeout_s)
            try:
                child.connection.send_bytes(frame)
            except BlockingIOError as error:
                if timeout_s is not None:
                    raise TimeoutError(f"rank {child.rank} has read nothing for {timeout_s:g} s") from error
            except OSError:
                pass  # it has ended, which is noticed elsewhere

    def expect_end(self) -> None:
        """From now on, children that end are not lost."""
        self._ending = True

    def end(self, deadline: float) -> None:
        """Wait for the end of all until `deadline` (monotonic seconds), then kill those that are left."""
        self._ending = True
        while any(self._poll(child) is None for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in self._children:
            if self._poll(child) is None:
                os.kill(child.pid, signal.SIGKILL)
                while self._poll(child) is None:
                    time.sleep(0.01)

    def _listen(self, child: _Child) -> None:
        while True:
            try:
                frame = child.connection.recv_bytes()
            except (EOFError, OSError):
                break
            self._received(child.rank, frame)
        ended: list[_Child] = []
        while not ended:
            time.sleep(0.2)  # it closes its pipe before it ends, and others end because of it
            if self._ending:
                return
            ended = [one for one in self._children if self._poll(one) is not None]
        killed = [one for one in ended if (one.status or 0) < 0]
        first = (killed or ended)[0]
        status = first.status or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        self._lost(Loss(what=f"{self._label} {first.rank} {how}", log=str(first.log), was_killed=status < 0))

    def _poll(self, child: _Child) -> int | None:
        """Return the exit code of a child; None while it runs."""
        with self._lock:
            if child.status is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.status = os.waitstatus_to_exitcode(status)
            return child.status


def _limit_writes(connection: Connection, timeout_s: float) -> None:
    """Let a write to a pipe that takes nothing for `timeout_s` fail with BlockingIOError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:  # the two directions of a pipe are one socket
        seconds = int(timeout_s)
        limit = struct.pack("@ll", seconds, int((timeout_s - seconds) * 1e6))
        pipe.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _open_log(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise ConfigError(f"the log {path} of a rank cannot be written ({error.strerror}); check --dir") from error


def _run_child(title: str, parent: int, output: int, log_form: Any, serve: Callable[[], None]) -> None:
    """Be a rank, in a forked process, and exit."""
    code = EXIT_FAILED
    try:
        die_with_parent()
        if os.getppid() != parent:  # it has ended already
            os._exit(EXIT_FAILED)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(output, 1)
        os.dup2(output, 2)
        set_title(title)
        service_log.configure(title, log_form)
        serve()
        code = 0
    except Exception:  # noqa: BLE001 - the edge of the process: the traceback is the report
        structlog.get_logger(__name__).exception("failed")
    finally:
        end_process(code)

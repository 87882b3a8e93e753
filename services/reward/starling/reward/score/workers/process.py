"""One worker process as the service sees it: a socket for messages, and the end of the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

import starling.common
import starling.reward
from starling.common.sandbox.interpreter import Interpreter, find_interpreter
from starling.common.sandbox.launch import BoxProcess, Sandboxing
from starling.common.sandbox.memory import limit_of_process_mb
from starling.common.sandbox.output import OutputAllowance
from starling.common.sandbox.view import View, view_of
from starling.reward.score.scorers.reward_models import CODE_OPTIONS
from starling.reward.score.workers.devices import device_variables
from starling.reward.score.workers.kinds import WorkerKind
from starling.reward.score.workers.protocol import (
    REPORT_LIMIT_BYTES,
    FrameReader,
    FromWorker,
    ScorerSpec,
    ToWorker,
    WorkerSetup,
    decode_from_worker,
    frame,
)
from starling.reward.score.workers.shared import SharedBuffer

_RECEIVE_BYTES: Final = 1 << 18
_EXIT_S: Final = 0.2
"""How long a process may run after its socket has closed."""
_BOOTSTRAP: Final = Path(__file__).with_name("bootstrap.py")
_PACKAGES: Final = tuple(Path(package.__path__[0]) for package in (starling.common, starling.reward))
"""What a worker in another Python environment imports of Starling."""


class WorkerProcess:
    """A worker in a sandbox of its own: a terminal's Ctrl-C does not reach it, and its children die with it.

    The kernel kills it when the *thread* that created this object ends; so create it in one that lives as long as the
    service.
    """

    UNDECODABLE: Final = (ValueError, RecursionError, msgspec.MsgspecError)
    """Errors of what is no message."""

    def __init__(
        self, kind: WorkerKind, sandboxing: Sandboxing, allowance: OutputAllowance | None = None, nice: int = 0
    ) -> None:
        """Start it.

        Args:
            kind: what it needs, and its scorers.
            sandboxing: how its sandbox is made.
            allowance: how much of what it prints is logged.
            nice: how much lower than that of this process its priority is.

        Raises:
            ConfigError: the machine has not what it needs.
        """
        needs = kind.needs
        interpreter = None if kind.python is None else find_interpreter(kind.python)
        view = _view_of(kind, interpreter)
        setup = _setup_of(kind, sandboxing, nice)
        self._memory_mb = kind.memory_mb
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._box = BoxProcess(
                _command(theirs.fileno(), interpreter, setup),
                sandboxing,
                needs,
                view,
                pass_fds=(theirs.fileno(),),
                dies_with_thread=True,
                what="scorers",
                allowance=allowance,
                memory_mb=kind.memory_mb,
                interpreter=interpreter,
                variables=device_variables(kind.device, needs),
                nice=nice,
            )
        self._sock.setblocking(False)
        self._reader = FrameReader(REPORT_LIMIT_BYTES)
        self._unsent = bytearray()
        self._queued: deque[tuple[bytes, tuple[SharedBuffer, ...]]] = deque()
        """Frames to send after `_unsent`: the first that goes with buffers, and those after it."""
        self.ended = False
        """Whether the worker sends nothing more."""
        self._exit: WorkerExit | None = None
        self.send(setup)

    @property
    def pid(self) -> int:
        """Process id of the outermost process of its sandbox."""
        return self._box.pid

    def fileno(self) -> int:
        """The socket's file descriptor: readable when the worker has sent something, or ended."""
        return self._sock.fileno()

    def send(self, message: ToWorker, buffers: tuple[SharedBuffer, ...] = ()) -> None:
        """Send a message with buffers, as much of it as the socket takes now; `flush` sends the rest."""
        if buffers or self._queued:
            self._queued.append((frame(message), buffers))
        else:
            self._unsent += frame(message)
        self.flush()

    def flush(self) -> bool:
        """Send what is left. Returns whether everything was sent."""
        try:
            while self._unsent or self._queued:
                if self._unsent:
                    del self._unsent[: self._sock.send(self._unsent)]
                else:
                    self._begin_queued()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # another process of the user has sent too many descriptors
                return False
            # The worker has ended, which `receive` reports.
            self._unsent.clear()
            self._queued.clear()
        return True

    def _begin_queued(self) -> None:
        """Send the descriptors of the first queued frame, with the bytes that the socket takes. Raises OSError."""
        data, buffers = self._queued[0]
        sent = socket.send_fds(self._sock, [data], [buffer.fileno() for buffer in buffers])
        self._queued.popleft()
        self._unsent += data[sent:]

    def receive(self) -> list[FromWorker]:
        """Return the worker's new messages, as far as they have arrived; the socket is readable while there are more.

        Sets `ended` when it has ended, or sent an invalid message.
        """
        messages: list[FromWorker] = []
        try:
            # Once: a worker may send as fast as they are read.
            if data := self._sock.recv(_RECEIVE_BYTES):
                for body in self._reader.feed(data):
                    messages.append(decode_from_worker.decode(body))
                return messages
        except BlockingIOError:
            return messages
        except (OSError, *self.UNDECODABLE):
            pass  # it ended abruptly, or a scorer wrote into the socket
        self.ended = True
        return messages

    def close_socket(self) -> None:
        """End the conversation, so that an idle worker exits by itself."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> WorkerExit:
        """End the worker and all processes of its sandbox: it may exit by itself within `grace_s`, else by SIGKILL.

        Returns how it ended. May be called again, but no other method.
        """
        if self._exit is None:
            self._exit = self._end(grace_s)
            self._sock.close()
        return self._exit

    def exit_description(self) -> WorkerExit:
        """Wait briefly for a worker whose socket has closed to exit, then `end` it; returns how it ended."""
        return self.end(grace_s=_EXIT_S)

    def _end(self, grace_s: float) -> WorkerExit:
        self.close_socket()
        by_itself = self._box.wait(grace_s) is not None
        self._box.close()
        if self._box.exceeded_memory:
            return WorkerExit("memory", f"limit of {self._memory_mb} MiB")
        status = self._box.status
        if not by_itself or status is None:  # it may sleep in the kernel, which kills it afterwards
            return WorkerExit("killed", "it closed its connection, or wrote into it what is no message")
        if status > 128:
            return WorkerExit("signal", f"signal {_signal_name(status - 128)}")
        return WorkerExit("exit", f"exit status {status}" + (f": {self._box.problem}" if self._box.problem else ""))


class WorkerExit(NamedTuple):
    """How a worker ended."""

    cause: Literal["memory", "signal", "exit", "killed"]
    """`memory`: it was killed at its limit. `signal`: another one killed it. `exit`: it ended by itself. `killed`: it
    did not end, but said nothing more, or was to be ended."""
    text: str
    """Details, to stand in brackets."""

    @property
    def problem(self) -> str:
        """What a scorer has done whose worker has ended so, as the end of a sentence."""
        return f"exceeded its {self.text}" if self.cause == "memory" else f"ended its worker process ({self.text})"


def _view_of(kind: WorkerKind, interpreter: Interpreter | None) -> View:
    """Return which files a worker sees. Raises ConfigError."""
    names = [name for scorer in kind.scorers for name in (scorer.name, _code_of(scorer)) if name]
    view = view_of(kind.needs, names, interpreter)
    for package in _PACKAGES if interpreter else ():
        view.show(str(package))
    return view


def _setup_of(kind: WorkerKind, sandboxing: Sandboxing, nice: int) -> WorkerSetup:
    """Return the first message to a worker."""
    needs = kind.needs
    return WorkerSetup(
        kind.scorers,
        mechanism=sandboxing.mechanism,
        max_tasks=needs.max_tasks,
        # A program that a model wrote would have, in its session, what the worker has.
        runs_programs=needs.grants_nothing and (sandboxing.mechanism != "process" or sandboxing.is_chosen),
        network=needs.network,
        data_mb=limit_of_process_mb(kind.memory_mb),
        nice=nice,
    )


def _command(fd: int, interpreter: Interpreter | None, setup: WorkerSetup) -> list[str]:
    """Return the command of a worker that serves the socket `fd`."""
    if interpreter is None:
        return [sys.executable, "-P", "-u", "-m", "starling.reward.score.workers.worker", str(fd)]
    folders = os.pathsep.join(dict.fromkeys(str(package.parent) for package in _PACKAGES))
    confinement = {
        "mechanism": setup.mechanism,
        "max_tasks": setup.max_tasks,
        "data_mb": setup.data_mb,
        "runs_programs": setup.runs_programs,
        "network": setup.network,
        "nice": setup.nice,
    }
    return [interpreter.path, "-P", "-S", "-u", str(_BOOTSTRAP), str(fd), folders, json.dumps(confinement)]


def _code_of(scorer: ScorerSpec) -> str:
    """Return the code of the user that a scorer's options name; empty for none."""
    named = scorer.options.get(CODE_OPTIONS.get(scorer.name, ""), "")
    return named if isinstance(named, str) else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)

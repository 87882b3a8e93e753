"""One worker process as the service sees it: a socket for messages, and the end of the process."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import sys
from collections import deque
from typing import Final

import msgspec

from starling.common.sandbox.launch import BoxProcess, Sandboxing
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.sandbox.view import view_of
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


class WorkerProcess:
    """A worker in a sandbox of its own: a terminal's Ctrl-C does not reach it, and its children die with it.

    The kernel kills it when the *thread* that created this object ends; so create it in one that lives as long as the
    service.
    """

    UNDECODABLE: Final = (ValueError, RecursionError, msgspec.MsgspecError)
    """Errors of what is no message."""

    def __init__(self, scorers: tuple[ScorerSpec, ...], sandboxing: Sandboxing, needs: SandboxNeeds) -> None:
        view = view_of(needs, [scorer.name for scorer in scorers])
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", "starling.reward.score.workers.worker"]
            self._box = BoxProcess(
                [*command, str(theirs.fileno())],
                sandboxing,
                needs,
                view,
                pass_fds=(theirs.fileno(),),
                dies_with_thread=True,
                what="scorers",
            )
        self._sock.setblocking(False)
        self._reader = FrameReader(REPORT_LIMIT_BYTES)
        self._unsent = bytearray()
        self._queued: deque[tuple[bytes, tuple[SharedBuffer, ...]]] = deque()
        """Frames to send after `_unsent`: the first that goes with buffers, and those after it."""
        self.ended = False
        """Whether the worker sends nothing more."""
        self._exit = ""
        # A program that a model wrote would have, in its session, what the worker has.
        runs_programs = needs.grants_nothing and (sandboxing.mechanism != "process" or sandboxing.is_chosen)
        self.send(WorkerSetup(scorers, sandboxing.mechanism, needs.max_tasks, runs_programs, needs.network))

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

    def end(self, grace_s: float = 0.0) -> str:
        """End the worker and all processes of its sandbox: it may exit by itself within `grace_s`, else by SIGKILL.

        Returns how it ended: ``exit status 3``, ``signal SIGSEGV``. May be called again, but no other method.
        """
        if self._exit:
            return self._exit
        self._exit = self._end(grace_s)
        self._sock.close()
        return self._exit

    def exit_description(self) -> str:
        """Wait briefly for a worker whose socket has closed to exit, then `end` it; returns how it ended."""
        return self.end(grace_s=_EXIT_S)

    def _end(self, grace_s: float) -> str:
        self.close_socket()
        self._box.wait(grace_s)
        self._box.close()
        status = self._box.status
        if status is None:  # it sleeps in the kernel, which kills it afterwards; `subprocess` reaps it later
            return "no exit status yet"
        problem = f": {self._box.problem}" if self._box.problem else ""
        return f"signal {_signal_name(status - 128)}" if status > 128 else f"exit status {status}{problem}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)

"""One worker process as the service sees it: a socket for messages, and the end of the process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Final

import msgspec

from starling.reward.score.workers.protocol import (
    FrameReader,
    FromWorker,
    ToWorker,
    WorkerSetup,
    decode_from_worker,
    frame,
)

_RECEIVE_BYTES: Final = 1 << 18
_EXIT_S: Final = 0.2
"""How long a process may run after its socket has closed."""
_KILLED_S: Final = 2.0
"""How long a killed process may take to be gone, since the kernel frees its memory."""


class WorkerProcess:
    """A worker in a session of its own: a terminal's Ctrl-C does not reach it, and its children die with it.

    The kernel kills it when the *thread* that created this object ends; so create it in one that lives as long as the
    service.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", "starling.reward.score.workers.worker"]
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # scorers may print
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self._child.pid)
        self._sock.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.ended = False
        """Whether the worker sends nothing more."""
        self._exit = ""
        self.send(setup)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def fileno(self) -> int:
        """The socket's file descriptor: readable when the worker has sent something, or ended."""
        return self._sock.fileno()

    def send(self, message: ToWorker) -> None:
        """Send a message, as much of it as the socket takes now; `flush` sends the rest."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> bool:
        """Send what is left. Returns whether everything was sent."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:  # the worker has ended, which `receive` reports
            self._unsent.clear()
        return True

    def receive(self) -> list[FromWorker]:
        """Return the worker's new messages. Sets `ended` when it has ended, or sent an invalid message."""
        messages: list[FromWorker] = []
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                for body in self._reader.feed(data):
                    messages.append(decode_from_worker.decode(body))
                if len(data) < _RECEIVE_BYTES:
                    return messages
        except BlockingIOError:
            return messages
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # it ended abruptly, or a scorer wrote into the socket
        self.ended = True
        return messages

    def close_socket(self) -> None:
        """End the conversation, so that an idle worker exits by itself."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> str:
        """End the worker and all processes of its session: it may exit by itself within `grace_s`, else by SIGKILL.

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
        exited = self._wait(grace_s)
        # Before the worker is reaped, so that its process group id cannot have been reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        gone = exited or self._wait(_KILLED_S)
        os.close(self._pidfd)
        if not gone:  # it sleeps in the kernel, which kills it afterwards; `subprocess` reaps it later
            return "no exit status yet"
        code = self._child.wait(timeout=_KILLED_S)
        return f"exit status {code}" if code >= 0 else f"signal {_signal_name(-code)}"

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the process's exit; returns whether it has exited."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)

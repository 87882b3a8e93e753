"""One worker process as the service sees it: a line to speak over, and a life to end."""

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
"""How long a process may live on after its line has ended."""
_KILLED_S: Final = 2.0
"""How long a killed process may take to be gone: the kernel must free its memory."""


class WorkerProcess:
    """A worker with a session of its own: a terminal's Ctrl-C does not reach it, and its children die with it.

    The kernel kills it when the *thread* that made this object ends; so make it in one that lives as long as the
    service.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-u", "-m", "starling.reward.score.workers.worker"]
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # scorers may print
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._life = os.pidfd_open(self._child.pid)
        self._line.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self.over = False
        """Whether the worker will say no more."""
        self._how = ""
        self.send(setup)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    def fileno(self) -> int:
        """The file descriptor of the line: readable when the worker said something, or ended."""
        return self._line.fileno()

    def send(self, message: ToWorker) -> None:
        """Say something, as far as the line takes it now; `flush` says the rest."""
        self._unsent += frame(message)
        self.flush()

    def flush(self) -> bool:
        """Go on saying what `send` could not. Returns whether all is said."""
        try:
            while self._unsent:
                del self._unsent[: self._line.send(self._unsent)]
        except BlockingIOError:
            return False
        except OSError:  # it ended: `receive` will tell
            self._unsent.clear()
        return True

    def receive(self) -> list[FromWorker]:
        """Return what the worker said since. Sets `over` when it will say no more, or speaks garbage."""
        messages: list[FromWorker] = []
        try:
            while data := self._line.recv(_RECEIVE_BYTES):
                for body in self._reader.feed(data):
                    messages.append(decode_from_worker.decode(body))
                if len(data) < _RECEIVE_BYTES:
                    return messages
        except BlockingIOError:
            return messages
        except (OSError, ValueError, msgspec.MsgspecError):
            pass  # it ended abruptly, or a scorer wrote into the line
        self.over = True
        return messages

    def hang_up(self) -> None:
        """Tell the worker that nothing more comes: an idle one ends by itself."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def end(self, grace_s: float = 0.0) -> str:
        """End the worker and everything of its session: after `grace_s` of its own accord, else by SIGKILL.

        Returns how it ended: ``exit status 3``, ``signal SIGSEGV``. Nothing else may be asked of it afterwards, but
        `end` may be repeated.
        """
        if self._how:
            return self._how
        self._how = self._end(grace_s)
        self._line.close()
        return self._how

    def last_words(self) -> str:
        """Wait a moment for a worker whose line has ended to end itself, then `end` it."""
        return self.end(grace_s=_EXIT_S)

    def _end(self, grace_s: float) -> str:
        self.hang_up()
        itself = self._ended(grace_s)
        # Before the worker is reaped, so that the number of its process group cannot have passed to another.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        gone = itself or self._ended(_KILLED_S)
        os.close(self._life)
        if not gone:  # asleep in the kernel; SIGKILL waits for it, and `subprocess` reaps it later
            return "no exit status yet"
        code = self._child.wait(timeout=_KILLED_S)
        return f"exit status {code}" if code >= 0 else f"signal {_signal_name(-code)}"

    def _ended(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._life, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return str(number)

"""Fork server for processes that need torch and transformers, which it imports once.

Three processes that import them at the same time on a laptop take five seconds for it; this takes less than three. It
is the standard library's fork server: it has no threads, never uses a GPU, and exits with this process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Final

from starling.common.errors import StarlingError
from starling.common.observe.parent import GROUP_SIGNALS, die_with_parent

_ATTEMPTS: Final = 5
_RETRY_S: Final = 0.2


class ForkedProcess:
    """A forked process with the part of the interface of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, process: multiprocessing.process.BaseProcess, output: Connection) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid
        self.stdout: IO[str] = os.fdopen(os.dup(output.fileno()), errors="replace")

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs; -n when signal n killed it."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float) -> int | None:
        """Wait for its exit, at most `timeout` seconds."""
        self._process.join(timeout)
        return self.poll()


class Forks:
    """The server, which starts to import on creation, and the start of processes from it.

    There is one server in a process, whose environment is that of its first start: later ones find it running.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the server with `environment`, which all its children inherit."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["starling.cli.run.preload"])
        self._environment = dict(environment)
        self._ensure_running()

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedProcess:
        """Run `module` as `python -m` would, once the imports are done; does not wait for that.

        `environment` comes on top of the server's: what is imported has not looked at any GPU yet. The number of
        threads in it (OMP_NUM_THREADS) is given to torch, which has read that of the server.

        Raises:
            StarlingError: the server ends, and so does another one.
        """
        output, its_end = self._context.Pipe(duplex=False)
        with output, its_end:  # the process and its `ForkedProcess` have duplicates
            for _ in range(_ATTEMPTS):
                self._ensure_running()
                process = self._context.Process(target=_run, args=(module, list(arguments), dict(environment), its_end))
                try:
                    process.start()
                except (EOFError, ConnectionError):  # it was killed while it imported, or between two starts
                    time.sleep(_RETRY_S)  # its end can be seen some time after its sockets have closed
                    continue
                return ForkedProcess(process, output)
        raise StarlingError(
            f"{module} cannot be started: the process to fork it from ended again and again while it imported; "
            "look for a lack of memory in the kernel's log (dmesg)"
        )

    def _ensure_running(self) -> None:
        """Start a server, unless it runs."""
        previous = dict(os.environ)
        os.environ.update(self._environment)  # the server inherits this environment; it has no parameter for one
        os.environ["STARLING_SUPERVISOR"] = str(os.getpid())
        multiprocessing.resource_tracker.ensure_running()  # first, since its start changes the mask
        # The server may receive these signals as well, and inherits this mask until it ignores them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.clear()
            os.environ.update(previous)


def _run(module: str, arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    """Run `module`, in a fork of the server."""
    os.environ.update(environment)
    _set_num_threads()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    # Its own session: Ctrl-C reaches the supervisor only, which then stops the run gracefully.
    os.setsid()
    die_with_parent()  # that is the server, which lives as long as any of its children
    threading.Thread(target=_die_with_supervisor, name="supervisor", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _set_num_threads() -> None:
    """Let torch compute with the threads of this environment."""
    torch = sys.modules.get("torch")
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and num_threads.isdecimal():
        torch.set_num_threads(int(num_threads))


def _die_with_supervisor() -> None:
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    supervisor.join()
    os.kill(os.getpid(), signal.SIGKILL)

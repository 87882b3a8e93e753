"""Server that forks `starling` commands: it has imported what they and their processes need.

It listens on the socket with the descriptor that its first argument names. A request is one packet of JSON; the answers
are the process id and, when it has exited, its exit code. The server exits when its standard input ends.
"""

from __future__ import annotations

import forked_interpreter  # isort: skip - first: it keeps the search path of a new interpreter

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from types import FrameType

import setproctitle

from starling.cli.services import SERVICES
from starling.common.observe.parent import LIBC, PR_SET_PDEATHSIG

_MODULES = (
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "starling.cli.app",
    "starling.cli.evaluate.results",
    "starling.cli.recipe.arithmetic",
    "starling.cli.recipe.warm_start",
    "starling.cli.report.summary",
    "starling.cli.run.attempt",
    "starling.cli.run.command",
    "starling.cli.run.supervisor",
)


def preload() -> None:
    """Import what commands and services import; what runs as `__main__` is imported anew in each process."""
    preload_of_run = importlib.import_module("starling.cli.run.preload")
    # It does more than import, which each run does again in its own fork server: it lets this process die with its
    # parent, exit without clean-up, and ignore the terminal.
    LIBC.prctl(PR_SET_PDEATHSIG, 0)
    atexit.unregister(os._exit)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for module in (*_MODULES, *SERVICES.values()):
        importlib.import_module(module)
    for module in (*SERVICES.values(), preload_of_run.__name__):
        del sys.modules[module]
    setproctitle.getproctitle()  # it finds the place of the title only in an environment that is as at the start
    gc.collect()
    gc.freeze()


def serve(listener: socket.socket) -> None:
    """Fork commands until the standard input ends."""
    wake, wakes = socket.socketpair()
    for end in (wake, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, _ignore)
    connections: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (0, listener, wake):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if 0 in ready:
                return
            if wake in ready:
                wake.recv(4096)
                _report_exits(connections)
            if listener in ready:
                connection = listener.accept()[0]
                pid = os.fork()
                if pid == 0:
                    _become_command(**json.loads(connection.recv(1 << 20)))
                connection.send(str(pid).encode())
                connections[pid] = connection


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let the signal write to the wake-up descriptor."""


def _report_exits(connections: dict[int, socket.socket]) -> None:
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with connections.pop(pid) as connection:
            try:
                connection.send(str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass  # the test has ended


def _become_command(
    arguments: list[str], folder: str, environment: dict[str, str], mark: str, out: str, err: str
) -> None:
    """Turn this fork into the command."""
    try:
        os.setsid()
        for path, flags, standard in ((os.devnull, os.O_RDONLY, 0), (out, os.O_WRONLY, 1), (err, os.O_WRONLY, 2)):
            os.dup2(os.open(path, flags), standard)
        forked_interpreter.replace_descriptors(())
        _replace_mark(mark)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        forked_interpreter.run_interpreter(arguments, forks=True)
    finally:
        os._exit(255)


def _replace_mark(mark: str) -> None:
    """Replace the mark in the environment that /proc shows for this process and its forks."""
    with open("/proc/self/stat") as stat:
        start, end = map(int, stat.read().rpartition(")")[2].split()[47:49])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        offset = memory.read(end - start).index(forked_interpreter.NO_MARK.encode())
        memory.seek(start + offset)
        memory.write(mark.encode())


if __name__ == "__main__":
    preload()
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)

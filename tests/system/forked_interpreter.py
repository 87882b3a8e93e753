"""Forks that behave like newly started Python interpreters, except that they have modules imported already."""

from __future__ import annotations

import _posixsubprocess
import atexit
import gc
import io
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

SEARCH_PATH = sys.path[1:]
"""Search path of a new interpreter, without its first entry. This module is imported before anything changes it."""
NO_MARK = "0" * 32
"""Value of the variable that marks the processes of a command, before it is replaced in a fork."""
_MainProcess = type(multiprocessing.process.current_process())
_execute = _posixsubprocess.fork_exec
_unused: list[object] = []
"""Objects of the parent that must not be finalised."""


def replace_descriptors(keep: Collection[int]) -> None:
    """Close the descriptors of the parent beyond the first three, except those in `keep`.

    The numbers stay taken, because the parent's objects close them when they are collected.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        if descriptor > 2 and descriptor != nowhere and descriptor not in keep:
            os.dup2(nowhere, descriptor, inheritable=False)


def run_interpreter(arguments: Sequence[str], *, forks: bool = False) -> NoReturn:
    """Run this fork as `python ARGUMENTS`, and exit.

    Arguments: ``-m MODULE ...``, ``-c CODE ...`` or ``SCRIPT ...``. With `forks` the process starts its services and
    its fork server by forks of itself too, instead of executing `python`; they are its children either way.
    """
    code = 1
    try:
        _reset()
        if forks:
            _set_fork_exec(_fork_or_execute)
        _run(*arguments)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:  # noqa: BLE001 - the edge of the process, where an interpreter prints the traceback as well
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(option: str, *arguments: str) -> None:
    if option == "-m":
        sys.argv, sys.path[:] = list(arguments), [os.getcwd(), *SEARCH_PATH]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv, sys.path[:] = ["-c", *arguments[1:]], ["", *SEARCH_PATH]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(arguments[0], main.__dict__)
    else:
        sys.argv, sys.path[:] = [option, *arguments], [os.path.dirname(os.path.abspath(option)), *SEARCH_PATH]
        runpy.run_path(option, run_name="__main__")


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _reset() -> None:
    """Bring the state of the interpreter into that of a new one, as far as Starling can notice the difference."""
    _set_fork_exec(_execute)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _unused.extend((sys.stdin, sys.stdout, sys.stderr, sys.modules["__main__"]))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text(1, "strict", unbuffered)
    sys.stderr = sys.__stderr__ = _text(2, "backslashreplace", unbuffered)
    multiprocessing.process._current_process = _MainProcess()
    multiprocessing.process._parent_process = None
    multiprocessing.process._children = set()
    multiprocessing.forkserver._forkserver.__init__()
    multiprocessing.resource_tracker._resource_tracker.__init__()
    gc.enable()
    gc.set_threshold(700, 10, 10)


def _text(descriptor: int, errors: str, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding="utf-8",
        errors=errors,
        line_buffering=descriptor == 2,
        write_through=unbuffered,
    )


def _set_fork_exec(function: Callable[..., int]) -> None:
    _posixsubprocess.fork_exec = function  # for multiprocessing
    subprocess._fork_exec = function


def _fork_or_execute(arguments: Sequence[str], *others: Any) -> int:
    """Stand in for `_posixsubprocess.fork_exec`."""
    command = _without_flags(list(map(os.fsdecode, arguments)))
    if not _is_forked(command):
        return _execute(arguments, *others)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _prepare(*others)
            run_interpreter(command[1:])
        finally:
            os._exit(255)
    return pid


def _without_flags(command: list[str]) -> list[str]:
    """Leave out the flags that multiprocessing gives on from this interpreter, such as ``-B``: a fork has them."""
    flags = multiprocessing.util._args_from_interpreter_flags()
    num = len(flags) if command[1 : 1 + len(flags)] == flags else 0
    return [command[0], *command[1 + num :]]


def _is_forked(command: list[str]) -> bool:
    if len(command) < 3 or command[0] != sys.executable:
        return False
    is_service = command[1] == "-m" and command[2].startswith("starling.")
    return is_service or (command[1] == "-c" and command[2].startswith("from multiprocessing.forkserver import"))


def _prepare(
    executables: object,
    close_fds: bool,
    keep: tuple[int, ...],
    folder: str | None,
    environment: list[bytes] | None,
    stdin: int,
    _stdin_of_parent: int,
    _stdout_of_parent: int,
    stdout: int,
    _stderr_of_parent: int,
    stderr: int,
    _errors: int,
    errors: int,
    _restore_signals: bool,
    new_session: bool,
    *others: Any,
) -> None:
    """Do in the child what `_posixsubprocess.fork_exec` does before it executes a program."""
    for descriptor, standard in ((stdin, 0), (stdout, 1), (stderr, 2)):
        if descriptor != -1:
            os.dup2(descriptor, standard)
    replace_descriptors({*keep} - {errors})  # the parent waits for the end of `errors`
    if folder is not None:
        os.chdir(folder)
    if new_session:
        os.setsid()
    preexec = others[-2]
    if preexec is not None:
        preexec()
    if environment is not None:
        os.environ.clear()
        os.environ.update(os.fsdecode(entry).split("=", 1) for entry in environment)

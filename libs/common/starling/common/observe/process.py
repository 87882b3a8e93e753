"""The edge of a service process: title, death with its parent, signals, and errors as one sentence."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import setproctitle
import structlog

from starling.common.errors import StarlingError
from starling.common.observe import log

PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child of a process with threads must not wait for the loader's lock.
LIBC = ctypes.CDLL(None, use_errno=True)
EXIT_FAILED = 1
EXIT_USAGE = 2
STOP_S = 25.0
"""How long a replica may take to end in good order; less than the half minute after which clusters kill."""


class StopRequested(BaseException):
    """What was under way is broken off, as the process was told to end. No `Exception`: nobody takes it for theirs."""


class StopSignal:
    """Set by SIGTERM or SIGINT; a second one ends the process at once.

    With a deadline the process ends so many seconds after the first, whatever it is stuck in; see `end_within`.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self.event = threading.Event()
        self.name = ""
        self._deadline_s = deadline_s
        self._breaks_off = False

    def install(self, notify: Callable[[], None] = lambda: None) -> None:
        """Take over SIGTERM and SIGINT; `notify` is called from the signal handler."""
        self._notify = notify
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set():
            os._exit(128 + number)
        self.name = signal.Signals(number).name
        self.event.set()
        if self._deadline_s is not None:
            end_within(self._deadline_s)
        self._notify()
        if self._breaks_off:
            self._breaks_off = False
            raise StopRequested(self.name)

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Break off what the main thread does here, which takes long and does not look at this signal meanwhile.

        Raises:
            Stopped: wherever it was when the signal came; at the beginning, when that had come before.
        """
        self._breaks_off = True
        try:
            if self:
                raise StopRequested(self.name)
            yield
        finally:
            self._breaks_off = False

    def __bool__(self) -> bool:
        return self.event.is_set()


def end_within(seconds: float) -> None:
    """End this process with 1 after `seconds`, and say where each thread is, unless `run_service` has returned by then.

    A thread of C does so: it needs no interpreter, which whoever is stuck may hold.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent goes, so that no run leaves anything behind."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_service(name: str, body: Callable[[], None]) -> int:
    """Run `body` as the service `name`. Returns the exit code; an error of ours is one sentence on stderr."""
    setproctitle.setproctitle(f"starling: {name}")
    log.configure(name)
    try:
        body()
    except StarlingError as error:
        print(f"starling {name}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001 - the edge of the process: the traceback is the report
        structlog.get_logger(__name__).exception("failed")
        return EXIT_FAILED
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


@contextmanager
def without_collection() -> Iterator[None]:
    """Start up without the garbage collector, and keep what came of it out of the collector's sight for good.

    torch and transformers make hundreds of thousands of objects that live as long as the process; looking through
    them again and again is a seventh of the time that their import takes, and part of every later collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_seldom() -> None:
    """Have the garbage collector look after ten thousand new objects, not after 700.

    For a process that keeps many objects and makes few cycles: each look at the older ones goes through all of them,
    and with thousands of replicas that was a quarter of the controller's time.
    """
    gc.set_threshold(10_000, 10, 10)


def end_process(code: int) -> NoReturn:
    """End this process at once, with all that it said written out.

    An interpreter that has imported torch takes a second to take itself apart, and frees nothing thereby that the
    kernel does not; nor is a thread waited for that is stuck in a dead peer.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

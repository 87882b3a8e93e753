"""Entry and exit of a service process: title, signals, errors as one sentence."""

from __future__ import annotations

import errno
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Final, NoReturn

import setproctitle
import structlog

from starling.common.errors import DiskFaultError, RestartError, StarlingError, StoppedError
from starling.common.observe import log
from starling.common.observe.terminal import printable

REPEATABLE_STOP_SIGNAL: Final = signal.SIGUSR2
"""Asks for a graceful stop as well, and changes nothing after another stop signal. A supervisor sends it, because a
scheduler may have sent SIGTERM to the supervisor and to its services at once."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, REPEATABLE_STOP_SIGNAL)
WAKE_SIGNAL: Final = signal.SIGURG
"""Ends a wait of the main thread. Where nothing handles it, as in a program that was just started, it is ignored."""
WAKE_AGAIN_S: Final = (0.01, 1.0)
"""Time between two wake signals: at first, and at most."""
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESTART = 75
"""A `RestartError`: the process is to be started again. It is EX_TEMPFAIL of sysexits.h."""
DISK_FAULTS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only disk: no faults of the code, so they have no traceback."""
STOP_S = 25.0
"""How long a replica may take to exit gracefully; less than the half minute after which schedulers kill."""
SWITCH_INTERVAL_S: Final = 0.0003
"""After how long a thread must hand over the interpreter lock. Threads that serve weights, heartbeats and rewards wait
for the one that trains or samples; Python's default, 5 ms, is a tenth of a step of a small model."""


class ServiceStopped(BaseException):
    """Interrupts the main thread when the process is asked to stop. No `Exception`, so that no handler swallows it."""


class StopSignal:
    """Set by SIGTERM, SIGINT or the repeatable signal; a second SIGTERM or SIGINT ends the process at once.

    With a deadline the process ends that long after the first signal, even if it hangs; see `end_within`.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        self.event = threading.Event()
        self.name = ""
        self.deadline_s = deadline_s
        """Seconds from the first signal to the end of the process; None for no deadline."""
        self._is_told = False  # by a signal that may not be repeated
        self._interruptible = False
        self._has_deadline = False

    def install(self, notify: Callable[[], None] = lambda: None) -> None:
        """Take over the stop signals; `notify` is called from the signal handler. Main thread only."""
        self._notify = notify
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        deliver_to_main_thread(self._arrived)

    def _arrived(self, number: int) -> None:
        """Note that a signal arrived; called in another thread, since the main thread may hang in native code."""
        if number in STOP_SIGNALS:
            self._start_deadline()

    def _start_deadline(self) -> None:
        if self.deadline_s is not None and not self._has_deadline:
            self._has_deadline = True
            end_within(self.deadline_s)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        was_told, self._is_told = self._is_told, self._is_told or number != REPEATABLE_STOP_SIGNAL
        if self.event.is_set():
            if was_told and number != REPEATABLE_STOP_SIGNAL:
                os._exit(128 + number)
            return
        self.name = signal.Signals(number).name
        self.event.set()
        self._start_deadline()
        self._notify()
        if self._interruptible:
            self._interruptible = False
            raise ServiceStopped(self.name)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the signal interrupt the main thread in this block, which takes long and does not check the signal.

        Raises:
            ServiceStopped: anywhere in the block when the signal arrives; at its start if it has arrived before.
        """
        self._interruptible = True
        try:
            if self:
                raise ServiceStopped(self.name)
            yield
        except Exception as error:  # of any type: a `finally` of the block may fail on the interruption
            if self and not self._interruptible:
                raise ServiceStopped(self.name) from error
            raise
        finally:
            self._interruptible = False

    def __bool__(self) -> bool:
        return self.event.is_set()


def deliver_to_main_thread(arrived: Callable[[int], None]) -> None:
    """Run the Python handlers of signals even while the main thread waits on a lock; call `arrived(number)` before.

    Python runs handlers in the main thread, between two instructions. A wait on a lock ends early only if the signal
    interrupts its system call: not if the signal arrived just before that call, nor if another thread received it. The
    handler would then run after the wait, which may never end. Here a thread learns of each signal from the wakeup
    descriptor, and interrupts the main thread until it has run its handlers. No signal is blocked in any thread, so
    that no child process inherits a mask.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handled: SimpleQueue[None] = SimpleQueue()  # unlike an Event, it may be used in a handler that interrupts itself
    signal.signal(WAKE_SIGNAL, lambda number, frame: handled.put(None))
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if previous in _wakeup_writers:  # ends the former thread
        _wakeup_writers.remove(previous)
        os.close(previous)
    _wakeup_writers.append(writer)
    main = threading.main_thread().ident
    assert main is not None
    threading.Thread(target=_watch, args=(reader, main, handled, arrived), name="signals", daemon=True).start()


_wakeup_writers: list[int] = []
"""The wakeup descriptor of this process, if `deliver_to_main_thread` was called."""


def _watch(reader: int, main: int, handled: SimpleQueue[None], arrived: Callable[[int], None]) -> None:
    while received := os.read(reader, 512):
        numbers = set(received) - {WAKE_SIGNAL}
        for number in sorted(numbers):
            arrived(number)
        # Twice: the first time the main thread may have been running handlers, and have passed over these signals.
        for _ in range(2 if numbers else 0):
            while not handled.empty():
                handled.get()
            _wake(main, handled)
    os.close(reader)


def _wake(main: int, handled: SimpleQueue[None]) -> None:
    """Interrupt the thread `main` until it has run its handlers, at growing intervals."""
    pause_s, longest_s = WAKE_AGAIN_S
    while True:
        signal.pthread_kill(main, WAKE_SIGNAL)
        try:
            return handled.get(timeout=pause_s)
        except Empty:
            pause_s = min(2 * pause_s, longest_s)


def _leave_wakeup_descriptor() -> None:
    """In a forked process: do not report its signals to its parent."""
    if _wakeup_writers:
        signal.set_wakeup_fd(-1)
        _wakeup_writers.clear()


os.register_at_fork(after_in_child=_leave_wakeup_descriptor)


def end_within(seconds: float) -> None:
    """Exit with 1 after `seconds`, with a traceback of each thread, unless `run_service` has returned by then.

    A C thread does this: it does not need the interpreter lock, which the hanging thread may hold.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


def set_title(name: str) -> None:
    """Let process lists show ``starling: NAME`` as the command line, and `name` without spaces as the short name.

    The kernel writes the short name into /proc/PID/stat, whose fields spaces separate: Slurm's proctrack/linuxproc
    overlooks a process with a space there, and neither signals nor kills it with its job.
    """
    text = name.encode("utf-8", "replace").decode()
    setproctitle.setproctitle(f"starling: {text}")
    setproctitle.setthreadtitle("-".join(text.split()))


def run_service(name: str, body: Callable[[], None]) -> int:
    """Run `body` as the service `name`. Returns the exit code; a `StarlingError` is one sentence on stderr."""
    set_title(name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log.configure(name)
    try:
        body()
    except StarlingError as error:
        print(f"starling {name}: {printable(str(error))}", file=log.LogStream(sys.stderr))
        if isinstance(error, RestartError):
            return EXIT_RESTART
        if isinstance(error, StoppedError):
            return error.exit_code
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        fault = disk_fault(error)
        if not fault:
            structlog.get_logger(__name__).exception("failed")
            return EXIT_FAILED
        print(f"starling {name}: {fault}", file=log.LogStream(sys.stderr))
        return EXIT_RESTART
    except Exception:  # noqa: BLE001 - the edge of the process: the traceback is the report
        structlog.get_logger(__name__).exception("failed")
        return EXIT_FAILED
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


def disk_fault(error: StarlingError | OSError) -> str:
    """Return the sentence about the disk that ends a process with `EXIT_RESTART`; empty for any other error."""
    if isinstance(error, StarlingError):
        return str(error) if isinstance(error, DiskFaultError) else ""
    if error.errno not in DISK_FAULTS:
        return ""
    file = printable(str(error.filename or "a file"))
    return (
        f"{file} cannot be written ({error.strerror}); free some space, or make its volume writable, and start it again"
    )


@contextmanager
def without_collection() -> Iterator[None]:
    """Start up with garbage collection off, and freeze the objects that were made.

    torch and transformers make hundreds of thousands of objects that live as long as the process; scanning them again
    and again is a seventh of their import time, and part of every later collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_seldom() -> None:
    """Collect garbage after every 10,000 new objects instead of 700.

    For a process that keeps many objects and makes few cycles: each collection of the older generations scans all of
    them, and with thousands of replicas that was a quarter of the controller's time.
    """
    gc.set_threshold(10_000, 10, 10)


def end_process(code: int) -> NoReturn:
    """Exit at once, after flushing the logs.

    An interpreter that has imported torch takes a second to shut down, and frees nothing that the kernel does not free;
    and threads that hang on a dead peer are not waited for.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    os._exit(code)

"""The ranks of a replica: rank 0 is the policy's own process, the others are its children, which do what it tells them.

Each child has one pipe: requests come, and each is answered. A request is executed by all ranks, rank 0 included, whose
collective operations then meet. The pipes carry no weights: commands, batches, layouts and offers.

A replica lives and dies as a whole. The kernel kills the children when rank 0 ends, and rank 0 ends, to be restarted,
as soon as a child has: whatever it is doing, because it could be waiting for that child in a collective operation.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import setproctitle
import structlog

from starling.common.errors import ConfigError, RestartError, StarlingError, WeightsError
from starling.common.files import open_own
from starling.common.observe import log as service_log
from starling.common.observe.process import EXIT_FAILED, EXIT_RESTART, EXIT_USAGE, die_with_parent, end_process
from starling.policy.train.errors import StepBrokenError

T = TypeVar("T")

LOSS_S: Final = 10.0
"""How long rank 0 waits, after an error of a collective operation, for the news that a child has ended."""
AGREE_S: Final = 30.0
"""How long after one rank has failed the others may go on before the replica ends: they wait for it in vain."""
END_S: Final = 10.0
"""How long children may take to exit at the end."""
_END: Final = b""
"""Frame that ends a child."""
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that rank 0 handles for all; a terminal or a scheduler may send them to every process."""
_ERRORS: Final = {kind.__name__: kind for kind in (ConfigError, StepBrokenError, WeightsError)}

log = structlog.get_logger(__name__)


class RanksDisagreeError(ConfigError):
    """A step failed on some ranks only: the ranks hold different versions."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a child to a request."""

    request: int
    data: bytes = b""
    problem: str = ""
    """Why it failed, in one sentence; empty if it did not."""
    error: str = ""
    """Name of the error's class."""


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    command: msgspec.Raw


class RankLink:
    """A child's end of its pipe. Any thread may answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def receive(self) -> tuple[int, bytes] | None:
        """Return number and command of the next request; None when rank 0 has ended."""
        try:
            frame = self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
        if frame == _END:
            return None
        request = msgspec.msgpack.decode(frame, type=_Request)
        return request.number, bytes(request.command)

    def answer(self, number: int, work: Callable[[], bytes]) -> None:
        """Send the result of `work`, or the `StarlingError` that it raises."""
        try:
            reply = Reply(request=number, data=work())
        except StarlingError as error:
            kind = next((name for name, one in reversed(_ERRORS.items()) if isinstance(error, one)), "")
            reply = Reply(request=number, problem=str(error), error=kind)
        with self._lock:
            self._connection.send_bytes(msgspec.msgpack.encode(reply))


@dataclass
class _Child:
    rank: int
    pid: int
    connection: Connection
    log: Path
    replies: dict[int, Future[bytes]] = field(default_factory=dict)
    """By request."""
    status: int | None = None
    """Exit code once it has ended; -n when signal n killed it."""


class Ranks:
    """The other ranks of a replica, as rank 0 sees them; none for a replica of one rank."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name`: of the replica; `timeout_s`: how long the others may take longer than this one."""
        self._name, self._timeout_s = name, timeout_s
        self._children: list[_Child] = []
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._number = 0
        self._closing = False
        self._running: set[int] = set()
        """Requests that rank 0 itself is executing."""
        self.is_broken = False
        """The ranks cannot go on together: a collective operation has failed, or an update on some of them only."""

    def start(self, num_ranks: int, folder: Path, log_form: Any, serve: Callable[[int, RankLink], None]) -> None:
        """Fork the other ranks of `num_ranks`, before any device or thread pool is in use.

        Args:
            num_ranks: of the replica.
            folder: of the run; the children write their logs below it.
            log_form: as in `run.log_format`.
            serve: called in each child with its rank; its end is the child's.

        Raises:
            ConfigError: a log cannot be written.
        """
        for rank in range(1, num_ranks):
            path = folder / "logs" / f"{self._name}.rank-{rank}.log"
            descriptor = _open_log(path)
            ours, theirs = Pipe()
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                for connection in (ours, *(child.connection for child in self._children)):
                    connection.close()
                work = partial(serve, rank, RankLink(theirs))
                _run_child(f"{self._name}.rank-{rank}", parent, descriptor, log_form, work)
            theirs.close()
            os.close(descriptor)
            self._children.append(_Child(rank, pid, ours, path))
        for child in self._children:
            threading.Thread(target=self._listen, args=(child,), name=f"rank-{child.rank}", daemon=True).start()

    def together(
        self, command: msgspec.Struct, own: Callable[[], T], *, agree: bool = False, timeout_s: float | None = None
    ) -> tuple[T, list[bytes]]:
        """Have all ranks execute `command`, this one by `own`. Returns its result and those of the others, by rank.

        Args:
            command: for the others.
            own: the same, on this rank.
            agree: if it fails on some ranks only, they hold different versions.
            timeout_s: how long the others may take longer than this one; by default that of all ranks.

        Raises:
            StarlingError: what one of the ranks raised, preferably this one.
            RanksDisagreeError: it failed on some of them only, with `agree`.
            RestartError: a collective operation failed, or a rank does not answer.
        """
        number, futures = self._send(command)
        self._running.add(number)
        try:
            result = own()
        except StarlingError as error:
            if agree and not self._all_fail(futures):
                raise self._disagreement(0, error) from error
            raise
        except Exception as error:  # torch raises anything when a collective operation fails
            if not self._children:
                raise
            time.sleep(LOSS_S)  # where a rank has ended, `_lost` ends this process meanwhile, and names it
            log.exception("an operation of the ranks failed")
            raise self._breakage((str(error).strip().splitlines() or [type(error).__name__])[0]) from error
        finally:
            self._running.discard(number)
        return result, self._results(futures, self._timeout_s if timeout_s is None else timeout_s, agree=agree)

    def _results(self, futures: list[Future[bytes]], timeout_s: float, *, agree: bool) -> list[bytes]:
        deadline, found = time.monotonic() + timeout_s, []
        for rank, future in enumerate(futures, start=1):
            try:
                found.append(future.result(max(0.0, deadline - time.monotonic())))
            except FutureTimeoutError:
                raise self._breakage(f"rank {rank} did not answer within {timeout_s:g} s") from None
            except StarlingError as error:
                if agree:
                    raise self._disagreement(rank, error) from error
                raise
        return found

    def ask(self, command: msgspec.Struct) -> list[Future[bytes]]:
        """Send a command that takes place in the background of the other ranks. Returns the future answers, by rank."""
        return self._send(command)[1]

    def _send(self, command: msgspec.Struct) -> tuple[int, list[Future[bytes]]]:
        """Send a command to the other ranks. Returns its number, and the future answers, by rank."""
        if not self._children:
            return 0, []
        encoded = msgspec.msgpack.encode(command)
        with self._sending:  # all children get all requests in the same order
            self._number += 1
            number = self._number
            frame = msgspec.msgpack.encode(_Request(number=number, command=msgspec.Raw(encoded)))
            futures = []
            for child in self._children:
                futures.append(Future[bytes]())
                with self._lock:
                    child.replies[number] = futures[-1]
                with suppress(OSError):  # it has ended, which ends this process
                    child.connection.send_bytes(frame)
        return number, futures

    def _breakage(self, reason: str) -> RestartError:
        self.is_broken = True
        return RestartError(f"the ranks of {self._name} cannot go on together: {reason}; it has to start again")

    def _disagreement(self, rank: int, error: StarlingError) -> RanksDisagreeError:
        self.is_broken = True
        return RanksDisagreeError(f"rank {rank} of {self._name} failed alone: {error}")

    def close(self, leave: Callable[[], None]) -> None:
        """End the children; those that have not ended by themselves are killed.

        `leave`: disconnects this rank from the others, which do the same.
        """
        self._closing = True
        deadline = time.monotonic()
        if self._children and not self.is_broken:
            for child in self._children:
                with suppress(OSError):
                    child.connection.send_bytes(_END)
            leave()
            deadline = time.monotonic() + END_S
        while any(self._poll(child) is None for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in self._children:
            if self._poll(child) is None:
                os.kill(child.pid, signal.SIGKILL)
                while self._poll(child) is None:
                    time.sleep(0.01)
            with self._lock:
                left = list(child.replies.values())
                child.replies.clear()
            for future in left:
                future.set_exception(WeightsError(f"{self._name} has ended."))

    def _all_fail(self, futures: list[Future[bytes]]) -> bool:
        deadline = time.monotonic() + AGREE_S
        try:
            return all(future.exception(max(0.0, deadline - time.monotonic())) is not None for future in futures)
        except FutureTimeoutError:
            return False

    def _listen(self, child: _Child) -> None:
        while True:
            try:
                reply = msgspec.msgpack.decode(child.connection.recv_bytes(), type=Reply)
            except (EOFError, OSError):
                break
            with self._lock:
                future = child.replies.pop(reply.request, None)
            if future is None:  # `close` has failed it
                continue
            if not reply.problem:
                future.set_result(reply.data)
                continue
            future.set_exception(_ERRORS.get(reply.error, StarlingError)(reply.problem))
            threading.Thread(target=self._end_if_alone, args=(child, reply), daemon=True).start()
        self._lost()

    def _end_if_alone(self, child: _Child, reply: Reply) -> None:
        """End this process if it still executes what `child` has failed at: it would wait for it in vain."""
        deadline = time.monotonic() + AGREE_S
        while reply.request in self._running:
            if time.monotonic() > deadline:
                self._end(f"rank {child.rank}: {reply.problem}", EXIT_USAGE if reply.error else EXIT_FAILED)
            time.sleep(0.05)

    def _lost(self) -> None:
        """A child has ended: end this process, which the supervisor restarts, and all children with it."""
        ended: list[_Child] = []
        while not ended:
            time.sleep(0.2)  # it closes its pipe before it ends, and others end because of it
            if self._closing:
                return
            ended = [child for child in self._children if self._poll(child) is not None]
        killed = [child for child in ended if (child.status or 0) < 0]
        first = (killed or ended)[0]
        status = first.status or 0
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        sentence = f"rank {first.rank} {how}, and the replica starts again from its newest state; see {first.log}"
        self._end(sentence, EXIT_RESTART)

    def _end(self, sentence: str, code: int) -> None:
        print(f"starling {self._name}: {sentence}", file=sys.stderr)
        end_process(code)

    def _poll(self, child: _Child) -> int | None:
        """Return the exit code of a child; None while it runs."""
        with self._lock:
            if child.status is None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    child.status = os.waitstatus_to_exitcode(status)
            return child.status


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
        setproctitle.setproctitle(f"starling: {title}")
        service_log.configure(title, log_form)
        serve()
        code = 0
    except Exception:  # noqa: BLE001 - the edge of the process: the traceback is the report
        structlog.get_logger(__name__).exception("failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

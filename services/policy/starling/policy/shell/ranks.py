"""The ranks of a replica: rank 0 is the policy's own process, the others do what it tells them.

Those on its host are its children, each with a pipe; those on other hosts are children of an agent there, with which
it has a connection (`starling.common.nodes.nodes`). Requests come, and each is answered. A request is executed by all
ranks, rank 0 included, whose collective operations then meet. Commands, batches, layouts and offers take this way;
weights do not.

A replica lives and dies as a whole. The kernel kills the children when rank 0 ends, and rank 0 ends, to be restarted,
as soon as another rank has: whatever it is doing, because it could be waiting for that one in a collective operation.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import structlog

from starling.common.errors import ConfigError, RestartError, StarlingError, WeightsError
from starling.common.nodes.children import END, END_S, Loss, RankProcesses
from starling.common.nodes.nodes import Nodes
from starling.common.observe.log import LogStream
from starling.common.observe.process import EXIT_FAILED, EXIT_RESTART, EXIT_USAGE, end_process
from starling.policy.train.errors import PeersLostError, StepBrokenError

T = TypeVar("T")

LOSS_S: Final = 10.0
"""How long rank 0 waits, after an error of a collective operation, for the report that another one has ended."""
AGREE_S: Final = 30.0
"""How long after one rank has failed the others may go on before the replica ends: they wait for it in vain."""
REPORT_S: Final = 1.0
"""How long rank 0 waits, after a rank has exited, for the report of another host that one was killed before."""
_ERRORS: Final = {kind.__name__: kind for kind in (ConfigError, PeersLostError, StepBrokenError, WeightsError)}

log = structlog.get_logger(__name__)


class RanksDisagreeError(ConfigError):
    """A step failed on some ranks only: the ranks hold different versions."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a rank to a request."""

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
    """A rank's end of its pipe. Any thread may answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def receive(self) -> tuple[int, bytes] | None:
        """Return number and command of the next request; None when rank 0 has ended."""
        try:
            frame = self._connection.recv_bytes()
        except (EOFError, OSError):
            return None
        if frame == END:
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


class Ranks:
    """The other ranks of a replica, as rank 0 sees them; none for a replica of one rank."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name`: of the replica; `timeout_s`: how long the others may take longer than this one."""
        self._name, self._timeout_s = name, timeout_s
        self._children = RankProcesses(name, self._received, self._lost)
        self._nodes: Nodes | None = None
        self._replies: list[dict[int, Future[bytes]]] = []
        """Of each other rank, by request."""
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._number = 0
        self._closing = False
        self._running: set[int] = set()
        """Requests that rank 0 itself is executing."""
        self._disagree: RanksDisagreeError | None = None
        self.is_broken = False
        """The ranks cannot go on together: a collective operation has failed, or an update on some of them only."""

    def start(self, num_ranks: int, folder: Path, log_form: Any, serve: Callable[[int, RankLink], None]) -> None:
        """Fork the other ranks of this host, where `num_ranks` are; see `RankProcesses.start`.

        `serve`: called in each child with its rank; its end is the child's.
        """
        self._replies = [{} for _ in range(1, num_ranks)]
        self._children.start(
            range(1, num_ranks), folder, log_form, lambda rank, connection: serve(rank, RankLink(connection))
        )

    def add_nodes(self, nodes: Nodes) -> None:
        """Have further ranks, on other hosts, whose agents have joined."""
        self._replies += [{} for _ in range(nodes.num_ranks)]
        self._nodes = nodes
        nodes.serve(self._received, self._lost)

    def dismiss(self, problem: str) -> None:
        """End the agents of other nodes with `problem`, which a restart does not mend."""
        if self._nodes is not None:
            self._closing = True
            self._nodes.close(problem)

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
        number, futures = self._send(command, joins=True)
        try:
            result = own()
        except StarlingError as error:
            if agree and not self._all_fail(futures):
                raise self._disagreement(0, error) from error
            raise
        except Exception as error:  # torch raises anything when a collective operation fails
            if not self._replies:
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
        """Send a command that takes place in the background of the other ranks. Returns the future answers, by rank.

        Raises:
            RestartError: a rank reads nothing.
        """
        return self._send(command, joins=False)[1]

    def _send(self, command: msgspec.Struct, *, joins: bool) -> tuple[int, list[Future[bytes]]]:
        """Send a command to the other ranks. Returns its number, and the future answers, by rank.

        `joins`: rank 0 executes it, too, from now on. Raises RestartError if a rank reads nothing.
        """
        if not self._replies:
            return 0, []
        encoded = msgspec.msgpack.encode(command)
        with self._sending:  # all ranks get all requests in the same order
            self._number += 1
            number = self._number
            if joins:  # before any answer can come, see `_end_if_alone`
                self._running.add(number)
            futures = [Future[bytes]() for _ in self._replies]
            with self._lock:
                for replies, future in zip(self._replies, futures, strict=True):
                    replies[number] = future
            frame = msgspec.msgpack.encode(_Request(number=number, command=msgspec.Raw(encoded)))
            if self._nodes is not None:
                self._nodes.send(frame)
            try:
                self._children.send(frame, self._timeout_s)
            except TimeoutError as error:
                raise self._breakage(str(error)) from error
        return number, futures

    def _breakage(self, reason: str) -> RestartError:
        self.is_broken = True
        return RestartError(f"the ranks of {self._name} cannot go on together: {reason}; it has to start again")

    def _disagreement(self, rank: int, error: StarlingError) -> RanksDisagreeError:
        self.is_broken = True
        self._disagree = RanksDisagreeError(f"rank {rank} of {self._name} failed alone: {error}")
        return self._disagree

    def close(self, leave: Callable[[], None], *, is_over: bool = True) -> None:
        """End the other ranks; those that have not ended by themselves are killed.

        Args:
            leave: disconnects this rank from the others, which do the same.
            is_over: this process is not started again, so other nodes end, too.
        """
        self._closing = True
        self._children.expect_end()
        deadline = time.monotonic()
        if self._replies and not self.is_broken:
            with self._sending:
                self._children.send(END)
                if self._nodes is not None:
                    self._nodes.end(is_over=is_over)
            leave()
            deadline = time.monotonic() + END_S
        self._children.end(deadline)
        if self._nodes is not None:
            self._nodes.close(str(self._disagree or ""))
        with self._lock:
            left = [future for replies in self._replies for future in replies.values()]
            for replies in self._replies:
                replies.clear()
        for future in left:
            future.set_exception(WeightsError(f"{self._name} has ended."))

    def _all_fail(self, futures: list[Future[bytes]]) -> bool:
        deadline = time.monotonic() + AGREE_S
        try:
            return all(future.exception(max(0.0, deadline - time.monotonic())) is not None for future in futures)
        except FutureTimeoutError:
            return False

    def _received(self, rank: int, frame: bytes) -> None:
        """Take an answer of a rank, in the thread that has received it."""
        reply = msgspec.msgpack.decode(frame, type=Reply)
        with self._lock:
            future = self._replies[rank - 1].pop(reply.request, None)
        if future is None:  # `close` has failed it
            return
        if not reply.problem:
            future.set_result(reply.data)
            return
        future.set_exception(_ERRORS.get(reply.error, StarlingError)(reply.problem))
        threading.Thread(target=self._end_if_alone, args=(rank, reply), daemon=True).start()

    def _end_if_alone(self, rank: int, reply: Reply) -> None:
        """End this process if it still executes what `rank` has failed at: it would wait for it in vain."""
        deadline = time.monotonic() + AGREE_S
        while reply.request in self._running:
            if time.monotonic() > deadline:
                code = EXIT_USAGE if reply.error == ConfigError.__name__ else EXIT_FAILED
                self._end(f"rank {rank}: {reply.problem}", code)
            time.sleep(0.05)

    def _lost(self, loss: Loss) -> None:
        """A rank has ended: end this process, which is started again, and all children with it."""
        if self._nodes is not None and not loss.was_killed:
            time.sleep(REPORT_S)  # it may have ended because another one was killed, which ends this process meanwhile
        if self._closing:
            return
        log = f"; see {loss.log}" if loss.log else ""
        self._end(f"{loss.what}, and the replica starts again from its newest state{log}", EXIT_RESTART)

    def _end(self, sentence: str, code: int) -> None:
        print(f"starling {self._name}: {sentence}", file=LogStream(sys.stderr))
        if self._nodes is not None and code != EXIT_RESTART:
            self._nodes.close(sentence)
        end_process(code)

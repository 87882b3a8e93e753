"""Where workers join a trainer: rank 0 listens, and passes on what each worker says."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import Layout, decode_layout
from starling.weightsync.transports.endpoints import most_connections
from starling.weightsync.transports.sockets.listener import Listener
from starling.weightsync.vllm.backend import configs
from starling.weightsync.vllm.backend.link import HANDSHAKE_S, Link, new_secret
from starling.weightsync.vllm.backend.messages import (
    FromWorker,
    Hello,
    Welcome,
    from_worker,
    shortened,
)
from starling.weightsync.vllm.versions import SUPPORTED, is_supported

log = logging.getLogger(__name__)

ACCEPT_S: Final = 0.2
"""Interval at which the listening thread looks whether it is to end."""
HELLO_S: Final = 600.0
"""How long a worker may take to record its layout: seconds, and minutes for a very large model on a busy machine."""
MAX_OPENING: Final = 1024
"""Connections that may be without a proof of the secret at the same time; the oldest one ends for a further one."""
MAX_LOGGED: Final = 1000
"""Maximum number of connections without a proof of the secret that are logged, so that strangers fill no disk."""


def _shut_down(connection: socket.socket) -> None:
    """End all waits of the thread that serves `connection`, which then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(eq=False)
class JoinedWorker:
    """A worker that has joined."""

    name: str
    engine: str
    engine_size: int
    vllm: str
    layout: Layout
    config: dict[str, object]
    stages: bool
    link: Link
    lost: str = ""
    """Why its connection has ended; empty while it lasts."""


@dataclass
class WorkerEvent:
    """A message of a worker, or the end of its connection."""

    worker: JoinedWorker
    message: FromWorker | None
    problem: str = ""


@dataclass
class _Waiting:
    """What the threads pass to the one that leads."""

    workers: list[JoinedWorker] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why workers could not join."""


class Rendezvous:
    """Takes workers. The methods are called by one thread; others accept and receive.

    Args:
        host: the address that workers connect to.

    Raises:
        WeightsError: it cannot be listened on.
    """

    def __init__(self, host: str) -> None:
        self.secret = new_secret()
        self._listener = Listener(host)
        self.address = self._listener.address
        self._events: queue.Queue[WorkerEvent] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting = _Waiting()
        self._opening: dict[socket.socket, threading.Thread] = {}
        """Connections that have not proven the secret, from the oldest, and the threads that serve them."""
        self._num_logged = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="weightsync-rendezvous", daemon=True)
        self._thread.start()

    @property
    def workers(self) -> list[JoinedWorker]:
        """The workers whose connection lasts, in the order in which they joined."""
        with self._lock:
            return [worker for worker in self._waiting.workers if not worker.lost]

    def take_problems(self) -> list[str]:
        """Return why workers could not join since the last call."""
        with self._lock:
            problems, self._waiting.problems = self._waiting.problems, []
        return problems

    def next_event(self, deadline: float) -> WorkerEvent | None:
        """Return the next event, None at `deadline` (monotonic seconds)."""
        try:
            return self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def forget_lost(self) -> None:
        """Drop the workers whose connection has ended, the others of their engines, and the events of all."""
        with self._lock:
            lost = {worker.engine: worker.lost for worker in self._waiting.workers if worker.lost}
            for worker in self._waiting.workers:
                if worker.engine in lost:
                    worker.lost = worker.lost or lost[worker.engine]
                    worker.link.close()
            self._waiting.workers = [worker for worker in self._waiting.workers if not worker.lost]
        while True:
            try:
                self._events.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End all connections."""
        self._stop.set()
        self._thread.join(2 * ACCEPT_S + HANDSHAKE_S)
        self._listener.close()
        with self._lock:
            for connection in self._opening:
                _shut_down(connection)
        for worker in self.workers:
            worker.link.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            connection = self._listener.accept(ACCEPT_S)
            if connection is None:
                continue
            self._make_room()
            thread = threading.Thread(target=self._serve, args=(connection,), name="weightsync-worker", daemon=True)
            with self._lock:
                self._opening[connection] = thread
            try:
                thread.start()
            except RuntimeError as error:
                self._proven_or_ended(connection)
                connection.close()
                self._listener.pause(error)

    def _make_room(self) -> None:
        """End the oldest connections without a proof of the secret, where there are as many as may be: strangers must
        neither keep workers away nor take the files of the trainer."""
        while len(self._opening) >= most_connections(MAX_OPENING):
            with self._lock:
                connection, thread = next(iter(self._opening.items()), (None, None))
                if connection is None or thread is None:
                    return
                _shut_down(connection)
            thread.join(HANDSHAKE_S)  # at once: all its waits have ended
            self._proven_or_ended(connection)

    def _proven_or_ended(self, connection: socket.socket) -> None:
        with self._lock:
            self._opening.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        """Take one worker, and pass on its messages until its connection ends."""
        try:
            link = Link.accept(connection, self.secret)
        except (WeightsError, OSError) as error:
            self._note_stranger(error)
            connection.close()
            return
        finally:
            self._proven_or_ended(connection)
        try:
            worker = self._admit(link)
        except WeightsError as error:
            log.warning("a worker could not join: %s", error)
            link.close()
            return
        if worker is None:
            return
        try:
            while True:
                self._events.put(WorkerEvent(worker, link.receive(from_worker)))
        except WeightsError as error:
            worker.lost = str(error)
            link.close()
            self._events.put(WorkerEvent(worker, None, worker.lost))

    def _note_stranger(self, error: Exception) -> None:
        with self._lock:
            self._num_logged += 1
            level = logging.WARNING if self._num_logged <= MAX_LOGGED else logging.DEBUG
        log.log(level, "a worker could not join: %s", error)

    def _admit(self, link: Link) -> JoinedWorker | None:
        """Check what a worker says of itself; answer, and return it unless it was refused."""
        hello = link.receive(from_worker, HELLO_S)
        if not isinstance(hello, Hello):
            raise WeightsError("a peer sent something else than a Hello first.")
        worker, problem = None, hello.problem
        try:
            if not problem:
                layout = decode_layout(hello.layout)
                if len(layout.ranks) != 1:
                    raise WeightsError(f"its layout has {len(layout.ranks)} ranks, expected 1.")
                engine = hello.engine or hello.name
                worker = JoinedWorker(
                    hello.name, engine, hello.engine_size, hello.vllm, layout, hello.config, hello.stages, link
                )
        except WeightsError as error:
            problem = str(error)
        with self._lock:
            self._waiting.workers = [other for other in self._waiting.workers if other.name != hello.name]
            known = [other for other in self._waiting.workers if not other.lost]
            problem = problem or _mismatch(hello, known)
            if problem:
                self._waiting.problems.append(f"{hello.name} cannot join: {problem}")
            else:
                assert worker is not None
                self._waiting.workers.append(worker)
        link.send(Welcome(refused=shortened(problem)))
        if problem:
            link.close()
            return None
        return worker


def _mismatch(hello: Hello, known: list[JoinedWorker]) -> str:
    """Return why a worker does not fit those that have joined; empty if it does."""
    if not is_supported(hello.vllm):
        return (
            f"it runs {hello.vllm or 'no vLLM'}, and vllm {SUPPORTED} is supported; install such a version, or another "
            "starling-weightsync."
        )
    for worker in known:
        if worker.vllm != hello.vllm:
            return (
                f"it runs {hello.vllm}, and {worker.name} runs {worker.vllm}: give all engines of a trainer the same "
                "vLLM, since versions place weights differently."
            )
        found = configs.first_difference(hello.config, worker.config)
        if found is not None:
            key, mine, theirs = found
            return (
                f"its config has {key} = {mine!r}, and that of {worker.name} {theirs!r}: start all engines with the "
                "same model."
            )
    return ""

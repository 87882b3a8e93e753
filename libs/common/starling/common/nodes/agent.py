"""The agent of a node of a replica that is not node 0: forks the ranks of its host, and passes their frames on.

It outlives the ranks: when node 0 starts again, because any rank of any node has ended, the agent kills its own, joins
the next incarnation of node 0, and forks new ones, for which everything is imported already. It never uses a device.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import ConfigError, RestartError, UnreachableError
from starling.common.net import curve
from starling.common.net.frames import receive
from starling.common.nodes.children import END, END_S, Loss, RankProcesses
from starling.common.nodes.facts import NodeFacts, read_mark
from starling.common.nodes.nodes import (
    ASK_S,
    DOWN,
    MAX_FRAMES,
    POLL_MS,
    Answer,
    Down,
    End,
    Join,
    JoinLimit,
    Lost,
    Refusal,
    Request,
    Up,
    Welcome,
    pieces_of,
    set_limits,
)
from starling.common.observe.notify import NotifySocket
from starling.common.observe.process import StopSignal
from starling.common.service import NodeArguments, ServiceArguments
from starling.common.settings import NetworkSettings, ServiceSettings
from starling.common.wakeup import Wakeup

EXIT_S: Final = 5.0
"""How long an agent may take to exit once its node was stopped, besides the time that node 0 takes to save."""
LEAVE_S: Final = 5.0
"""How long node 0 may take to end after the news that a rank has ended."""
RECONNECT_MS: Final = (100, 2000)
CONNECT_WITHIN_MS: Final = 5000
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED

log = structlog.get_logger(__name__)

Serve = Callable[[int, int, Connection], None]
"""Be a rank: its number, that of the first rank of its node, and its end of the pipe."""


class NodeAgent:
    """The process of a node."""

    def __init__(
        self,
        settings: ServiceSettings,
        arguments: ServiceArguments,
        facts: NodeFacts,
        serve: Serve,
        *,
        limit: JoinLimit,
        leave_s: float = 0.0,
        label: str = "rank",
    ) -> None:
        """Prepare; nothing is connected yet.

        Args:
            settings: of the service.
            arguments: its command line.
            facts: of this node, without the marker.
            serve: called in each rank.
            limit: how long to look for node 0.
            leave_s: how long node 0 may need the ranks after this node was told to stop.
            label: see `RankProcesses`.

        Raises:
            ConfigError: the key file cannot be used.
        """
        assert arguments.nodes is not None
        self._name, self._arguments, self._folder = arguments.name, arguments.nodes, arguments.folder
        self._network, self._log_form = settings.network, settings.run.log_format
        self._key = arguments.key_file(settings.network.curve)
        self._facts, self._serve = facts, serve
        self._limit, self._leave_s, self._label = limit, leave_s, label
        self._title = f"node {arguments.nodes.number} of {arguments.name}"
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a request to save is for node 0

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve one incarnation of the replica after the other, until node 0 ends all.

        Raises:
            ConfigError: node 0 does not admit this node.
            UnreachableError: node 0 could not be reached in time.
            RestartError: this node was stopped, and the replica goes on.
        """
        self._notify = notify
        stop.deadline_s = self._leave_s + 2 * EXIT_S
        wakeup = Wakeup()
        stop.install(wakeup.set)
        while not stop:
            with closing(_Link(self._arguments, self._network, self._key, wakeup)) as link:
                welcome = self._join(link, stop)
                if welcome is not None and self._follow(link, welcome, wakeup, stop):
                    return

    def _join(self, link: _Link, stop: StopSignal) -> Welcome | None:
        """Return the welcome of node 0; None when this process is stopped before."""
        deadline, asked = time.monotonic() + self._limit.seconds, 0.0
        log.info("joining", address=link.address)
        self._notify.starting(f"looks for node 0 at {link.address}", self._limit.seconds)
        while not stop:
            self._notify.turn(serves=False)
            now = time.monotonic()
            if now > deadline:
                raise UnreachableError(
                    f"{self._title} could not join node 0 at {link.address} within {self._limit.seconds:g} s "
                    f"({self._limit.setting}): {link.state}; check that all nodes run, with the same --rdzv and key "
                    "file"
                )
            if link.is_connected and now >= asked + ASK_S:
                facts = msgspec.structs.replace(self._facts, marker=read_mark(self._folder, self._name))
                link.send(Join(facts=facts))
                asked = now
            link.is_lost = False
            link.step()
            while link.received:
                message, _ = link.received.popleft()
                if isinstance(message, Refusal):
                    raise ConfigError(message.reason)
                if isinstance(message, Welcome):
                    return message
        return None

    def _follow(self, link: _Link, welcome: Welcome, wakeup: Wakeup, stop: StopSignal) -> bool:
        """Fork the ranks, and pass frames on. Returns whether node 0 has ended them; False after a loss."""
        losses: deque[Loss] = deque()

        def lose(loss: Loss) -> None:
            losses.append(loss)
            wakeup.set()

        ranks = RankProcesses(self._name, link.pass_on, lose, label=self._label)
        first = welcome.first_rank
        numbers = range(first, first + self._facts.num_ranks)
        ranks.start(numbers, self._folder, self._log_form, lambda rank, pipe: self._serve(rank, first, pipe))
        log.info("joined", address=link.address, ranks=list(numbers))
        deadline = time.monotonic()
        writer = ThreadPoolExecutor(1, "requests")  # a rank that is busy reads nothing
        try:
            outcome = self._relay(link, ranks, writer, losses, stop)
            if outcome in ("over", "end"):
                deadline = time.monotonic() + END_S
            if outcome == "stop":
                raise RestartError(f"{self._title} was stopped by {stop.name}, and the replica starts again without it")
            return outcome == "over"
        finally:
            ranks.end(deadline)  # first: what is left to be sent to a rank that reads nothing fails once it has ended
            writer.shutdown()

    def _relay(
        self,
        link: _Link,
        ranks: RankProcesses,
        writer: ThreadPoolExecutor,
        losses: deque[Loss],
        stop: StopSignal,
    ) -> Literal["over", "end", "lost", "stop"]:
        """Pass frames on until node 0 ends the ranks, a rank or node 0 is lost, or this node has to stop."""
        leave_by = None
        while True:
            self._notify.turn(lambda: f"relays to node 0 at {link.address}")
            while link.received:
                message, frame = link.received.popleft()
                if isinstance(message, Refusal):
                    raise ConfigError(message.reason)
                if isinstance(message, Request):
                    writer.submit(ranks.send, frame)
                if isinstance(message, End):
                    ranks.expect_end()
                    writer.submit(ranks.send, END)
                    return "over" if message.is_over else "end"
            if losses:
                log.warning("rank_ended", reason=losses[0].what, log=losses[0].log)
                link.send(Lost(loss=losses[0]))
                deadline = time.monotonic() + LEAVE_S
                while not link.is_lost and time.monotonic() < deadline:  # node 0 ends because of it
                    link.step()
                return "lost"
            if link.is_lost:
                log.warning("node_0_is_gone", address=link.address)
                return "lost"
            now = time.monotonic()
            if stop and leave_by is None:
                self._notify.stopping(f"stopped by {stop.name}", self._leave_s + 2 * EXIT_S)
                leave_by = now + self._leave_s + EXIT_S  # node 0 may be saving a state, for which it needs the ranks
            if leave_by is not None and now > leave_by:
                return "stop"
            link.step()


class _Link:
    """A connection to node 0, which is made again until it is there. For the main thread, except `pass_on`."""

    def __init__(
        self, arguments: NodeArguments, network: NetworkSettings, key: curve.KeyFile | None, wakeup: Wakeup
    ) -> None:
        self.address = f"{arguments.host}:{arguments.port}"
        self.is_connected = self.is_lost = self._was_connected = False
        self._wakeup = wakeup
        self._queue: deque[tuple[bytes | memoryview, ...]] = deque()
        self.received: deque[tuple[Down, bytes]] = deque()
        """Messages, with what follows."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.DEALER)
        set_limits(self._socket, network)
        self._socket.reconnect_ivl, self._socket.reconnect_ivl_max = RECONNECT_MS
        self._socket.connect_timeout = CONNECT_WITHIN_MS
        if key is not None:  # all nodes have the same
            curve.connect_with(self._socket, msgspec.structs.replace(key, controller_public=key.public))
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(f"tcp://{self.address}")

    @property
    def state(self) -> str:
        """What is known of node 0, for an error."""
        if self.is_connected:
            return "other nodes have not joined, or it starts again"
        return "its connection was lost" if self._was_connected else "there was no connection"

    def send(self, message: Up, *frames: memoryview) -> None:
        """Send a message."""
        self._queue.append((msgspec.msgpack.encode(message), *frames))

    def pass_on(self, rank: int, frame: bytes) -> None:
        """Send a frame of a rank. Any thread may call this."""
        self.send(Answer(rank=rank), *pieces_of(frame))
        self._wakeup.set()

    def step(self) -> None:
        """Send what waits, and receive what has come; waits for at most `POLL_MS`."""
        self._send_queue()
        poller = zmq.Poller()
        for one in (self._socket, self._monitor, self._wakeup.fileno()):
            poller.register(one, zmq.POLLIN)
        poller.poll(POLL_MS)
        self._wakeup.clear()
        while (received := receive(self._socket, most=MAX_FRAMES)) is not None:
            head, *pieces = received[0]
            self.received.append((DOWN.decode(head), b"".join(pieces)))
        while (received := receive(self._monitor)) is not None:
            event = parse_monitor_message(received[0])["event"]
            self.is_lost |= event == zmq.EVENT_DISCONNECTED
            self.is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._was_connected |= self.is_connected
        self._send_queue()

    def _send_queue(self) -> None:
        while self._queue and self.is_connected:
            self._socket.send_multipart(self._queue.popleft(), zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Send what is left, and disconnect."""
        self._send_queue()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

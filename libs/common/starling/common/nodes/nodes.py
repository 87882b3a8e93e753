"""The nodes of a replica, as node 0 has them: it admits the agents of the others, and reaches their ranks by them.

Each agent (`starling.common.nodes.agent`) connects to the address of `--rdzv`, says which node it is and with what
settings, model and folder, and is admitted once all nodes are there. Then requests and answers travel as through the
pipes of ranks on this host. Connections are encrypted and authenticated by CURVE with the key of the replica, which
all of its nodes have. Either end notices by ZeroMQ's pings that the other one is gone, within `network.lease_s`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from starling.common.errors import ConfigError, UnreachableError
from starling.common.net import curve
from starling.common.net.binding import bind
from starling.common.net.frames import receive_routed
from starling.common.net.hub.traffic import TrafficGuard
from starling.common.nodes.children import Loss
from starling.common.nodes.facts import NodeFacts
from starling.common.observe.process import EXIT_FAILED, end_process
from starling.common.service import NodeArguments
from starling.common.settings import NetworkSettings
from starling.common.wakeup import Wakeup
from starling.common.wire.codec import MAX_BUFFER_BYTES

ASK_S: Final = 1.0
"""Interval at which an agent asks to be admitted."""
POLL_MS: Final = 200
WATCH_MS: Final = 20
"""The same while there are connections whose node is not admitted."""
JOIN_BYTES: Final = 1 << 20
"""Undelivered bytes of such a connection: its handshake, and its `Join`, of some 20 KiB."""
MEMBER_BYTES: Final = 1 << 62
"""The same of an admitted node: it has the key of the replica, and its ranks send as much as they have to."""
MAX_CONNECTIONS: Final = 256
"""Connections at a time, or four for each node of a larger replica: many systems allow a process 1,024 open files, and
node 0 needs some for its checkpoints."""
PIECE_BYTES: Final = 16 << 20
"""Bytes of one frame. ZeroMQ takes a peer for gone that completes no frame for `lease_s`, and a request may be a whole
step, of more bytes than a network carries in that time."""
MAX_FRAMES: Final = 1 << 16
"""Frames of a request or an answer: a TiB."""
LINGER_MS: Final = 2000
"""How long the last messages may take to be sent."""

log = structlog.get_logger(__name__)


class JoinLimit(NamedTuple):
    """How long the nodes of a replica wait for each other."""

    seconds: float
    setting: str
    """That has this value."""


@dataclass
class NodeSetup:
    """What a service listens with for the agents of its other nodes; see `Nodes`."""

    name: str
    arguments: NodeArguments
    network: NetworkSettings
    key: curve.KeyFile | None
    facts: NodeFacts
    limit: JoinLimit
    is_over: bool = False
    """This process is not started again, so the agents end with it."""


class Join(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """Ask to be admitted; repeated until there is an answer."""

    facts: NodeFacts


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A rank has sent what follows, in pieces."""

    rank: int


class Lost(msgspec.Struct, frozen=True, kw_only=True, tag="lost"):
    """A rank of the node has ended."""

    loss: Loss


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """All nodes are there: fork the ranks."""

    first_rank: int
    """Of the node."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The agent has to end, with this sentence."""

    reason: str


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """What follows, in pieces, is for all ranks of the node."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Let the ranks of the node end."""

    is_over: bool
    """Whether the agent ends, too; otherwise node 0 may be started again."""


Up = Join | Answer | Lost
Down = Welcome | Refusal | Request | End


@dataclass
class _Member:
    route: bytes
    descriptor: int
    """Of its connection."""
    facts: NodeFacts


class Nodes:
    """The agents of the other nodes. Its socket belongs to the thread that gathers them, then to one of its own."""

    def __init__(
        self, name: str, arguments: NodeArguments, network: NetworkSettings, key: curve.KeyFile | None, facts: NodeFacts
    ) -> None:
        """Listen for agents.

        Args:
            name: of the replica.
            arguments: address, and number of the nodes.
            network: interval of pings, and how long a node may be silent.
            key: of the replica; None for a run without CURVE.
            facts: of this node.

        Raises:
            ConfigError: the address is not one of this host, or is in use.
        """
        self._name, self._arguments, self._facts, self._lease_s = name, arguments, facts, network.lease_s
        self._members: dict[int, _Member] = {}
        self._applicants: dict[bytes, float] = {}
        """Since when a connection has asked for the place of a node that has another one."""
        self._last_refusal = ""
        self._queue: deque[tuple[bytes | memoryview, ...]] = deque()
        self._wakeup, self._ending = Wakeup(), threading.Event()
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self._authenticator: ThreadAuthenticator | None = None
        if key is not None:
            self._authenticator = curve.start_authenticator(self._context, curve.AllowList({key.public: key.name}))
            curve.serve_with(self._socket, key)
        set_limits(self._socket, network)
        self._traffic = TrafficGuard(self._socket, JOIN_BYTES, max(MAX_CONNECTIONS, 4 * arguments.num_nodes))
        try:
            bind(self._socket, f"tcp://{_address_of(arguments.host)}:{arguments.port}", "--rdzv")
        except ConfigError:
            self._close_sockets()
            raise

    @property
    def num_ranks(self) -> int:
        """Ranks on the other nodes."""
        return sum(member.facts.num_ranks for member in self._members.values())

    @property
    def shares(self) -> list[int]:
        """Ranks of each node, node 0 first; all have joined."""
        return [self._facts.num_ranks, *(self._members[node].facts.num_ranks for node in sorted(self._members))]

    def gather(self, limit: JoinLimit) -> None:
        """Wait until all nodes have joined. `limit`: for how long.

        Raises:
            UnreachableError: one has not joined in time.
        """
        deadline = time.monotonic() + limit.seconds
        log.info("waiting_for_nodes", address=f"{self._arguments.host}:{self._arguments.port}", nodes=self._missing())
        while self._missing():
            if time.monotonic() > deadline:
                refusal = f"; the last one that was refused: {self._last_refusal}" if self._last_refusal else ""
                raise UnreachableError(
                    f"{_named(self._missing())} of {self._name} did not join at {self._arguments.host}:"
                    f"{self._arguments.port} within {limit.seconds:g} s ({limit.setting}){refusal}"
                )
            self._step(self._admit, self._forget)

    def welcome(self, first_ranks: Sequence[int]) -> None:
        """Tell all nodes to begin. `first_ranks`: the first rank of each, node 0 first."""
        for node in sorted(self._members):
            self._tell(node, Welcome(first_rank=first_ranks[node]))

    def serve(self, received: Callable[[int, bytes], None], lost: Callable[[Loss], None]) -> None:
        """Exchange frames from now on, in a thread.

        Args:
            received: called with a rank and a frame that it has sent.
            lost: called, in a thread of its own, when a rank or a node is lost.
        """

        def take(route: bytes, descriptor: int, message: Up, frames: list[bytes]) -> None:
            if isinstance(message, Answer):
                received(message.rank, b"".join(frames[1:]))
            elif isinstance(message, Lost):
                threading.Thread(target=lost, args=(message.loss,), daemon=True).start()
            else:
                self._admit(route, descriptor, message, frames)

        def leave(node: int) -> None:
            what = f"node {node} ({self._members[node].facts.host}) of {self._name} is gone"
            threading.Thread(target=lost, args=(Loss(what=what, log="", was_killed=True),), daemon=True).start()

        def run() -> None:
            try:
                while not self._ending.is_set():
                    self._step(take, leave)
            except Exception:  # the edge of the thread: the traceback is the report, and the process ends
                log.exception("failed")
                end_process(EXIT_FAILED)

        self._thread = threading.Thread(target=run, name="nodes", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        """Send a frame to all ranks of the other nodes. Any thread may call this."""
        parts: list[bytes | memoryview] = [msgspec.msgpack.encode(Request()), *pieces_of(frame)]
        for node in sorted(self._members):
            self._queue.append((self._members[node].route, *parts))
        self._wakeup.set()

    def end(self, *, is_over: bool) -> None:
        """Let the ranks of the other nodes end. `is_over`: this process is not started again."""
        for node in sorted(self._members):
            self._tell(node, End(is_over=is_over))
        self._wakeup.set()

    def close(self, problem: str = "") -> None:
        """Send what is left, and disconnect. Agents end with `problem`, if it is one that a restart does not mend."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()
        for node in self._members if problem else ():
            self._tell(node, Refusal(reason=problem))
        self._send_queue()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._traffic.close()
        self._socket.close(LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._wakeup.close()

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._arguments.num_nodes) if node not in self._members]

    def _step(self, take: Callable[[bytes, int, Up, list[bytes]], None], leave: Callable[[int], None]) -> None:
        """Send what waits, handle the next events, and close connections that have sent too much.

        Waits for events for at most `POLL_MS`.
        """
        self._send_queue()
        poller = zmq.Poller()
        for one in (self._socket, self._traffic.monitor, self._wakeup.fileno()):
            poller.register(one, zmq.POLLIN)
        poller.poll(WATCH_MS if self._traffic.num_open > len(self._members) else POLL_MS)
        self._wakeup.clear()
        while (received := receive_routed(self._socket, most=MAX_FRAMES)) is not None:
            route, frames, last = received
            self._read_monitor(leave)  # before this connection, another one may have had the same descriptor
            descriptor = int(last.get(zmq.SRCFD))
            self._traffic.deliver(descriptor, sum(map(len, frames)), len(frames))
            try:
                message: Up = _UP.decode(frames[0])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                log.warning("node_refused", node=-1, reason=f"it sent something else than a node does ({error})")
                continue
            take(route, descriptor, message, frames)
        self._read_monitor(leave)
        for member in self._members.values():
            self._traffic.identify(member.descriptor, MEMBER_BYTES)
        self._traffic.check(time.monotonic())

    def _read_monitor(self, leave: Callable[[int], None]) -> None:
        closed = self._traffic.note_events(time.monotonic())
        for node in [node for node, one in self._members.items() if one.descriptor in closed]:
            leave(node)

    def _forget(self, node: int) -> None:
        """A node has left before all were there."""
        log.warning("node_left", node=node, host=self._members.pop(node).facts.host)

    def _admit(self, route: bytes, descriptor: int, message: Up, frames: list[bytes]) -> None:
        """Take a `Join`. Its node may seem to be there still for `lease_s` after it has lost its connection."""
        if not isinstance(message, Join) or not self._traffic.is_open(descriptor):
            return  # a node whose connection has ended asks again over another one
        facts = message.facts
        member = self._members.get(facts.node)
        if member is not None and member.route == route:
            return
        reason = facts.differs(self._facts)
        if not reason and member is not None:
            if time.monotonic() - self._applicants.setdefault(route, time.monotonic()) < self._lease_s + 2 * ASK_S:
                return
            reason = (
                f"node {facts.node} of {self._name} is on {member.facts.host} already; give each node its own "
                "--node-rank"
            )
        if reason:
            self._last_refusal = reason
            log.warning("node_refused", node=facts.node, reason=reason)
            self._queue.append((route, msgspec.msgpack.encode(Refusal(reason=reason))))
            return
        self._members[facts.node] = _Member(route, descriptor, facts)
        log.info("node_joined", node=facts.node, host=facts.host, ranks=facts.num_ranks)

    def _tell(self, node: int, message: Down) -> None:
        self._queue.append((self._members[node].route, msgspec.msgpack.encode(message)))

    def _send_queue(self) -> None:
        while self._queue:
            # What is for a connection that is gone is dropped.
            self._socket.send_multipart(self._queue.popleft(), zmq.NOBLOCK, copy=False)


def pieces_of(frame: bytes) -> list[memoryview]:
    """Return a frame in pieces, without copying it; the receiver joins them."""
    whole = memoryview(frame)
    return [whole[at : at + PIECE_BYTES] for at in range(0, max(1, len(whole)), PIECE_BYTES)]


def set_limits(one: zmq.Socket[Any], network: NetworkSettings) -> None:
    """Set how soon a socket notices that its peer is gone, and how much it keeps for it."""
    one.heartbeat_ivl, one.heartbeat_timeout = int(network.heartbeat_s * 1000), int(network.lease_s * 1000)
    one.sndhwm = one.rcvhwm = 0  # requests are few, and none may be lost
    one.maxmsgsize = MAX_BUFFER_BYTES
    one.linger = LINGER_MS


def _address_of(host: str) -> str:
    """Return the address of a host: ZeroMQ listens at no names."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"--rdzv names the host {host}, which has no address here ({error.strerror})") from error


def _named(nodes: Iterable[int]) -> str:
    numbers = [str(node) for node in nodes]
    return f"node {numbers[0]}" if len(numbers) == 1 else f"nodes {', '.join(numbers[:-1])} and {numbers[-1]}"


_UP: Final = msgspec.msgpack.Decoder(Up)
DOWN: Final = msgspec.msgpack.Decoder(Down)

"""A replica's line to the controller: one DEALER, served by whoever is there.

The working thread takes its messages from the socket itself, and sends its results itself: nothing is handed from
thread to thread on the way. A second thread, the keeper, looks after the line while the working thread trains or
generates for however long. Together they

- say `Hello` until welcomed, and again when the controller asks who this is,
- keep the heartbeat,
- hand each new command to the working thread once, however often it comes,
- send each result, and send it again until the controller releases its lease,
- find the controller again when it was away, and listen only to its newest incarnation; meanwhile the working thread
  works on with what it has, and its results are kept,
- end with one clear error when the controller refuses this replica or stays silent beyond its deadline.

A socket of ZeroMQ may be used by several threads in turn; `_lock` makes it their turn. To wait, the working thread
does not hold the lock: it polls the socket's descriptor. That descriptor tells only of *changes*, so nobody waits on
it before the socket was found empty, and who finds something for another wakes them by the eventfd.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
import zmq

from starling.common.errors import RefusedError, StarlingError, UnreachableError, WireError
from starling.common.leases import LeaseTable
from starling.common.membership import MAX_SEQ
from starling.common.net.dealer import Dealer
from starling.common.net.fencing import LeaseFence
from starling.common.net.frames import is_readable, receive
from starling.common.net.reported_state import ReportedState
from starling.common.net.settings import LinkSettings, make_incarnation
from starling.common.wakeup import Wakeup
from starling.common.wire import codec, messages
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, LeasedCommand, Up, Welcome

log = structlog.get_logger(__name__)

BURST = 16
"""Messages that the working thread takes in at a time, before it works on the first."""
LINGER_MS = 1
"""How long the working thread waits in the socket after a message; nobody can wake it there."""
HELLO_EVERY_S = 0.5
RESEND_S = 2.0
QUIET_S = 10.0
"""To a controller that has been silent for so long nothing is sent again: all of it would pile up in the socket."""
LOOK_EVERY_S = 0.1
"""How often the keeper looks at the line; the heartbeat may be more frequent."""


class ReceivedCommand(msgspec.Struct, frozen=True):
    """One new command for the working thread."""

    message: LeasedCommand
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class CancelledLeases:
    """Work that nobody wants any more."""

    leases: tuple[str, ...]


@dataclass(frozen=True)
class LinkClosed:
    """The line is over: drained by the controller (`error` is None), or lost."""

    reason: str
    error: StarlingError | None = None


Inbound = ReceivedCommand | CancelledLeases | LinkClosed


class ControllerLink:
    """The line of one replica. `receive` belongs to the working thread; the rest may be called in any thread."""

    def __init__(self, settings: LinkSettings, hello: messages.Hello, hello_buffers: tuple[bytes, ...] = ()) -> None:
        """Prepare to say `hello`."""
        self._settings, self._hello, self._hello_buffers = settings, hello, hello_buffers
        self._incarnation, self._seq = make_incarnation(), 0
        self.fence = LeaseFence(f"{settings.name}/{self._incarnation}/", hello.role)
        self._lock = threading.RLock()
        self._book = LeaseTable(resend_s=RESEND_S)
        self._told = ReportedState(version=hello.version)
        self._inbox: deque[Any] = deque()
        self._wakeup = Wakeup()
        self._nudged = self._awoken = self._welcomed = self._full = self._heard = False
        self._anew_from = 0  # a welcome to an earlier message is to what this replica was before
        self._controller_incarnation = -1  # the controller's, as far as it was heard
        self._owes_all = False  # who was away may not have heard any answer
        self._heartbeat_s = 1.0
        self._heard_at = self._spoken_at = self._linger_until = float("-inf")
        self._look_at = float("-inf")  # when the book is next looked through for answers to send again
        self._dealer: Dealer | None = None
        self._socket: zmq.Socket[Any] | None = None
        self._closing = threading.Event()
        self._failure: Exception | None = None  # what the keeper has ended by
        self._keeper = threading.Thread(target=self._keep, name="link", daemon=True)
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)

    def start(self) -> None:
        """Call the controller. What goes wrong is delivered as `LinkClosed`."""
        self._heard_at = time.monotonic()
        try:
            self._dealer = Dealer(self._settings.controller, self._settings.name, self._settings.key)
        except UnreachableError as error:
            self._end(f"cannot use {self._settings.controller}", error)
            return
        self._socket = self._dealer.socket
        self._socket.rcvtimeo = LINGER_MS
        self._poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._keeper.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection to a controller, as far as the keeper has seen."""
        return self._dealer is not None and self._dealer.connected

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors to wait on when `receive(0)` has returned None: a readable one says that it is worth a call."""
        own = self._wakeup.fileno()
        return (own,) if self._socket is None else (own, int(self._socket.getsockopt(zmq.FD)))

    def receive(self, timeout_s: float) -> Any | None:
        """Return the next `Inbound`, or what was `put`; None after `timeout_s` or `wake`. Raises the keeper's error."""
        deadline: float | None = None
        while True:
            if self._nudged:
                self._nudged = False
                self._wakeup.clear()
            if self._inbox:
                return self._inbox.popleft()
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            deadline = now + timeout_s if deadline is None else deadline
            with self._lock:
                if self._hear_some(lingers=now < min(self._linger_until, deadline) and not self._awoken):
                    continue
            if now >= deadline or self._awoken:
                self._awoken = False
                return None
            self._poller.poll(math.ceil((deadline - now) * 1000))

    def put(self, event: object) -> None:
        """Let `receive` return `event`, after what is there already."""
        self._inbox.append(event)
        self._nudge()

    def wake(self) -> None:
        """End the wait of `receive`, or of who waits on `descriptors`. Safe in a signal handler."""
        self._awoken = True
        self._nudge()

    def _nudge(self) -> None:
        self._wakeup.set()
        self._nudged = True  # in this order: who sees the flag finds the descriptor readable

    def work(self, lease: str) -> bool:
        """Say that `lease` is being worked on now. Returns False when it is wanted no longer."""
        with self._lock:
            return self.fence.may_do(lease, self._book) and self._book.work(lease)

    def introduce(self) -> None:
        """Say `Hello` again, before anything else: what the controller knows of this replica is no longer so."""
        with self._lock:
            self._introduce()
            self._anew_from, self._spoken_at = self._seq + 1, float("-inf")
            self._speak(time.monotonic())

    def advance(self, lease: str, progress: messages.LeaseProgress) -> None:
        """Let the next heartbeats say how far the work on `lease` has come, until it is answered."""
        with self._lock:
            self._book.advance(lease, progress)

    def answer(self, lease: str, message: Up, buffers: tuple[bytes, ...] = ()) -> None:
        """Send the result of `lease`, and keep sending it until the controller has it."""
        with self._lock:
            if self._book.answer(lease, message, buffers, time.monotonic()):
                self._send(message, buffers)

    def report(
        self,
        *,
        version: int | None = None,
        gauges: dict[str, float] | None = None,
        offered: int | None = None,
        waits: tuple[messages.Wait, ...] | None = None,
    ) -> None:
        """Set what the next heartbeats say; what is None stays. The waits grow older by themselves."""
        with self._lock:
            self._told.set(version, gauges, offered, waits, time.monotonic())

    def close(self, reason: str) -> None:
        """Say `Leave`, let the last messages go out (for at most 1 s), and end the keeper."""
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join()
        with self._lock:
            if self._dealer is not None:
                self._send(messages.Leave(reason=reason))
                self._dealer.close()
                self._dealer = self._socket = None
            self._wakeup.close()

    # --- the keeper ------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            self._look_after()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: whoever receives raises it
            self._failure = error
            self._nudge()

    def _look_after(self) -> None:
        patience_s = 0.0
        while not self._closing.wait(patience_s):
            with self._lock:
                now = time.monotonic()
                # First of all, so that nobody is called silent who spoke while this process stood still. And last: a
                # send may take note of what has come, and then the descriptor tells nobody of it any more.
                self._hear_all()
                self.fence.check(now)
                try:
                    assert self._dealer is not None
                    self._look(self._dealer)
                    self._check_silence(self._dealer, now)
                except StarlingError as error:
                    self._end("the line is over", error)
                self._speak(now)
                self._send_again(now)
                self._hear_all()
                if self._inbox:
                    self._nudge()
                patience_s = max(0.001, min(LOOK_EVERY_S, self._spoken_at + self._pace_s() - time.monotonic()))

    def _pace_s(self) -> float:
        return self._heartbeat_s if self._welcomed else HELLO_EVERY_S

    def _speak(self, now: float) -> None:
        if now - self._spoken_at < self._pace_s():
            return
        self._spoken_at = now
        if self._welcomed:
            self._send(self._told.heartbeat(self._book.held(), now))
        else:
            self._send(msgspec.structs.replace(self._hello, version=self._told.version), self._hello_buffers)
        self.fence.says(self._seq, now)

    def _send_again(self, now: float) -> None:
        if now >= self._look_at and self._welcomed and now - self._heard_at < QUIET_S:
            self._look_at = now + RESEND_S / 8
            for message, buffers in self._book.due(now):
                self._send(message, buffers)

    def _look(self, dealer: Dealer) -> None:
        """See what became of the connection. Raises RefusedError when the key is refused."""
        if dealer.look():
            # Whoever is there now is told the state at once. Then they know of the results; or they do not know this
            # replica, and ask. Either way a `Welcome` follows, and all results after it.
            self._spoken_at = float("-inf")
            self._owes_all = True

    def _check_silence(self, dealer: Dealer, now: float) -> None:
        if self._heard:
            self._heard, self._heard_at = False, now
        limit = self._settings.connect_s if self._controller_incarnation < 0 else self._settings.silence_s
        if now - self._heard_at > limit:
            raise UnreachableError(dealer.unreachable(f"no answer for {limit:.0f} s"))

    # --- the socket, by whoever holds the lock ---------------------------------------------------------------------

    def _send(self, message: Up, buffers: tuple[bytes, ...] = ()) -> None:
        if self._dealer is None:
            return
        self._seq += 1
        envelope = Envelope(
            protocol=PROTOCOL_VERSION,
            run=self._settings.run,
            sender=self._settings.name,
            incarnation=self._incarnation,
            seq=self._seq,
        )
        try:
            self._dealer.send(codec.pack(envelope, message, buffers))
            self._full = False
        except zmq.Again:
            if not self._full:
                log.warning("the line is full", message=type(message).__name__)
            self._full = True

    def _hear_some(self, *, lingers: bool = False) -> bool:
        """Take in up to `BURST` messages. Returns False when there is none; `lingers` waits for the first a moment.

        Who was spoken to just now is mostly spoken to again. To wait in the socket takes one call, and whoever has
        just sent something had better wait at once: the thread that sends it is to run on the same core.
        """
        if self._socket is None:
            return False
        num = int(lingers and self._hear_one(0))
        # To ask costs less than half of what an attempt in vain does, but who found two will find more.
        while num < BURST and (num >= 2 or is_readable(self._socket)) and self._hear_one():
            num += 1
        return num > 0

    def _hear_all(self) -> None:
        while self._hear_some():
            pass

    def _hear_one(self, flags: int = zmq.NOBLOCK) -> bool:
        """Take in one message. Returns False when there is none."""
        assert self._socket is not None
        received = receive(self._socket, flags)
        if received is None:
            return False
        parts, _ = received
        try:
            envelope = codec.unpack_envelope(parts)
            if envelope.protocol != PROTOCOL_VERSION or envelope.run != self._settings.run:
                raise WireError(f"protocol {envelope.protocol}, run {envelope.run}: not ours")
            message = codec.unpack_down(parts)
        except WireError as error:
            log.warning("dropped a message", reason=str(error))
            return True
        if envelope.incarnation != self._controller_incarnation and not self._is_newest(envelope.incarnation):
            return True
        self._heard = True
        self._linger_until = time.monotonic() + LINGER_MS / 1000
        # What it answers counts in any case; but it is no welcome to who has become another since.
        answered = self.fence.answered(envelope.cause, message, self._book) if type(message) is Welcome else MAX_SEQ
        if answered >= self._anew_from:
            self._act(message, parts)
        return True

    def _is_newest(self, incarnation: int) -> bool:
        """Say whether to accept this incarnation of the controller; a newer one gets a `Hello`."""
        if incarnation < self._controller_incarnation:
            return False
        if self._controller_incarnation >= 0:
            log.info("the controller was started again", incarnation=incarnation)
            self._introduce()
        self._controller_incarnation = incarnation
        return True

    def _introduce(self) -> None:
        """Say `Hello` at the keeper's next turn, and until welcomed."""
        if self._welcomed:
            self._spoken_at = float("-inf")
        self._welcomed, self._owes_all = False, True

    def _act(self, message: messages.Down, parts: list[bytes]) -> None:
        if isinstance(message, LeasedCommand):  # nearly always
            if self._book.grant(message.lease):
                self._inbox.append(ReceivedCommand(message, tuple(parts[2:])))
            else:
                self._book.resend(message.lease)
                self._look_at = float("-inf")
            return
        match message:
            case messages.Welcome(heartbeat_s=heartbeat_s):
                self._heartbeat_s = heartbeat_s
                self._welcomed = True
                if self._owes_all:
                    self._owes_all = False
                    self._answer_all()
            case messages.RequestHello():
                self._introduce()
            case messages.Refused(reason=reason):
                self._end(reason, RefusedError(f"the controller refuses {self._settings.name}: {reason}"))
            case messages.Drain(reason=reason):
                self._end(reason, None)
            case messages.ReleaseLeases(leases=leases):
                given_up = tuple(self._book.release(leases))
                if given_up:
                    self._inbox.append(CancelledLeases(given_up))

    def _end(self, reason: str, error: StarlingError | None) -> None:
        if error is not None:
            self._closing.set()
        self.put(LinkClosed(reason, error))

    def _answer_all(self) -> None:
        """Make every answer that was not released due at once."""
        for held in self._book.held():
            self._book.resend(held.lease)
        self._look_at = float("-inf")

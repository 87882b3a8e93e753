"""Connection of a replica to the controller: one DEALER socket, shared by two threads.

The working thread reads its commands from the socket itself and sends its results itself: no message is handed from
thread to thread. The heartbeat thread serves the connection while the working thread trains or generates. Together they

- send `Hello` until welcomed, and again when the controller does not know this replica,
- send heartbeats,
- deliver each new command to the working thread once, however often it arrives,
- send each result, and send it again until the controller releases its lease,
- reconnect after the controller was away, and accept only its newest incarnation; meanwhile the working thread
  continues with the commands that it has, and its results are kept,
- end with one clear error when the controller refuses this replica or stays silent beyond its deadline.

Several threads may use a ZeroMQ socket in turn; `_lock` serialises them. While the working thread waits it does not
hold the lock: it polls the socket's descriptor. That descriptor signals *changes* only, so a thread waits on it only
after it has found the socket empty, and a thread that reads a message for the other one wakes it by the eventfd.
"""

from __future__ import annotations

import math
import select
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
import zmq

from starling.common.counts import counted
from starling.common.errors import RefusedError, StarlingError, UnreachableError, WireError
from starling.common.leases.membership import MAX_SEQ
from starling.common.leases.table import LeaseTable
from starling.common.net.dealer import Dealer
from starling.common.net.fencing import LeaseFence
from starling.common.net.frames import is_readable, receive
from starling.common.net.settings import LinkSettings, make_incarnation
from starling.common.observe.process import EXIT_FAILED, end_process
from starling.common.wakeup import Wakeup
from starling.common.wire import codec, messages
from starling.common.wire.messages import (
    PROTOCOL_VERSION,
    Envelope,
    Heartbeat,
    HeldLease,
    LeasedCommand,
    ProfileReport,
    Status,
    Up,
    Wait,
    Welcome,
)

log = structlog.get_logger(__name__)

BURST = 16
"""Messages that the working thread reads at a time, before it handles the first."""
LINGER_MS = 1
"""How long the working thread waits in the socket after a message; `wake` cannot interrupt this wait."""
HELLO_EVERY_S = 0.5
RESEND_S = 2.0
QUIET_S = 10.0
"""Silence of the controller after which nothing is resent to it: the messages would pile up in the socket."""
HANGING_S = 120.0
"""How long the working thread may take to notice that the controller refuses this replica. Then it hangs, and the
process ends, to be restarted."""
LOOK_EVERY_S = 0.1
"""Longest period of the heartbeat thread; the heartbeat may be more frequent."""


class ReceivedCommand(msgspec.Struct, frozen=True):
    """One new command for the working thread."""

    message: LeasedCommand
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class CancelledLeases:
    """Leases that the controller released before their work was done."""

    leases: tuple[str, ...]


@dataclass(frozen=True)
class LinkClosed:
    """The end of the connection: drained by the controller (`error` is None), or lost."""

    reason: str
    error: StarlingError | None = None


Inbound = ReceivedCommand | CancelledLeases | LinkClosed | messages.Profile


@dataclass
class ReportedState:
    """The state that heartbeats repeat until it is changed."""

    version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)
    offered: int = -1
    waits: tuple[Wait, ...] = ()
    waits_at: float = 0.0
    """When `waits` were reported, in monotonic seconds."""
    profile: ProfileReport | None = None

    def update(
        self,
        version: int | None,
        gauges: dict[str, float] | None,
        offered: int | None,
        waits: tuple[Wait, ...] | None,
        now: float,
    ) -> None:
        """Change what is not None."""
        if version is not None:
            self.version = version
        if gauges is not None:
            self.gauges = gauges
        if offered is not None:
            self.offered = offered
        if waits is not None:
            self.waits, self.waits_at = waits, now

    def heartbeat(self, leases: tuple[HeldLease, ...], now: float) -> Heartbeat:
        """Return the heartbeat of this moment, with the waits aged since they were reported."""
        return Heartbeat(
            leases=leases,
            version=self.version,
            gauges=dict(self.gauges),
            offered=self.offered,
            waits=aged(self.waits, now - self.waits_at),
            profile=self.profile,
        )


def aged(waits: tuple[Wait, ...], elapsed_s: float) -> tuple[Wait, ...]:
    """Return `waits` as they are `elapsed_s` later."""
    return tuple(
        msgspec.structs.replace(
            wait, since_s=wait.since_s + elapsed_s, seconds_left=max(0.0, wait.seconds_left - elapsed_s)
        )
        for wait in waits
    )


class ControllerLink:
    """The connection of one replica. `receive` belongs to the working thread; any thread may call the rest."""

    def __init__(self, settings: LinkSettings, hello: messages.Hello, hello_buffers: tuple[bytes, ...] = ()) -> None:
        """Prepare to join with `hello`."""
        self._settings, self._hello, self._hello_buffers = settings, hello, hello_buffers
        self._incarnation, self._seq = make_incarnation(), 0
        self.fence = LeaseFence(f"{settings.name}/{self._incarnation}/", hello.role)
        self._lock = threading.RLock()
        self._leases = LeaseTable(resend_s=RESEND_S)
        self._state = ReportedState(version=hello.version)
        self._inbox: deque[Any] = deque()
        self._wakeup = Wakeup()
        self._signalled = self._woken = self._welcomed = self._full = self._heard = False
        self._hello_seq = 0  # a welcome in answer to an earlier message is for the state before this hello
        self._controller_incarnation = -1  # newest one that was received
        self._resend_all = False  # the controller was away and may have missed every answer
        self._heartbeat_s = 1.0
        self._heard_at = self._sent_at = self._linger_until = float("-inf")
        self._resend_at = float("-inf")  # when the lease table is next searched for answers to send again
        self._dealer: Dealer | None = None
        self._socket: zmq.Socket[Any] | None = None
        self._closing, self._is_noticed = threading.Event(), threading.Event()
        self._failure: Exception | None = None  # exception that ended the heartbeat thread
        self._heartbeat_thread = threading.Thread(target=self._run_heartbeats, name="link", daemon=True)
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)

    def start(self) -> None:
        """Connect to the controller. Errors are delivered as `LinkClosed`."""
        self._heard_at = time.monotonic()
        try:
            self._dealer = Dealer(self._settings.controller, self._settings.name, self._settings.key)
        except UnreachableError as error:
            self._end(f"cannot use {self._settings.controller}", error)
            return
        self._socket = self._dealer.socket
        self._socket.rcvtimeo = LINGER_MS
        self._poller.register(int(self._socket.getsockopt(zmq.FD)), select.POLLIN)
        self._heartbeat_thread.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection to a controller, as of the heartbeat thread's last check."""
        return self._dealer is not None and self._dealer.connected

    @property
    def joined(self) -> bool:
        """Whether the controller has welcomed this replica, as of the last message of it that was read."""
        return self._welcomed

    def describe(self) -> str:
        """Return in one line what the heartbeats report."""
        with self._lock:
            num, waits, version = len(self._leases.held()), self._state.waits, self._state.version
        parts = ["joined" if self._welcomed else f"not joined to {self._settings.controller}"]
        parts += [f"version {version}"] if version >= 0 else []
        parts += [counted(num, "lease")]
        parts += [f"waits for {wait.what} on {wait.on}" for wait in waits[:1]]
        return ", ".join(parts)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors to wait on after `receive(0)` has returned None; call it again when one is readable."""
        own = self._wakeup.fileno()
        return (own,) if self._socket is None else (own, int(self._socket.getsockopt(zmq.FD)))

    def receive(self, timeout_s: float) -> Any | None:
        """Return the next `Inbound` or posted event; None after `timeout_s` or `wake`.

        Raises the exception that ended the heartbeat thread.
        """
        deadline: float | None = None
        while True:
            if self._signalled:
                self._signalled = False
                self._wakeup.clear()
            if self._inbox:
                event = self._inbox.popleft()
                if isinstance(event, LinkClosed):
                    self._is_noticed.set()
                return event
            if self._failure is not None:
                raise self._failure
            now = time.monotonic()
            deadline = now + timeout_s if deadline is None else deadline
            with self._lock:
                if self._read_burst(lingers=now < min(self._linger_until, deadline) and not self._woken):
                    continue
            if now >= deadline or self._woken:
                self._woken = False
                return None
            self._poller.poll(math.ceil((deadline - now) * 1000))

    def put(self, event: object) -> None:
        """Let `receive` return `event`, after the messages that are there already."""
        self._inbox.append(event)
        self._signal()

    def wake(self) -> None:
        """End the wait of `receive`, or of a thread that polls `descriptors`. Safe in a signal handler."""
        self._woken = True
        self._signal()

    def _signal(self) -> None:
        self._wakeup.set()
        self._signalled = True  # in this order: a thread that sees the flag finds the descriptor readable

    def work(self, lease: str) -> bool:
        """Mark `lease` as being worked on. Returns False if it was released meanwhile."""
        with self._lock:
            return self.fence.may_work(lease, self._leases) and self._leases.work(lease)

    def rejoin(self) -> None:
        """Send `Hello` again, before any other message: the controller's view of this replica is no longer right."""
        with self._lock:
            self._request_hello()
            self._hello_seq, self._sent_at = self._seq + 1, float("-inf")
            self._send_state(time.monotonic())

    def report_progress(self, lease: str, progress: messages.LeaseProgress) -> None:
        """Report the progress of the work on `lease` in the next heartbeats, until it is answered."""
        with self._lock:
            self._leases.advance(lease, progress)

    def answer(self, lease: str, message: Up, buffers: tuple[bytes, ...] = (), *, version: int | None = None) -> None:
        """Send the result of `lease`, and resend it until the controller releases the lease.

        A result that is too large for a message is a failure of the lease. `version`: the one that the result is about,
        which heartbeats report from then on. None of them comes before the result: the controller would commit a step
        by the version alone, without its metrics.
        """
        with self._lock:
            self._state.update(version, None, None, None, time.monotonic())
            if not self._leases.answer(lease, message, buffers, time.monotonic()):
                return
            try:
                self._send(message, buffers)
            except WireError as error:
                log.warning("the result is too large", lease=lease, reason=str(error))
                failed = messages.LeaseFailed(lease=lease, status=Status.INFRA_LOST, reason=str(error))
                self._leases.answer(lease, failed, (), time.monotonic())
                self._send(failed)

    def tell(self, message: Up, buffers: tuple[bytes, ...] = ()) -> None:
        """Send a message that ends no lease, once: the controller does without it if it is lost. From any thread."""
        with self._lock:
            if self._welcomed:
                self._send(message, buffers)

    def report(
        self,
        *,
        version: int | None = None,
        gauges: dict[str, float] | None = None,
        offered: int | None = None,
        waits: tuple[messages.Wait, ...] | None = None,
    ) -> None:
        """Set the state that the next heartbeats report; what is None stays. Waits age until they are set again."""
        with self._lock:
            self._state.update(version, gauges, offered, waits, time.monotonic())

    def report_profile(self, profile: ProfileReport) -> None:
        """Report the newest profile of this process in all heartbeats to come, of which the next one is due now."""
        with self._lock:
            self._state.profile = profile
            self._sent_at = float("-inf") if self._welcomed else self._sent_at

    def close(self, reason: str) -> None:
        """Send `Leave`, flush the last messages (for at most 1 s), and end the heartbeat thread."""
        self._closing.set()
        self._is_noticed.set()
        if self._heartbeat_thread.is_alive():
            self._heartbeat_thread.join()
        with self._lock:
            if self._dealer is not None:
                self._send(messages.Leave(reason=reason))
                self._dealer.close()
                self._dealer = self._socket = None
            self._wakeup.close()

    # --- heartbeat thread ------------------------------------------------------------------------------------------

    def _run_heartbeats(self) -> None:
        try:
            self._keep_alive()
        except Exception as error:  # noqa: BLE001 - the edge of a thread: `receive` raises it
            self._failure = error
            self._signal()

    def _keep_alive(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            with self._lock:
                now = time.monotonic()
                # Read first, so that a controller that wrote while this process was stopped does not count as silent.
                # Read last too: a send may consume the change of the descriptor, which then signals nothing.
                self._read_all()
                self.fence.check(now)
                try:
                    assert self._dealer is not None
                    self._check_connection(self._dealer)
                    self._check_silence(self._dealer, now)
                except StarlingError as error:
                    self._end("the connection is over", error)
                self._send_state(now)
                self._send_again(now)
                self._read_all()
                if self._inbox:
                    self._signal()
                pause_s = max(0.001, min(LOOK_EVERY_S, self._sent_at + self._interval_s() - time.monotonic()))

    def _interval_s(self) -> float:
        return self._heartbeat_s if self._welcomed else HELLO_EVERY_S

    def _send_state(self, now: float) -> None:
        """Send a heartbeat, or `Hello` until welcomed, when it is due."""
        if now - self._sent_at < self._interval_s():
            return
        self._sent_at = now
        if self._welcomed:
            self._send(self._state.heartbeat(self._leases.held(), now))
        else:
            hello = msgspec.structs.replace(self._hello, version=self._state.version, clock_s=time.time())
            self._send(hello, self._hello_buffers)
        self.fence.sent(self._seq, now)

    def _send_again(self, now: float) -> None:
        # Only over a connection that `_check_connection` knows of: on a new one the state goes first.
        is_heard = self.connected and self._welcomed and now - self._heard_at < QUIET_S
        if is_heard and now >= self._resend_at:
            self._resend_at = now + RESEND_S / 8
            for message, buffers in self._leases.due(now):
                self._send(message, buffers)

    def _check_connection(self, dealer: Dealer) -> None:
        """Handle connection events. Raises RefusedError when the key is refused."""
        if dealer.reconnected():
            # The new connection gets the state at once. Then the controller knows of the results; or it does not know
            # this replica, and asks for a `Hello`. Either way a `Welcome` follows, and all results after it.
            self._sent_at = float("-inf")
            self._resend_all = True
            self._resend_at = time.monotonic() + RESEND_S
        problem = dealer.new_problem()
        if problem:
            log.warning("controller_unproven", text=problem)

    def _check_silence(self, dealer: Dealer, now: float) -> None:
        if self._heard:
            self._heard, self._heard_at = False, now
        limit = self._settings.connect_s if self._controller_incarnation < 0 else self._settings.silence_s
        if now - self._heard_at > limit:
            raise UnreachableError(dealer.unreachable(f"no answer for {limit:.0f} s"))

    # --- socket, with the lock held --------------------------------------------------------------------------------

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
                log.warning("the send queue is full", message=type(message).__name__)
            self._full = True

    def _read_burst(self, *, lingers: bool = False) -> bool:
        """Read up to `BURST` messages. Returns False if there is none; `lingers` waits for the first a moment.

        A replica that just got a message mostly gets another. To wait in the socket takes one call, and after a send
        it is better to wait at once: ZeroMQ's sending thread then runs on the same core.
        """
        if self._socket is None:
            return False
        num = int(lingers and self._read_one(0))
        # `is_readable` costs less than half of a failed read, but after two messages there are mostly more.
        while num < BURST and (num >= 2 or is_readable(self._socket)) and self._read_one():
            num += 1
        return num > 0

    def _read_all(self) -> None:
        while self._read_burst():
            pass

    def _read_one(self, flags: int = zmq.NOBLOCK) -> bool:
        """Read one message. Returns False if there is none."""
        assert self._socket is not None
        received = receive(self._socket, flags)
        if received is None:
            return False
        parts, _ = received
        try:
            envelope = codec.unpack_envelope(parts)
            message = codec.unpack_down(parts)
            is_ours = envelope.run == self._settings.run
            # A controller of another version refuses this replica in a message of its own version.
            if not is_ours or (envelope.protocol != PROTOCOL_VERSION and type(message) is not messages.Refused):
                raise WireError(f"protocol {envelope.protocol}, run {envelope.run}: not ours")
        except WireError as error:
            log.warning("dropped a message", reason=str(error))
            return True
        if envelope.incarnation != self._controller_incarnation and not self._accept(envelope.incarnation):
            return True
        self._heard = True
        self._linger_until = time.monotonic() + LINGER_MS / 1000
        # The answer extends the lease in any case; but a welcome to a message before `rejoin` is out of date.
        answered = self.fence.welcomed(envelope.cause, message, self._leases) if type(message) is Welcome else MAX_SEQ
        if answered >= self._hello_seq:
            self._handle(message, parts)
        return True

    def _accept(self, incarnation: int) -> bool:
        """Say whether to accept this incarnation of the controller; a newer one gets a `Hello`."""
        if incarnation < self._controller_incarnation:
            return False
        if self._controller_incarnation >= 0:
            log.info("the controller was restarted", incarnation=incarnation)
            self._request_hello()
        self._controller_incarnation = incarnation
        return True

    def _request_hello(self) -> None:
        """Send `Hello` in the heartbeat thread's next pass, and until welcomed."""
        if self._welcomed:
            self._sent_at = float("-inf")
        self._welcomed, self._resend_all = False, True

    def _handle(self, message: messages.Down, parts: list[bytes]) -> None:
        if isinstance(message, LeasedCommand):  # nearly always
            if self._leases.grant(message.lease):
                self._inbox.append(ReceivedCommand(message, tuple(parts[2:])))
            else:
                self._leases.resend(message.lease)
                self._resend_at = float("-inf")
            return
        match message:
            case messages.Welcome(heartbeat_s=heartbeat_s):
                self._heartbeat_s = heartbeat_s
                self._welcomed = True
                if self._resend_all:
                    self._resend_all = False
                    self._make_all_due()
            case messages.RequestHello():
                self._request_hello()
            case messages.Refused(reason=reason):
                self._end(reason, RefusedError(f"the controller refuses {self._settings.name}: {reason}"))
            case messages.Drain(reason=reason):
                self._end(reason, None)
            case messages.Profile():
                self._inbox.append(message)
            case messages.ReleaseLeases(leases=leases):
                cancelled = tuple(self._leases.release(leases))
                if cancelled:
                    self._inbox.append(CancelledLeases(cancelled))

    def _end(self, reason: str, error: StarlingError | None) -> None:
        self.put(LinkClosed(reason, error))
        if error is not None:
            self._closing.set()
            threading.Thread(target=self._end_if_hanging, args=(reason,), name="refused", daemon=True).start()

    def _end_if_hanging(self, reason: str) -> None:
        """End the process if its working thread computes or waits without end: others have its work."""
        if not self._is_noticed.wait(HANGING_S):
            log.error("hangs", reason=reason, limit_s=HANGING_S)
            end_process(EXIT_FAILED)

    def _make_all_due(self) -> None:
        """Make every answer that was not released due at once."""
        for held in self._leases.held():
            self._leases.resend(held.lease)
        self._resend_at = float("-inf")

"""A replica's line to the controller: a DEALER in a thread of its own.

The thread keeps the heartbeat while the working thread trains or generates for however long. It

- says `Hello` until it is welcomed, and again when the controller asks who this is,
- hands each new command to the working thread once, however often it comes,
- sends each result, and sends it again until the controller releases its lease,
- ends with one clear error when the controller refuses this replica or stays silent beyond its deadline.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from starling.common.errors import RefusedError, StarlingError, UnreachableError, WireError
from starling.common.leases import LeaseBook
from starling.common.net import curve
from starling.common.net.epoch import make_epoch
from starling.common.net.frames import receive, send
from starling.common.wire import codec, messages
from starling.common.wire.messages import PROTOCOL_VERSION, Envelope, Up, Work

log = structlog.get_logger(__name__)

HELLO_EVERY_S = 0.5
RESEND_S = 2.0


@dataclass(frozen=True)
class Command:
    """One new command for the working thread."""

    message: Work
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class GivenUp:
    """Work that nobody wants any more."""

    leases: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """The line is over: drained by the controller (`error` is None), or lost."""

    reason: str
    error: StarlingError | None = None


Inbound = Command | GivenUp | Ended


@dataclass(frozen=True)
class LinkSettings:
    """Whom to call, as whom, and how long to wait."""

    name: str
    run: str
    controller: str
    """Address of the controller, ``tcp://host:port``."""
    key: curve.KeyFile | None
    connect_s: float = 60.0
    """How long to wait for the first welcome."""
    silence_s: float = 30.0
    """How long the controller may stay silent afterwards."""


@dataclass
class _State:
    version: int = -1
    gauges: dict[str, float] = field(default_factory=dict)


class Link:
    """The line of one replica. `receive`, `answer`, `work` and `report` belong to the working thread."""

    def __init__(
        self,
        settings: LinkSettings,
        hello: messages.Hello,
        hello_buffers: tuple[bytes, ...] = (),
        inbox: queue.SimpleQueue[Any] | None = None,
    ) -> None:
        """Prepare to say `hello`. Deliveries go to `inbox`, which the owner may feed with events of its own."""
        self._settings, self._hello, self._hello_buffers = settings, hello, hello_buffers
        self._epoch, self._seq = make_epoch(), 0
        self._lock = threading.Lock()
        self._book = LeaseBook(resend_s=RESEND_S)
        self._state = _State(version=hello.version)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue() if inbox is None else inbox
        self._outbox: deque[tuple[Up, tuple[bytes, ...]]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._welcomed = threading.Event()
        self._closing = False
        self._heartbeat_s = 1.0
        self._heard_at = time.monotonic()
        self._spoken_at = float("-inf")
        self._look_at = float("-inf")  # when the book is next looked through for answers to send again
        self._notify: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self, notify: Callable[[], None] | None = None) -> None:
        """Start the thread; `notify` is called in it after each delivery to the inbox."""
        if notify is not None:
            self._notify = notify
        self._heard_at = time.monotonic()
        self._thread.start()

    def receive(self, timeout_s: float) -> Any | None:
        """Return the next `Inbound` (or what the owner put into the inbox), or None after `timeout_s`."""
        try:
            return self._inbox.get_nowait() if timeout_s <= 0 else self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def work(self, lease: str) -> bool:
        """Say that `lease` is being worked on now. Returns False when it is wanted no longer."""
        with self._lock:
            return self._book.work(lease)

    def answer(self, lease: str, message: Up, buffers: tuple[bytes, ...] = ()) -> None:
        """Send the result of `lease`, and keep sending it until the controller has it."""
        with self._lock:
            if not self._book.answer(lease, message, buffers, time.monotonic()):
                return
        self._outbox.append((message, buffers))
        self._nudge()

    def report(self, *, version: int | None = None, gauges: dict[str, float] | None = None) -> None:
        """Set what the next heartbeats say."""
        with self._lock:
            if version is not None:
                self._state.version = version
            if gauges is not None:
                self._state.gauges = gauges

    def close(self, reason: str) -> None:
        """Say `Leave`, let the last messages go out, and end the thread (at most 3 s)."""
        if self._thread.is_alive():
            # In this order: the thread ends when it is told to and has nothing left to say.
            self._outbox.append((messages.Leave(reason=reason), ()))
            self._closing = True
            self._nudge()
            self._thread.join(3.0)
        with self._lock:
            descriptor, self._wake = self._wake, -1
        if descriptor >= 0 and not self._thread.is_alive():
            os.close(descriptor)

    def _nudge(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.maxmsgsize = codec.MAX_BUFFER_BYTES
        socket.linger = 1000
        if self._settings.key is not None:
            curve.connect_with(socket, self._settings.key)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        try:
            socket.connect(self._settings.controller)
            self._serve(socket, monitor)
        except zmq.ZMQError as error:
            self._end(f"cannot use {self._settings.controller}", UnreachableError(self._unreachable(str(error))))
        except StarlingError as error:
            self._end("the line is over", error)
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close()
            context.term()

    def _serve(self, socket: zmq.Socket[Any], monitor: zmq.Socket[Any]) -> None:
        poller = zmq.Poller()
        wake = self._wake
        for source in (socket, monitor, wake):
            poller.register(source, zmq.POLLIN)
        while True:
            self._speak(socket)
            if self._closing and not self._outbox:
                return
            ready = dict(poller.poll(self._patience_ms()))
            if wake in ready:
                os.eventfd_read(wake)
            if monitor in ready:
                parse_monitor_message(monitor.recv_multipart())
                raise RefusedError(
                    f"the controller at {self._settings.controller} refuses the key of {self._settings.name}; "
                    "use the key file that was made for this name in this run"
                )
            while socket in ready and (frames := receive(socket)) is not None:
                if self._hear(frames):
                    return

    def _speak(self, socket: zmq.Socket[Any]) -> None:
        now = time.monotonic()
        self._check_silence(now)
        every = self._heartbeat_s if self._welcomed.is_set() else HELLO_EVERY_S
        if now - self._spoken_at >= every:
            self._spoken_at = now
            if self._welcomed.is_set():
                self._send(socket, self._heartbeat())
            else:
                self._send(socket, self._hello, self._hello_buffers)
        if now >= self._look_at and self._welcomed.is_set():
            self._look_at = now + RESEND_S / 8
            with self._lock:
                again = self._book.due(now)
            for message, buffers in again:
                self._send(socket, message, buffers)
        while self._outbox:
            self._send(socket, *self._outbox.popleft())

    def _heartbeat(self) -> messages.Heartbeat:
        with self._lock:
            return messages.Heartbeat(
                leases=self._book.held(), version=self._state.version, gauges=dict(self._state.gauges)
            )

    def _send(self, socket: zmq.Socket[Any], message: Up, buffers: tuple[bytes, ...] = ()) -> None:
        self._seq += 1
        envelope = Envelope(
            protocol=PROTOCOL_VERSION,
            run=self._settings.run,
            sender=self._settings.name,
            epoch=self._epoch,
            seq=self._seq,
        )
        try:
            send(socket, codec.pack(envelope, message, buffers))
        except zmq.Again:
            log.warning("the line is full", message=type(message).__name__)

    def _hear(self, frames: list[zmq.Frame]) -> bool:
        """Take in one message. Returns True when it was the last."""
        try:
            parts = [frame.bytes for frame in frames]
            envelope = codec.unpack_envelope(parts)
            if envelope.protocol != PROTOCOL_VERSION or envelope.run != self._settings.run:
                raise WireError(f"protocol {envelope.protocol}, run {envelope.run}: not ours")
            message = codec.unpack_down(parts)
        except WireError as error:
            log.warning("dropped a message", reason=str(error))
            return False
        self._heard_at = time.monotonic()
        match message:
            case messages.Welcome(heartbeat_s=heartbeat_s):
                self._heartbeat_s = heartbeat_s
                self._welcomed.set()
            case messages.Introduce():
                with self._lock:
                    self._hello = msgspec.structs.replace(self._hello, version=self._state.version)
                self._welcomed.clear()
            case messages.Refused(reason=reason):
                raise RefusedError(f"the controller refuses {self._settings.name}: {reason}")
            case messages.Drain(reason=reason):
                self._end(reason, None)
            case messages.Release(leases=leases):
                with self._lock:
                    given_up = tuple(self._book.release(leases))
                if given_up:
                    self._deliver(GivenUp(given_up))
            case _:
                self._take(message, tuple(parts[2:]))
        return False

    def _take(self, message: Work, buffers: tuple[bytes, ...]) -> None:
        with self._lock:
            new = self._book.grant(message.lease)
            if not new:
                self._book.resend(message.lease)
                self._look_at = float("-inf")
        if new:
            self._deliver(Command(message, buffers))

    def _check_silence(self, now: float) -> None:
        limit = self._settings.silence_s if self._welcomed.is_set() else self._settings.connect_s
        if now - self._heard_at > limit and not self._closing:
            raise UnreachableError(self._unreachable(f"no answer for {limit:.0f} s"))

    def _unreachable(self, why: str) -> str:
        return (
            f"the controller at {self._settings.controller} cannot be reached by {self._settings.name} ({why}); "
            "check the address, that the controller runs, and that the key file was made for this run"
        )

    def _patience_ms(self) -> int:
        every = self._heartbeat_s if self._welcomed.is_set() else HELLO_EVERY_S
        return max(1, int((self._spoken_at + every - time.monotonic()) * 1000))

    def _end(self, reason: str, error: StarlingError | None) -> None:
        self._deliver(Ended(reason, error))

    def _deliver(self, inbound: Inbound) -> None:
        self._inbox.put(inbound)
        self._notify()

"""The source's side of UCX: one thread that waits for events and serves every reader of this rank's arena.

Each connection is a generator that yields the transmission it waits for; the thread resumes it on completion. What a
connection may read is one snapshot at a time, and only after it presented that snapshot's token.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator
from typing import Any, Final

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.execute.arena import Mapping
from starling.weightsync.execute.deadline import LONGEST_WAIT_S
from starling.weightsync.execute.link import Link, Transmission
from starling.weightsync.execute.regions import Memory, as_run, check_regions, pack, payload_bytes
from starling.weightsync.execute.requests import (
    ANSWER_TAG,
    REQUEST_BYTES,
    WELCOME,
    WELCOME_TAG,
    Answer,
    Confirm,
    Open,
    Read,
    Release,
    decode_request,
    frame,
    new_request_tag,
    refusal,
)

MAX_CONNECTIONS: Final = 1024
SILENCE_S: Final = 10.0
"""How long a connection may last that has presented no token, or was refused."""

Steps = Generator[Transmission, None, None]


class _Connection:
    """One reader: what it has opened, and where it is in its exchange."""

    def __init__(self, link: Link, endpoint: Any, arena: str) -> None:
        self._link, self.endpoint = link, endpoint
        self._arena = arena
        self._lease: Mapping | None = None
        self._memory: Memory | None = None
        self._scratch: Memory = np.empty(0, np.uint8)
        self._steps = self._serve()
        self._waiting: Transmission | None = None
        self._ends = time.monotonic() + SILENCE_S

    def advance(self) -> bool:
        """Go as far as possible without waiting. Return whether the connection lives on."""
        if time.monotonic() > self._ends:
            return False
        try:
            while self._waiting is None or self._waiting.completed:
                if self._waiting is not None:
                    self._waiting.check()
                self._waiting = next(self._steps)
        except (StopIteration, WeightsError, self._link.error):
            return False
        return True

    def close(self) -> None:
        """Hang up and give the lease back."""
        self._link.hang_up(self.endpoint)
        self.endpoint = self._memory = None
        if self._lease is not None:
            self._lease.close()

    def _serve(self) -> Steps:
        tag = new_request_tag()
        yield self._send(WELCOME.pack(tag), WELCOME_TAG)
        request: Memory = np.empty(REQUEST_BYTES, np.uint8)
        while True:
            yield self._link.receive(self.endpoint, request, tag)
            try:
                payload, payload_tag = self._grant(request.data)
            except WeightsError as error:
                self._refuse()
                yield self._send(frame(refusal(str(error))), ANSWER_TAG)
                # The reader hangs up; were this side first, the reason could be lost on the way.
                yield self._link.receive(self.endpoint, request, tag)
                return
            yield self._send(frame(Answer()), ANSWER_TAG)
            if payload is not None:
                yield self._link.send(self.endpoint, payload, payload_tag)

    def _send(self, message: bytes, tag: int) -> Transmission:
        return self._link.send(self.endpoint, np.frombuffer(message, np.uint8), tag)

    def _refuse(self) -> None:
        """Hold nothing for a reader that is to leave, and do not wait for it for ever."""
        self._ends = time.monotonic() + SILENCE_S
        self._memory = None
        if self._lease is not None:
            self._lease.release()

    def _grant(self, data: memoryview) -> tuple[Memory | None, int]:
        """Carry out a request; the answer is a payload to send and its tag, if there is one."""
        request = decode_request(data)
        if isinstance(request, Open):
            if self._lease is None:
                lease = Mapping(self._arena)
                try:
                    self._memory = lease.open(request.snapshot, request.token)
                except WeightsError:
                    lease.close()
                    raise
                self._lease = lease
            else:
                self._memory = self._lease.open(request.snapshot, request.token)
            self._ends = math.inf
            return None, 0
        if self._lease is None or self._memory is None:
            raise WeightsError("Refused: open a snapshot with its token first.")
        if isinstance(request, Release):
            self._memory = None
            self._lease.release()
            return None, 0
        if not self._lease.valid():
            raise WeightsError("The snapshot was revoked while it was read: too slow; pull a newer version.")
        return (None, 0) if isinstance(request, Confirm) else self._payload(request)

    def _payload(self, request: Read) -> tuple[Memory, int]:
        assert self._memory is not None
        if not request.regions:
            raise WeightsError("Refused to read nothing.")
        check_regions(request.regions, self._memory.nbytes)
        run = as_run(self._memory, request.regions)
        if run is not None:
            return run, request.tag
        size = payload_bytes(request.regions)
        if self._scratch.nbytes < size:
            self._scratch = np.empty(size, np.uint8)
        pack(self._memory, request.regions, self._scratch)
        return self._scratch[:size], request.tag


class Server:
    """Listens on a free port and serves an arena until closed.

    The listener binds every interface whatever the host that is advertised: the token is what protects the snapshot.
    """

    def __init__(self, arena: str, *, loopback: bool) -> None:
        self._arena = arena
        self._stop = threading.Event()
        self._connections: list[_Connection] = []
        self._link = Link(loopback=loopback)
        self._listener: Any = self._link.lib.UCXListener.create(worker=self._link.worker, port=0, cb_func=self._accept)
        self.port = int(self._listener.port)
        """Where readers connect."""
        self.failure = ""
        """Why the thread ended, if it did by itself."""
        self._thread = threading.Thread(target=self._run, name="weightsync-serve", daemon=True)
        self._thread.start()

    def close(self, deadline_s: float) -> None:
        """Hang up on every reader, end the thread and free the port.

        Raises:
            WeightsError: the thread did not end within `deadline_s`.
        """
        self._stop.set()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise WeightsError(f"The serving thread did not end within {deadline_s:g} s.")

    def _accept(self, request: int) -> None:
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except self._link.error:
            return  # the reader was gone before it was accepted
        self._connections.append(_Connection(self._link, endpoint, self._arena))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._advance()
                self._link.progress(LONGEST_WAIT_S)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: publish reports it
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            self._listener = None
            for connection in self._connections:
                connection.close()
            self._connections = []
            self._link.close()

    def _advance(self) -> None:
        living = []
        for number, connection in enumerate(self._connections):
            if number < MAX_CONNECTIONS and connection.advance():
                living.append(connection)
            else:
                connection.close()
        self._connections = living

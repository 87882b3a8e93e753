"""Thread that publishes the telemetry.

libzmq handles what subscribers send in the thread that publishes. A subscriber may subscribe to any number of topics
before it is disconnected, and each byte of a topic takes memory and time: in the controller's own thread this would
stop the run for seconds.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Final

import zmq

END_S: Final = 30.0
"""How long the thread may take to end: longer than what subscribers can make of one publication."""


class SnapshotPublisher:
    """Publishes the newest snapshot; one that comes too fast is lost, as those for a slow subscriber.

    Args:
        socket: the PUB socket, which only the thread uses from the first snapshot on.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._newest: bytes | None = None
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._has_begun = False

    def publish(self, payload: bytes) -> None:
        """Publish a snapshot soon."""
        if not self._has_begun:
            self._has_begun = True
            self._thread.start()
        with self._changed:
            self._newest = payload
            self._changed.notify()

    def end(self) -> bool:
        """End the thread. Returns False if it still uses the socket, which then must not be closed."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._has_begun:
            self._thread.join(END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_closing)
                payload, self._newest = self._newest, None
            if payload is None:
                return
            with suppress(zmq.Again):
                self._socket.send(payload, zmq.NOBLOCK)

"""A controller's desk for real replica processes: it welcomes them, tells them what a test says, and hears them out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import zmq

from starling.common.wire import codec
from starling.common.wire import messages as wire

RUN = "run-1"
DEADLINE_S = 300.0
"""Longer than anything here takes on a busy machine; who waits so long has failed."""

M = TypeVar("M")
Heard = tuple[Any, tuple[bytes, ...]]


class Desk:
    """A ROUTER without keys. Everything is taken in by whoever waits for something."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind("tcp://127.0.0.1:0")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.welcome = wire.Welcome(heartbeat_s=0.05, lease_s=60.0)
        self.is_silent = False
        """It hears, and answers no heartbeat."""
        self._routes: dict[str, bytes] = {}
        self._causes: dict[str, str] = {}
        """The id of what each has said last."""
        self._heard: dict[str, deque[Heard]] = defaultdict(deque)
        self._seq = self._num_leases = 0

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def hello(self, name: str) -> Heard:
        """Wait for a `Hello`, and welcome its sender."""
        heard = self.next(name, wire.Hello)
        self.send(name, self.welcome)
        return heard

    def called(self) -> bool:
        """Say whether anybody has sent anything that was not taken in yet; who has ended sends no more."""
        return bool(self._socket.poll(0))

    def send(self, name: str, message: wire.Down, buffers: tuple[bytes, ...] = ()) -> None:
        self._seq += 1
        envelope = wire.Envelope(
            protocol=wire.PROTOCOL_VERSION,
            run=RUN,
            sender="controller",
            incarnation=1,
            seq=self._seq,
            cause=self._causes[name],
        )
        self._socket.send_multipart([self._routes[name], *codec.pack(envelope, message, buffers)])

    def lease(self, kind: str) -> str:
        self._num_leases += 1
        return f"{kind}:0:1.{self._num_leases}"

    def ask(
        self, name: str, message: Any, answer: type[M], buffers: tuple[bytes, ...] = ()
    ) -> tuple[M, tuple[bytes, ...]]:
        """Tell `name` a command, and return its answer, which must be an `answer`, with its buffers."""
        self.send(name, message, buffers)
        return self.answer(name, message.lease, answer)

    def answer(self, name: str, lease: str, kind: type[M]) -> tuple[M, tuple[bytes, ...]]:
        """Wait for the answer to `lease`, release it, and return it."""
        message, buffers = self._await(name, lambda message: getattr(message, "lease", None) == lease)
        assert isinstance(message, kind), message
        self.send(name, wire.ReleaseLeases(leases=(lease,)))
        return message, buffers

    def next(self, name: str, kind: type[M]) -> tuple[M, tuple[bytes, ...]]:
        """Return the next message of `kind` from `name`."""
        return self._await(name, lambda message: isinstance(message, kind))

    def heartbeat(self, name: str, like: Callable[[wire.Heartbeat], bool]) -> wire.Heartbeat:
        """Return the next heartbeat that is `like` what the test waits for."""
        return self._await(name, lambda message: isinstance(message, wire.Heartbeat) and like(message))[0]  # type: ignore[no-any-return]

    def _await(self, name: str, wanted: Callable[[Any], bool]) -> Any:
        """Return the first message that is wanted, and forget heartbeats that are not."""
        deadline = time.monotonic() + DEADLINE_S
        kept: deque[Heard] = deque()
        while True:
            while self._heard[name]:
                heard = self._heard[name].popleft()
                if wanted(heard[0]):
                    self._heard[name].extendleft(reversed(kept))
                    return heard
                if not isinstance(heard[0], wire.Heartbeat | wire.Hello):
                    kept.append(heard)
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{name} never said it; it said {kept}"
            if self._socket.poll(left_s * 1000):
                route, *frames = self._socket.recv_multipart()
                envelope = codec.unpack_envelope(frames)
                self._routes[envelope.sender] = route
                self._causes[envelope.sender] = f"{envelope.sender}/{envelope.incarnation}/{envelope.seq}"
                message = codec.unpack_up(frames)
                assert type(message) in wire.ALLOWED_MESSAGES[envelope.sender.partition("-")[0]]  # type: ignore[index]
                self._heard[envelope.sender].append((message, tuple(frames[2:])))
                if isinstance(message, wire.Heartbeat) and not self.is_silent:
                    self.send(envelope.sender, self.welcome)


@contextmanager
def replica(desk: Desk, name: str, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the role that `name` begins with; killed at the end if it has not ended."""
    role = name.partition("-")[0]
    module = "starling.rollout.shell.teacher" if role == "teacher" else f"starling.{role}.shell.main"
    command = [sys.executable, "-m", module, "--name", name, "--controller", desk.address]
    command += ["--dir", str(folder), "--run.id", RUN, "--network.curve", "false", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for the end of a process, and return its exit code."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert "Traceback" not in errors, errors
    return process.returncode

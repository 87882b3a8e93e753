"""Pair groups of torch.distributed: NCCL between GPUs where NCCL is what is tuned, gloo between CPUs.

Requests and answers go over a socket, as with plain TCP. The payload of a granted `ReadBoxes` is sent and received
within a process group of two ranks, source and reader, that belongs to this one connection. It is formed after the
ticket was proven and aborted with the connection; no other group is touched, and none need exist. Why pairs, and not
one group of all: docs/decisions/0007-nccl-groups-of-two.md.

Both ends must post the same operations in the same order. They do because both follow the answers: one operation for
each segment of a granted `ReadBoxes` that is not empty, none for a refused one. Lengths are not sent, they follow from
the request; gloo aborts a process that is sent more than it posted a receive for.

gloo listens on a port that knows no tickets. So nothing is sent over a group before the reader has proven in it that it
knows a secret which it was sent over the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.devices import NCCL_INTERFACE, choose_interface
from starling.weightsync.transports.endpoints import IDLE_TIMEOUT_S
from starling.weightsync.transports.messages import ANSWER_BYTES, StoreEntry, decode_store_entry
from starling.weightsync.transports.sockets.channel import Channel, ChannelStopped, framed
from starling.weightsync.transports.sockets.client import SocketClient
from starling.weightsync.transports.sockets.server import SocketServer
from starling.weightsync.transports.source import SnapshotSource

Kind = Literal["nccl", "gloo"]

SLOWEST_BYTES_PER_S: Final = 10e6
"""Lowest rate: a payload may take `IDLE_TIMEOUT_S`, and in addition its size at this rate."""
CONNECT_S: Final = 0.6
"""How long gloo tries to connect; it makes five attempts, which cannot be interrupted."""
MAX_CTAS: Final = 4
"""Maximum number of thread blocks of one group: all groups of a GPU must fit on it at once, or they could deadlock."""
MAX_ENTRIES: Final = 256
"""Maximum number of entries of a group's store; torch sets a few."""
_SOURCE, _READER = 0, 1
_SECRET: Final = "secret"
_SECRET_BYTES: Final = 32
_AT_ONCE: Final = timedelta(milliseconds=1)
_UNUSED_TAG: Final = 1

_Operation = Callable[[Any, Sequence[torch.Tensor], timedelta], None]

_environment: Final = threading.Lock()
_dist: Final[Any] = torch.distributed
"""Untyped: torch's stubs name other options than its groups have."""


def collective_server(source: SnapshotSource, kind: Kind, *, host: str) -> SocketServer:
    """Serve a source over pair groups of the calling thread's current device.

    Raises:
        WeightsError: `host` cannot be listened on, or torch has no such groups here.
    """
    return SocketServer(source, partial(_Pair, _backend(kind), _SOURCE), host=host)


def collective_client(kind: Kind) -> SocketClient:
    """Make a `TransportClient` over pair groups of the calling thread's current device.

    Raises:
        WeightsError: torch has no such groups here.
    """
    return SocketClient(kind, partial(_Pair, _backend(kind), _READER))


class _Backend(Protocol):
    """The interface that gloo and NCCL implement."""

    device: torch.device
    """Device on which payloads must lie to be sent and received."""

    def form(self, store: _ChannelStore, rank: int, host: str) -> Any:
        """Form a group of two; `host` is this end's address of the connection to the other rank."""

    def send(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Send blocks to the other rank. Raises RuntimeError when that breaks, is aborted, or takes too long."""

    def receive(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Fill blocks with the payload of the other rank. Raises as `send` does; NCCL may return when it is aborted."""

    def abort(self, group: Any) -> None:
        """End every wait in a group; after it returns no payload is read or written. Thread-safe."""

    def isolated(self) -> contextlib.AbstractContextManager[Any]:
        """Isolate the context's operations on the device from those of other threads."""


class _Gloo:
    """Groups over TCP between CPUs, each with a listener and a thread of its own at either end.

    When a connection breaks or is closed, gloo wakes a wait for the beginning of a message, but not a wait for the rest
    of one. So a payload is never waited for itself: its receiver waits for an empty message that follows it, and its
    sender waits for another one in return.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        if not _dist.is_gloo_available():
            raise WeightsError("Transport 'gloo' needs a torch that has gloo: choose 'tcp' or 'ucx'.")

    def form(self, store: _ChannelStore, rank: int, host: str) -> Any:
        """See `_Backend.form`."""
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._threads = 0  # they would run collectives, which are not used
        options._timeout = timedelta(seconds=CONNECT_S)
        return _dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """See `_Backend.send`."""
        other = _other(group)
        acknowledged = group.recv([_nothing()], other, 0)
        works = [group.send([block], other, 0) for block in (*blocks, _nothing())]
        acknowledged.wait(timeout)
        for work in works:
            work.wait(timeout)  # has ended: it was acknowledged

    def receive(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """See `_Backend.receive`."""
        other = _other(group)
        works = [group.recv([block], other, 0) for block in (*blocks, _nothing())]
        for work in reversed(works):  # the last one completes after all others
            work.wait(timeout)
        group.send([_nothing()], other, 0).wait(timeout)

    def abort(self, group: Any) -> None:
        """See `_Backend.abort`: gloo's own does not end waits; a wait that times out closes all connections."""
        with contextlib.suppress(RuntimeError):
            group.recv([_nothing()], _other(group), _UNUSED_TAG).wait(_AT_ONCE)

    def isolated(self) -> contextlib.AbstractContextManager[Any]:
        """See `_Backend.isolated`."""
        return contextlib.nullcontext()


class _Nccl:
    """Groups over whatever NCCL finds between GPUs."""

    def __init__(self) -> None:
        if not (torch.cuda.is_available() and _dist.is_nccl_available()):
            raise WeightsError("Transport 'nccl' needs CUDA, and there is none here: choose 'gloo', 'tcp' or 'ucx'.")
        self.device = torch.device("cuda", torch.cuda.current_device())

    def form(self, store: _ChannelStore, rank: int, host: str) -> Any:
        """See `_Backend.form`. The communicator is created by the first operation, which listens at a port, too."""
        choose_interface(host, NCCL_INTERFACE)
        options = _dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # else nothing could end the wait for a missing peer
        options.config.max_ctas = MAX_CTAS
        with _surviving_peers():
            return _dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """See `_Backend.send`."""
        self._move(group, group.send, blocks, timeout)

    def receive(self, group: Any, blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """See `_Backend.receive`."""
        self._move(group, group.recv, blocks, timeout)

    def abort(self, group: Any) -> None:
        """See `_Backend.abort`."""
        group.abort()

    def isolated(self) -> contextlib.AbstractContextManager[Any]:
        """See `_Backend.isolated`: on the default stream, transfers and the engine would wait for each other."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(stream)

    @staticmethod
    def _move(group: Any, operation: Callable[..., Any], blocks: Sequence[torch.Tensor], timeout: timedelta) -> None:
        """Post all operations as one, and wait for it."""
        group._start_coalescing()
        for block in blocks:
            operation([block], _other(group), 0)
        group._end_coalescing().wait(timeout)


def _backend(kind: Kind) -> _Backend:
    return _Nccl() if kind == "nccl" else _Gloo()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _other(group: Any) -> int:
    return 1 - int(group.rank())


@contextlib.contextmanager
def _surviving_peers() -> Iterator[None]:
    """Make groups that are formed in the context abort when a peer dies, where torch's default ends the process."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _environment:
        before = os.environ.get(name)
        os.environ[name] = "2"  # CleanUpOnly; read when a group is formed, and only from the environment
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


class _ChannelStore(_dist.Store):  # type: ignore[misc]
    """A key-value store of two processes, over the channel that they already have.

    There is no server, no port and nothing to clean up. `detach` ends it; entries that torch sets later are not sent.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._entries: dict[str, bytes] = {}
        self._detached = False

    def set(self, key: str, value: bytes) -> None:
        """Set an entry at both ends."""
        self._entries[key] = bytes(value)
        if not self._detached:
            self._channel.send([framed(StoreEntry(key=key, value=bytes(value)))])

    def get(self, key: str) -> bytes:
        """Return the value that either end has set, waiting for it. Raises ChannelStopped, OSError, WeightsError."""
        end = time.monotonic() + IDLE_TIMEOUT_S
        while key not in self._entries:
            if self._detached:
                raise WeightsError(f"The peer has ended the store without setting {key!r}.")
            self._receive_entry(end)
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are set."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether keys are known to be set."""
        return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        """Return False: the extended methods of a store are missing."""
        return False

    def detach(self) -> None:
        """Wait until both ends have detached: the channel is free for requests again."""
        self._channel.send([framed(StoreEntry(key="", value=b""))])
        end = time.monotonic() + IDLE_TIMEOUT_S
        while not self._detached:
            self._receive_entry(end)

    def _receive_entry(self, end: float) -> None:
        if len(self._entries) > MAX_ENTRIES:
            raise WeightsError(f"A peer has set more than {MAX_ENTRIES} entries of the store.")
        entry = decode_store_entry(self._channel.receive_message(ANSWER_BYTES, end))
        self._entries[entry.key] = entry.value
        self._detached = not entry.key


class _Pair:
    """A `PayloadCarrier` over a group of two."""

    def __init__(self, backend: _Backend, rank: int, channel: Channel) -> None:
        self._backend, self._rank, self._channel = backend, rank, channel
        self._lock = threading.Lock()
        self._closed = False
        self._group: Any = None
        self._store: _ChannelStore | None = None  # the group uses it, but holds no reference

    def opened(self) -> None:
        """See `PayloadCarrier.opened`: form the group, once for all snapshots that are opened."""
        if self._group is not None:
            return
        store = self._store = _ChannelStore(self._channel)
        with self._working("form a group"):
            group = self._backend.form(store, self._rank, self._channel.host)
        with self._lock:
            self._group = group
            if self._closed:
                self._backend.abort(group)
        # NCCL connects in the first operation, and has no deadline for that.
        timer = threading.Timer(IDLE_TIMEOUT_S, self.close)
        timer.start()
        try:
            self._authenticate(store)
        finally:
            timer.cancel()
        store.detach()

    def send(self, answer: memoryview, segments: Sequence[Memory]) -> None:
        """See `PayloadCarrier.send`."""
        self._channel.send([answer])
        with self._working("send a payload"):
            self._move(self._backend.send, [_tensor(each).to(self._backend.device) for each in segments if each.nbytes])

    def receive(self, buffers: Sequence[Memory]) -> None:
        """See `PayloadCarrier.receive`."""
        device = self._backend.device
        wanted = [_tensor(each) for each in buffers if each.nbytes]
        with self._working("receive a payload"):
            arrived = [each if each.device == device else torch.empty_like(each, device=device) for each in wanted]
            self._move(self._backend.receive, arrived)
            for here, there in zip(wanted, arrived, strict=True):
                if there is not here:
                    here.copy_(there)

    def close(self) -> None:
        """See `PayloadCarrier.close`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                if self._group is not None:
                    self._backend.abort(self._group)

    def _authenticate(self, store: _ChannelStore) -> None:
        """Verify that the other rank of the group is the peer of the channel."""
        if self._rank == _READER:
            shown = bytearray(store.get(_SECRET))
            self._exchange(self._backend.send, shown)
            return
        secret, shown = secrets.token_bytes(_SECRET_BYTES), bytearray(_SECRET_BYTES)
        store.set(_SECRET, secret)
        self._exchange(self._backend.receive, shown)
        if not hmac.compare_digest(shown, secret):
            raise WeightsError("Another process has joined the group of a reader.")

    def _exchange(self, operation: _Operation, block: bytearray) -> None:
        here = torch.frombuffer(block, dtype=torch.uint8)
        with self._working("authenticate"):
            there = here.to(self._backend.device)
            self._move(operation, [there])
            if there is not here:
                here.copy_(there)

    def _move(self, operation: _Operation, blocks: Sequence[torch.Tensor]) -> None:
        """Send or receive blocks, and wait until all are transferred. Raises RuntimeError when they are not."""
        if not blocks:
            return
        timeout = timedelta(seconds=IDLE_TIMEOUT_S + sum(block.nbytes for block in blocks) / SLOWEST_BYTES_PER_S)
        operation(self._group, blocks, timeout)
        if self._closed:
            raise RuntimeError("the group was aborted")

    @contextlib.contextmanager
    def _working(self, doing: str) -> Iterator[None]:
        """Isolate work on the device; turn torch's errors into ChannelStopped or ConnectionError."""
        try:
            with self._backend.isolated():
                yield
        except RuntimeError as error:
            if self._channel.stop.is_set():
                raise ChannelStopped from error
            raise ConnectionError(f"could not {doing}: {str(error).splitlines()[0]}") from error


def _tensor(memory: Memory) -> torch.Tensor:
    """View flat memory as a tensor, which keeps it alive.

    A snapshot is mapped read-only; torch knows no such memory and would warn, though nothing here writes to it.
    """
    block = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ctypes.data)
    block.owner = memory  # type: ignore[attr-defined]
    return torch.frombuffer(block, dtype=torch.uint8)

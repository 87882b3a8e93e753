"""UCX through UCXX's low-level API: one context and worker, driven by the thread that owns them.

Options, all measured: error handling on (else a dead peer aborts the survivor), which with UCX's defaults means slow
TCP even on one host, so the kernel's copy between processes (CMA) is allowed under error handling by an opt-in; larger
TCP segments. Messages go over TCP on one host too, never through UCX's queues in shared memory (posix, sysv): a peer
that is killed between taking a place in such a queue and filling it stops the queue for everybody, for good.
UCX notices a dead peer but never a stopped one or a cut network: that is what deadlines and the forced close are for.
A request does not keep its buffer alive, and dropping a request does not stop it: `UcxWorker` holds both until
completion.
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import select
import time
from typing import Any, Final

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.deadline import LONGEST_WAIT_S
from starling.weightsync.transports.versions import Supported

OPTIONS: Final = {
    "TLS": "tcp,cma",
    "CMA_MEMORY_INVALIDATE": "y",
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    "KEEPALIVE_INTERVAL": "1s",
}
"""What is not set in the environment, there with ``UCX_`` before it. ``UCX_TLS`` is how RDMA is chosen, where the UCX
that is installed has it."""
REQUIRED: Final = {"RCACHE_ENABLE": "y"}
"""What nobody may choose otherwise. Without the cache of registrations UCX before 1.22 follows a null pointer when a
peer dies in mid-read (openucx/ucx#11467). Where its hooks into memory fail it goes without, and says nothing, unless
it is told that it must not; and that they fail, on a busy machine, was seen once in thousands of starts."""
_STARTS: Final = 3
_PAUSE_S: Final = 0.1
"""Between attempts to start."""
SUPPORTED: Final = Supported("UCXX", (0, 52), (0, 53), "ucx")
_FORCE_NS: Final = 10**9
"""Period of a blocking close that amounts to a forced one: pending requests are cancelled at once."""
_DRAIN_S: Final = 1.0

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def load_ucxx() -> tuple[Any, Any]:
    """Import UCXX's low-level module and its `Array`.

    Raises:
        WeightsError: UCXX is not installed, cannot be loaded, or is of another version.
    """
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # UCXX itself sets variables that this UCX does not use
    try:
        import ucxx._lib.libucxx as lib
        from ucxx import __version__ as version
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise WeightsError(
            f"UCX is not available ({error}): install starling-weightsync[ucx] or choose transport 'tcp' or 'local'."
        ) from error
    SUPPORTED.check(version)
    return lib, Array


def has_ucx() -> bool:
    """Whether UCX can be used here."""
    try:
        load_ucxx()
    except WeightsError:
        return False
    return True


class UcxRequest:
    """One request under way, with the memory it uses."""

    def __init__(self, request: Any, memory: object) -> None:
        self.request, self._memory = request, memory

    @property
    def completed(self) -> bool:
        """Whether UCX is done with the memory."""
        return bool(self.request.completed)

    def check(self) -> None:
        """Raise what the request failed with, if it did (an error of UCXX)."""
        self.request.check_error()


class UcxWorker:
    """A UCX context with one worker. Owned by one thread at a time; only `wake` may be called by others.

    `loopback` keeps off the network devices.
    """

    def __init__(self, *, loopback: bool) -> None:
        self.lib, self._array = load_ucxx()
        self.error: type[Exception] = self.lib.UCXError
        """What UCXX raises."""
        options = {
            **OPTIONS,
            **({"NET_DEVICES": "lo"} if loopback else {}),
        }
        options = {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}
        try:
            self._context = self._start({**options, **REQUIRED})
            self.worker = self.lib.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
        except self.error as error:
            raise WeightsError(f"UCX cannot start here ({error}); choose transport 'tcp' or 'local'.") from error
        self._process = os.getpid()
        self._pending: list[UcxRequest] = []
        self._from_anybody: list[UcxRequest] = []
        self._wakeup = Wakeup()
        self._poller = select.poll()
        self._poller.register(self.worker.epoll_file_descriptor, select.POLLIN)
        self._poller.register(self._wakeup, select.POLLIN)

    def _start(self, options: dict[str, str], attempts: int = _STARTS) -> Any:
        feature = self.lib.Feature
        try:
            return self.lib.UCXContext(options, feature_flags=(feature.TAG, feature.WAKEUP))
        except self.error as error:
            if attempts == 1:
                raise
            log.warning("UCX did not start (%s): trying again", error)
        time.sleep(_PAUSE_S)
        return self._start(options, attempts - 1)

    def progress(self, wait_s: float) -> bool:
        """Let UCX work, waiting for an event or a `wake` for at most `wait_s`. Releases the interpreter lock.

        Returns True when there was a `wake` since the last call: who has nothing to do then must not wait again.
        """
        if os.getpid() != self._process:
            raise WeightsError("UCX was started before this process was forked; start processes by 'spawn'.")
        self.worker.progress()
        # What has been completed just now makes no event any more: whoever waited for one would wait in vain.
        waits = wait_s > 0 and not any(item.completed for item in (*self._pending, *self._from_anybody))
        if waits and self.worker.arm():
            self._poller.poll(wait_s * 1000)
            self.worker.progress()
        self._pending = [item for item in self._pending if not item.completed]
        self._from_anybody = [item for item in self._from_anybody if not item.completed]
        return self._wakeup.clear()

    def wake(self) -> None:
        """Let a `progress` that waits return. Who calls it may come late: after `close` there is none."""
        self._wakeup.set()

    def send(self, endpoint: Any, memory: Memory, tag: int) -> UcxRequest:
        """Send `memory` with `tag`; it must not change before completion."""
        array = self._array(_flat(memory))
        return self._keep(endpoint.tag_send(array, self.lib.UCXXTag(tag)), (array, memory))

    def receive(self, endpoint: Any, memory: Memory, tag: int) -> UcxRequest:
        """Fill `memory` with what arrives under `tag`. Posted on the endpoint, so that its death ends the wait."""
        if not memory.flags.writeable:
            raise WeightsError("Memory that cannot be written was given to receive into.")
        array = self._array(_flat(memory))
        return self._keep(endpoint.tag_recv(array, self.lib.UCXXTag(tag)), (array, memory))

    def check_alive(self, endpoint: Any) -> None:
        """Raise an error of UCXX when the peer is known to be gone."""
        if not endpoint.alive:
            endpoint.raise_on_error()
            raise self.lib.UCXConnectionResetError("the peer closed the connection")

    def receive_any(self, memory: Memory, tag: int) -> UcxRequest:
        """Fill `memory` with what arrives under `tag` from anybody. It waits until the link is closed."""
        array = self._array(_flat(memory))
        item = UcxRequest(self.worker.tag_recv(array, self.lib.UCXXTag(tag)), (array, memory))
        self._from_anybody.append(item)
        return item

    def lanes(self, endpoint: Any) -> tuple[str, ...]:
        """Return the transports that UCX really uses for an endpoint, such as ``tcp/lo`` and ``cma/memory``."""
        return lanes_of(int(endpoint.handle))

    def _keep(self, request: Any, memory: object) -> UcxRequest:
        item = UcxRequest(request, memory)
        self._pending.append(item)
        return item

    def hang_up(self, endpoint: Any) -> None:
        """Close an endpoint by force: whatever is pending on it fails now."""
        try:
            endpoint.close_blocking(period=_FORCE_NS)
        except self.error:
            pass  # it was broken already, which is as good

    def close(self) -> None:
        """Free worker and context. Endpoints must have been hung up, and listeners be gone."""
        end = time.monotonic() + _DRAIN_S
        while self._pending and time.monotonic() < end:
            self.progress(LONGEST_WAIT_S)
        last, self._pending = (
            self._pending + self._from_anybody,
            [],
        )  # were UCX still at work, the memory would have to outlive the worker
        self._from_anybody = []
        self.worker = self._context = None
        self._wakeup.close()
        del last


def _flat(memory: Memory) -> Memory:
    """Return `memory` if UCX may have it: UCXX would take other memory without a word, and use it wrongly."""
    if memory.dtype != "u1" or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise WeightsError(f"UCX moves flat bytes, not {memory.dtype} {memory.shape} with strides {memory.strides}.")
    return memory


class _Entry(ctypes.Structure):
    _fields_ = (("transport", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _Attributes(ctypes.Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_address", ctypes.c_char * 128),
        ("remote_address", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_Entry)),
        ("num_entries", ctypes.c_uint32),
        ("entry_bytes", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    )


_TRANSPORTS: Final = 1 << 3
_MAX_LANES: Final = 16


def lanes_of(endpoint: int) -> tuple[str, ...]:
    """Ask UCX which transports and devices an endpoint uses; empty when it will not say."""
    entries = (_Entry * _MAX_LANES)()
    asked = _Attributes(
        field_mask=_TRANSPORTS, entries=entries, num_entries=_MAX_LANES, entry_bytes=ctypes.sizeof(_Entry)
    )
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    query.restype = ctypes.c_int8
    if query(endpoint, ctypes.byref(asked)) != 0:
        return ()
    found = (entries[index] for index in range(min(int(asked.num_entries), _MAX_LANES)))
    return tuple(sorted({f"{entry.transport.decode()}/{entry.device.decode()}" for entry in found}))

"""UCX worker: one UCX context and worker through UCXX's low-level API, driven by the thread that owns them.

RDMA is used between hosts where this UCX has it and the host has a device; UCX then prefers it to TCP.

Options, all measured: error handling on (else a dead peer aborts the survivor), which with UCX's defaults means slow
TCP even on one host, so the kernel's copy between processes (CMA) is allowed under error handling by an opt-in; larger
TCP segments. Messages go over TCP on one host too, never through UCX's queues in shared memory (posix, sysv): a peer
that is killed between reserving an entry of such a queue and filling it blocks the queue for all others, permanently.
UCX notices a dead peer but never a stopped one or a cut network: deadlines and the forced close handle those. A request
does not keep its buffer alive, and dropping a request does not stop it: `UcxWorker` holds both until completion.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import select
import time
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from starling.common.errors import WeightsError
from starling.common.wakeup import Wakeup
from starling.weightsync.transports.devices import net_devices
from starling.weightsync.transports.endpoints import LONGEST_WAIT_S, is_loopback
from starling.weightsync.transports.ucx.device import CUDA, exposed, memory_kinds, register, unregister
from starling.weightsync.transports.versions import SupportedVersions

OPTIONS: Final = {
    "TLS": "tcp,cma",
    "CMA_MEMORY_INVALIDATE": "y",
    "TCP_TX_SEG_SIZE": "1m",
    "TCP_RX_SEG_SIZE": "1m",
    "KEEPALIVE_INTERVAL": "1s",
}
"""Defaults: a variable of the environment, with the prefix ``UCX_``, takes precedence."""
_RDMA_LANES: Final = "ib"
"""UCX's name for all transports over InfiniBand, RoCE and EFA, and for the component that has them."""
_CUDA_COPIES: Final = "cuda_cpy"
"""UCX's name for the component that copies from and to memory of GPUs; it has a device where there is one."""
REQUIRED: Final = {"RCACHE_ENABLE": "y"}
"""Options that the environment cannot override. Without the registration cache UCX before 1.22 dereferences a null
pointer when a peer dies in mid-read (openucx/ucx#11467). Unless the cache is required, UCX silently does without it
when its memory hooks fail, which was seen once in thousands of starts, on a busy machine."""
_STARTS: Final = 3
_PAUSE_S: Final = 0.1
"""Between attempts to start."""
UNUSED_VARIABLES: Final = "UCX_WARN_UNUSED_ENV_VARS", "n"
"""UCXX itself sets variables that this UCX does not use."""
BASIC_LIBRARY: Final = "libucs.so.0"
LOADER_CACHE: Final = Path("/etc/ld.so.cache")
"""Names of the libraries in the loader's folders."""
SUPPORTED: Final = SupportedVersions("UCXX", (0, 52), (0, 53), "ucx")
_FORCE_NS: Final = 10**9
"""Period of a blocking close that amounts to a forced one: pending requests are cancelled at once."""
_DRAIN_S: Final = 1.0

log = logging.getLogger(__name__)


def load_library() -> None:
    """Load the basic library of the packaged UCX with the interpreter lock released, for forks to inherit.

    While it is loaded it measures the processor's clock, unless the processor's name has it, for 0.4 s; the import of
    `load_ucxx` would keep the lock meanwhile. Does nothing where the package is missing, or where the host has another
    UCX: what needs that one, as plugins of NCCL, would get a mixture of both.
    """
    os.environ.setdefault(*UNUSED_VARIABLES)  # it is read now
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None or _host_has_library():
        return
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    load(os.fsencode(Path(spec.origin).with_name("lib") / "libucs.so"), os.RTLD_NOW | os.RTLD_LOCAL)


def _host_has_library() -> bool:
    """Return whether the loader would find a UCX beside the packaged one, or is asked to prefer that."""
    if os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false":
        return True
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any((Path(folder) / BASIC_LIBRARY).exists() for folder in folders):
        return True
    try:
        return BASIC_LIBRARY.encode() in LOADER_CACHE.read_bytes()
    except OSError:
        return False


def load_ucxx() -> tuple[Any, Any]:
    """Import UCXX's low-level module and its `Array`.

    Raises:
        WeightsError: UCXX is not installed, cannot be loaded, or is of another version.
    """
    os.environ.setdefault(*UNUSED_VARIABLES)
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
    """Return whether UCX is available here."""
    try:
        load_ucxx()
    except WeightsError:
        return False
    return True


def options_for(host: str) -> dict[str, str]:
    """Return the options of a worker that uses the devices of the address `host` only."""
    options = dict(OPTIONS)
    rdma = not is_loopback(host) and has_rdma()
    devices = net_devices(host, rdma=rdma)
    if devices is not None:
        options["NET_DEVICES"] = devices
    if rdma:
        options["TLS"] += f",{_RDMA_LANES}"
    if components().get(_CUDA_COPIES, 0) > 0:
        options["TLS"] += f",{CUDA}"
    return {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}


@cache
def has_rdma() -> bool:
    """Return whether UCX is available here with RDMA, and has found a device for it."""
    return has_ucx() and components().get(_RDMA_LANES, 0) > 0


class UcxRequest:
    """One UCX operation in progress, with the memory that it uses."""

    def __init__(self, request: Any, memory: object) -> None:
        self.request, self._memory = request, memory

    @property
    def completed(self) -> bool:
        """Whether UCX no longer uses the memory."""
        return bool(self.request.completed)

    def check(self) -> None:
        """Raise the operation's error (one of UCXX's), if it failed."""
        self.request.check_error()


class Pollable(Protocol):
    """A socket that a worker waits for in addition to UCX."""

    @property
    def events(self) -> int:
        """The poll events to wait for."""

    def fileno(self) -> int:
        """The descriptor."""


class UcxWorker:
    """A UCX context with one worker. Owned by one thread at a time; only `wake` may be called by others.

    UCX uses the devices of the address `host` only: its own, or that of the source.
    """

    def __init__(self, *, host: str) -> None:
        self.lib, self._array = load_ucxx()
        self.error: type[Exception] = self.lib.UCXError
        """Base class of UCXX's exceptions."""
        try:
            self._context = self._start({**options_for(host), **REQUIRED})
            self.worker = self.lib.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
        except self.error as error:
            raise WeightsError(f"UCX cannot start here ({error}); choose transport 'tcp' or 'local'.") from error
        self.kinds = memory_kinds(int(self._context.handle))
        """Kinds of memory that it can send and receive."""
        self._registered: dict[int, tuple[Any, int]] = {}
        """Memory that is registered, by its identity, and its registration; 0 for one that cannot be."""
        self._process = os.getpid()
        self._pending: list[UcxRequest] = []
        self._wakeup = Wakeup()
        self._sockets: set[Pollable] = set()
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
            log.warning("UCX did not start (%s): retrying", error)
        time.sleep(_PAUSE_S)
        return self._start(options, attempts - 1)

    def progress(self, wait_s: float) -> bool:
        """Drive UCX, waiting for an event, a socket or a `wake` for at most `wait_s`. Releases the interpreter lock.

        Returns True when there was a `wake` since the last call: the caller must then check its work before it waits.
        """
        if os.getpid() != self._process:
            raise WeightsError("UCX was started before this process was forked; start processes by 'spawn'.")
        self.worker.progress()
        # An operation that has completed just now raises no further event: do not wait for one.
        waits = wait_s > 0 and not any(item.completed for item in self._pending)
        if waits and self.worker.arm():
            for each in self._sockets:
                self._poller.register(each, each.events)
            self._poller.poll(wait_s * 1000)
            self.worker.progress()
        self._pending = [item for item in self._pending if not item.completed]
        return self._wakeup.clear()

    def watch(self, connection: Pollable) -> None:
        """Let `progress` return when a socket is ready, too."""
        self._sockets.add(connection)

    def unwatch(self, connection: Pollable) -> None:
        """Forget a socket, before it is closed; unknown ones are ignored."""
        if connection in self._sockets:
            self._sockets.remove(connection)
            with contextlib.suppress(KeyError):  # not waited for yet
                self._poller.unregister(connection)

    @property
    def address(self) -> bytes:
        """Address by which another worker reaches this one, in UCX's own form."""
        return bytes(memoryview(self.lib.UCXAddress.create_from_worker(self.worker)))

    def connect(self, address: bytes) -> Any:
        """Return an endpoint to the worker of that address, which must do the same. An unreachable one fails later.

        Raises:
            WeightsError: UCX cannot make one, for example because the workers have no transport in common.
        """
        try:
            remote = self.lib.UCXAddress.create_from_buffer(address)
            return self.lib.UCXEndpoint.create_from_worker_address(self.worker, remote, True)
        except self.error as error:
            raise WeightsError(f"UCX cannot connect: {error}.") from error

    def wake(self) -> None:
        """Make a waiting `progress` return. Thread-safe; does nothing after `close`."""
        self._wakeup.set()

    def register(self, memory: Any, flat: Any, kind: str) -> None:
        """Register the memory of a device, once for as long as the worker lives.

        Args:
            memory: what `flat` is of.
            flat: its bytes, opened.
            kind: one of `kinds`.
        """
        if id(memory) in self._registered:
            return
        mapped = 0
        try:
            mapped = register(int(self._context.handle), flat, kind)
        except WeightsError as error:
            log.warning("each message registers the memory of a snapshot anew: %s", error)
        self._registered[id(memory)] = memory, mapped

    def send(self, endpoint: Any, memory: Any, tag: int) -> UcxRequest:
        """Send `memory`, flat bytes of the host or of a device, with `tag`; it must not change before completion."""
        array = self._array(exposed(memory))
        return self._keep(endpoint.tag_send(array, self.lib.UCXXTag(tag)), (array, memory))

    def receive(self, endpoint: Any, memory: Any, tag: int) -> UcxRequest:
        """Fill `memory`, flat bytes of the host or of a device, with the message of `tag`.

        Posted on the endpoint, so that its failure ends the wait.
        """
        flat = exposed(memory)
        if isinstance(flat, np.ndarray) and not flat.flags.writeable:
            raise WeightsError("Cannot receive into read-only memory.")
        array = self._array(flat)
        return self._keep(endpoint.tag_recv(array, self.lib.UCXXTag(tag)), (array, memory))

    def check_alive(self, endpoint: Any) -> None:
        """Raise an error of UCXX when the peer is known to be gone."""
        if not endpoint.alive:
            endpoint.raise_on_error()
            raise self.lib.UCXConnectionResetError("the peer closed the connection")

    def lanes(self, endpoint: Any) -> tuple[str, ...]:
        """Return the transports that UCX really uses for an endpoint, such as ``tcp/lo`` and ``cma/memory``."""
        return lanes_of(int(endpoint.handle))

    def _keep(self, request: Any, memory: object) -> UcxRequest:
        item = UcxRequest(request, memory)
        self._pending.append(item)
        return item

    def hang_up(self, endpoint: Any) -> None:
        """Close an endpoint by force: all operations pending on it fail now."""
        try:
            endpoint.close_blocking(period=_FORCE_NS)
        except self.error:
            pass  # it was broken already

    def close(self) -> None:
        """Free worker and context. Endpoints must be closed."""
        end = time.monotonic() + _DRAIN_S
        while self._pending and time.monotonic() < end:
            self.progress(LONGEST_WAIT_S)
        # If UCX still works on these, their memory must outlive the worker.
        last, self._pending = self._pending, []
        for _, mapped in self._registered.values():
            if mapped:
                unregister(int(self._context.handle), mapped)
        self._registered = {}
        self.worker = self._context = None
        self._wakeup.close()
        del last


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
    """Query the transports and devices that an endpoint uses; empty when UCX cannot answer."""
    entries = (_Entry * _MAX_LANES)()
    attributes = _Attributes(
        field_mask=_TRANSPORTS, entries=entries, num_entries=_MAX_LANES, entry_bytes=ctypes.sizeof(_Entry)
    )
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Attributes))
    query.restype = ctypes.c_int8
    if query(endpoint, ctypes.byref(attributes)) != 0:
        return ()
    used = (entries[index] for index in range(min(int(attributes.num_entries), _MAX_LANES)))
    return tuple(sorted({f"{entry.transport.decode()}/{entry.device.decode()}" for entry in used}))


class _Component(ctypes.Structure):
    """The beginning of ``uct_component_attr_t``."""

    _fields_ = (("field_mask", ctypes.c_uint64), ("name", ctypes.c_char * 16), ("num_devices", ctypes.c_uint))


_NAME_AND_DEVICES: Final = 0b11


def components(library: str = "libuct.so.0") -> dict[str, int]:
    """Return how many devices each component of a UCX has found; empty when UCX cannot answer.

    Args:
        library: its file, or the name of one that is loaded.
    """
    try:
        uct = ctypes.CDLL(library)
        query, describe, release = (
            uct.uct_query_components,
            uct.uct_component_query,
            uct.uct_release_component_list,
        )
    except (OSError, AttributeError):
        return {}
    query.argtypes = (ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)), ctypes.POINTER(ctypes.c_uint))
    describe.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Component))
    release.argtypes = (ctypes.POINTER(ctypes.c_void_p),)
    query.restype = describe.restype = ctypes.c_int8
    release.restype = None
    listed, num = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    if query(ctypes.byref(listed), ctypes.byref(num)) != 0:
        return {}
    found: dict[str, int] = {}
    for index in range(num.value):
        component = _Component(field_mask=_NAME_AND_DEVICES)
        if describe(listed[index], ctypes.byref(component)) == 0:
            found[component.name.decode("ascii", "replace")] = int(component.num_devices)
    release(listed)
    return found

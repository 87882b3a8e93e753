"""NIXL agent: one agent with UCX below it, driven by the thread that owns it, and its registered memory.

Measured, and the reasons for this design:

- NIXL offers nothing to wait on, and its own progress thread spins, which delays everything else where cores are few.
  So it stays off, and the reader polls its reads. The source must drive NIXL too: where UCX has no memory access in
  hardware, the source's own processor answers the read.
- Releasing a read, or removing the peer, does not stop the read: a source that was stopped continues to fill memory
  minutes later. Only closing the agent does.
- Removing a peer leaves its connection open at both ends, and adding it again opens another one. So no peer is removed;
  UCX frees those that have ended when it is driven.
- Two copies of UCX cannot both hook the process's memory calls: with NIXL's loaded, UCXX's would lose its registration
  cache, and crash when it closes a connection with sends under way. So NIXL's copy hooks nothing.
- UCXX sets a threshold for the whole process, and its children, with which reads within one host go over TCP, at a
  tenth of the rate. It is hidden from NIXL.
- Memory that is registered within memory that is registered hides the outer one. So memory of our own mappings
  (staging, buffer pools) is registered whole, once, for as long as it lives; any other just for a read, exactly.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import mmap
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_handles import location_of
from starling.weightsync.transports.devices import net_devices
from starling.weightsync.transports.nixl.protocol import HOST
from starling.weightsync.transports.versions import SupportedVersions

SUPPORTED: Final = SupportedVersions("NIXL", (1, 5), (1, 6), "nixl")
OPTIONS: Final = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
"""Defaults for NIXL's own UCX: a variable of the environment, with the prefix ``UCX_``, takes precedence."""
TICK_S: Final = 0.0002
"""First interval at which reads under way are polled."""
LONGEST_TICK_S: Final = 0.002
"""Longest such interval: each poll doubles it. A socket's buffer lasts as long at gigabytes per second."""
_BACKEND: Final = "UCX"
_HOOKS: Final = "UCX_MEM_MMAP_HOOK_MODE"
_THRESHOLD: Final = "UCX_RNDV_THRESH"
_UCXX_THRESHOLD: Final = "8192"
_environment_lock: Final = threading.Lock()


def load_nixl() -> Any:
    """Import NIXL's Python interface.

    Raises:
        WeightsError: NIXL is not installed, cannot be loaded, or is of another version.
    """
    first, raises = "nixl" not in sys.modules, logging.raiseExceptions
    try:
        from nixl import _api as api

        version = importlib.metadata.version("nixl")
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise WeightsError(
            f"NIXL is not available ({error}): run pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 "
            "(nixl-cu12 with a torch for CUDA 12), or choose transport 'ucx', 'tcp' or 'local'."
        ) from error
    SUPPORTED.check(version)
    if first:  # its import sets up logging for the whole process, to stdout, from INFO upwards
        logging.raiseExceptions = raises
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        if "NIXL_LOG_LEVEL" not in os.environ:
            logger.setLevel(logging.WARNING)
    return api


def has_nixl() -> bool:
    """Return whether NIXL is available here."""
    try:
        load_nixl()
    except WeightsError:
        return False
    return True


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Change the environment while NIXL's UCX reads it: no memory hooks, and without the threshold that UCXX sets.

    These two can be set by the environment only. A user's own choice is kept, except for a threshold equal to UCXX's.
    """
    with _environment_lock:  # another thread's changes would be taken for the user's, and restored permanently
        before = {name: os.environ.get(name) for name in (_HOOKS, _THRESHOLD)}
        os.environ.setdefault(_HOOKS, "none")
        if before[_THRESHOLD] == _UCXX_THRESHOLD:
            del os.environ[_THRESHOLD]
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


class RemoteBlock(NamedTuple):
    """Memory to be filled, and from where."""

    memory: Any
    """Flat bytes, an array or a tensor of a device."""
    address: int
    """At the other agent."""
    device: int = HOST
    """The number of the GPU that the address is of, there."""


class NixlRead:
    """A read under way, with the memory that it fills. `release` it when it is done or abandoned.

    It has a transfer for each pair of kinds of memory: NIXL mixes none.
    """

    def __init__(self, agent: NixlAgent, memory: Sequence[Any]) -> None:
        self._agent, self._memory = agent, memory
        self.handles: list[Any] = []
        self.regions: list[Any] = []
        """What was registered for it."""
        self._fault = ""

    def begin(self) -> None:
        """Begin, once. A failure is raised by `done`: parts of the read may be under way."""
        try:
            if "ERR" in [self._agent.call("transfer", handle) for handle in self.handles]:
                self._fault = "NIXL could not begin a read."
        except WeightsError as error:
            self._fault = str(error)

    def done(self) -> bool:
        """Poll the read, which also drives NIXL.

        Raises:
            WeightsError: the read has failed; parts of it may still be under way.
        """
        if self._fault:
            raise WeightsError(self._fault)
        states = {self._agent.call("check_xfer_state", handle) for handle in self.handles}
        if "ERR" in states:
            raise WeightsError("NIXL reports that a read has failed.")
        return states == {"DONE"}

    def release(self) -> None:
        """Free the read. One that is not done is stopped only by closing the agent."""
        handles, regions = self.handles, self.regions
        self.handles, self.regions, self._memory = [], [], ()
        with contextlib.suppress(WeightsError):  # NIXL may refuse while the read runs; closing the agent frees it then
            for handle in handles:
                self._agent.call("release_xfer_handle", handle)
            for region in regions:
                self._agent.deregister(region)


class NixlAgent:
    """A NIXL agent. Used by one thread at a time; registered memory must outlive the agent or its registration.

    UCX uses the devices of the address `host` only: its own, or that of the source.
    """

    def __init__(self, *, host: str) -> None:
        api = load_nixl()
        bindings = api.nixlBind
        errors: list[type[Exception]] = [value for name, value in vars(bindings).items() if name.endswith("Error")]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *errors)
        devices = net_devices(host)
        options = {**OPTIONS, **({} if devices is None else {"NET_DEVICES": devices})}
        settings = ",".join(f"{name}={value}" for name, value in options.items() if f"UCX_{name}" not in os.environ)
        self.name = secrets.token_hex(8)
        """Name by which other agents know this one."""
        self.generation = 1
        """Grows with each registration: the metadata has changed."""
        self._process = os.getpid()
        self._regions: dict[int, tuple[weakref.ref[Memory], Any]] = {}
        self._freed: list[int] = []
        try:
            self._agent: Any = api.nixl_agent(self.name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            with _environment():
                self._agent.create_backend(_BACKEND, {"engine_config": settings} if settings else {})
        except self._errors as error:
            raise WeightsError(
                f"NIXL cannot start here ({error}); choose transport 'ucx', 'tcp' or 'local'."
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of NIXL's.

        Raises:
            WeightsError: NIXL has failed, the agent is closed, or this process was forked since the agent began.
        """
        if os.getpid() != self._process:
            raise WeightsError("NIXL was started before this process was forked; start processes by 'spawn'.")
        if self._agent is None:
            raise WeightsError("The NIXL agent is closed.")
        try:
            return getattr(self._agent, name)(*arguments)
        except self._errors as error:
            raise WeightsError(f"{type(error).__name__}: {error}") from error

    def register(self, memory: Sequence[Any], device: int = HOST) -> Any:
        """Register memory until `deregister` is called with what this returns, or the agent is closed.

        Args:
            memory: flat bytes, arrays or tensors of a device.
            device: the number of the GPU that they are on.

        Raises:
            WeightsError: NIXL cannot use it.
        """
        regions = [(*location_of(block), max(0, device), "") for block in memory if block.nbytes]
        if not regions:
            return None
        self.generation += 1
        return self.call("register_memory", regions, _segment(device))

    def deregister(self, region: Any) -> None:
        """Undo a registration; None is ignored."""
        if region is not None:
            self.call("deregister_memory", region)

    def metadata(self) -> bytes:
        """Return the metadata by which others read all of the registered memory."""
        metadata: bytes = self.call("get_agent_metadata")
        return metadata

    def add_remote(self, metadata: bytes) -> str:
        """Add another agent's metadata, again when it has changed. Return that agent's name."""
        name = self.call("add_remote_agent", metadata)
        return str(name.decode("ascii", "replace") if isinstance(name, bytes) else name)

    def read(self, name: str, blocks: Sequence[RemoteBlock]) -> NixlRead:
        """Begin to fill each block of memory from an address of the agent `name`.

        Raises:
            WeightsError: the other agent has not registered that memory, or is gone; or NIXL cannot use the memory of a
                device.
        """
        groups: dict[tuple[int, bool], list[RemoteBlock]] = {}
        for block in blocks:
            groups.setdefault((device_of(block.memory), block.device == HOST), []).append(block)
        reading = NixlRead(self, [block.memory for block in blocks])
        try:
            for (here, _), group in groups.items():
                self._prepare(name, here, group, reading)
        except WeightsError:
            reading.release()
            raise
        reading.begin()
        return reading

    def progress(self) -> None:
        """Drive NIXL: it serves others' reads of this agent's memory, and notices lost peers."""
        self.call("get_new_notifs")

    def close(self) -> None:
        """Close the agent, which ends all reads. Each `NixlRead` must have been released. May be called twice."""
        if self._agent is not None:
            self._agent.agent = (
                None  # so that a reference to the Python object, in a traceback for example, does not keep NIXL's
            )
        self._agent = None
        self._regions = {}

    def _prepare(self, name: str, here: int, blocks: Sequence[RemoteBlock], reading: NixlRead) -> None:
        """Add to a read the transfer of blocks that are all on the device `here`, and all of one kind there."""
        mine = [(*location_of(block.memory), max(0, here)) for block in blocks]
        theirs = [(block.address, block.memory.nbytes, max(0, block.device)) for block in blocks]
        reading.regions.append(self.register([one.memory for one in blocks if not self._covers(one.memory)], here))
        local = self.call("get_xfer_descs", mine, _segment(here))
        remote = self.call("get_xfer_descs", theirs, _segment(blocks[0].device))
        reading.handles.append(self.call("initialize_xfer", "READ", local, remote, name))

    def _covers(self, block: Any) -> bool:
        """Return whether a block lies in a mapping of our own, which then is registered as a whole."""
        while self._freed:
            _, region = self._regions.pop(self._freed.pop())
            self.deregister(region)
        if not isinstance(block, np.ndarray):
            return False
        root = block
        while isinstance(root.base, np.ndarray):
            root = root.base
        if not isinstance(root.base, memoryview) or not isinstance(root.base.obj, mmap.mmap):
            return False
        key = id(root)
        if key not in self._regions:
            region = self.register([root])
            self._regions[key] = weakref.ref(root, lambda _: self._freed.append(key)), region
        return True


def _segment(device: int) -> str:
    """Return NIXL's name for memory of the host, or of a GPU."""
    return "DRAM" if device == HOST else "VRAM"


def device_of(memory: Any) -> int:
    """Return the number of the GPU that memory is on, `HOST` for others."""
    if isinstance(memory, np.ndarray) or memory.device.type != "cuda":
        return HOST
    return int(memory.device.index)

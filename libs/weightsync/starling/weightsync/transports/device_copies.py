"""The copy of an opened snapshot in memory of a device, as a reader on the same machine uses it.

It is opened when a box is first read that goes to a device which reaches it: a GPU that this process sees, the same one
or one with peer access to it. Where it cannot be opened, the boxes are read from the host's snapshot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import ArenaMapping
from starling.weightsync.memory.device_handles import DeviceHandle, OpenedMemory
from starling.weightsync.memory.protected_pages import OpenedPages
from starling.weightsync.plan.layout import CPU

log = logging.getLogger(__name__)


class DeviceCopy:
    """The device's copy of one opened snapshot. Thread-safe.

    Args:
        mapping: the arena, with a lease on the snapshot.
        least_bytes: what the pieces of the arena take.

    Raises:
        WeightsError: the handle in the arena is false.
    """

    def __init__(self, mapping: ArenaMapping, least_bytes: int) -> None:
        self._handle = mapping.device_handle(least_bytes)
        self._lock = threading.Lock()
        self._memory: OpenedMemory | None = None

    @property
    def lane(self) -> str:
        """Name of the memory that boxes are copied from; empty while it is not open."""
        with self._lock:
            return "" if self._memory is None or self._handle is None else f"{self._handle.kind} memory"

    def memory_for(self, targets: Sequence[Any]) -> OpenedMemory | None:
        """Return the memory to fill all of `targets` from, arrays or tensors of a device; None if it reaches not all.

        It remains open until `close`.
        """
        with self._lock:
            handle = self._handle
            if handle is None or not all(_reaches(handle, target) for target in targets):
                return None
            try:
                self._memory = self._memory or _open(handle)
            except WeightsError as error:
                self._handle = None
                log.warning("weights are copied from memory of the host: %s", error)
            return self._memory

    def close(self) -> None:
        """Close the memory; no copy may be under way."""
        with self._lock:
            memory, self._memory, self._handle = self._memory, None, None
            if memory is not None:
                memory.close()


def _reaches(handle: DeviceHandle, target: Any) -> bool:
    if handle.kind == CPU or isinstance(target, np.ndarray):
        return handle.kind == CPU and isinstance(target, np.ndarray)
    from starling.weightsync.tensors.cuda_ipc import reaches  # imports torch

    return reaches(handle, target)


def _open(handle: DeviceHandle) -> OpenedMemory:
    if handle.kind == CPU:
        return OpenedPages(handle)
    from starling.weightsync.tensors.cuda_ipc import open_memory  # imports torch

    return open_memory(handle)

"""Writer of a publisher's snapshots: straight into a slot of the arena, or through memory of the device.

Training waits for `write`. Through the device it waits for a copy within the device only; a thread moves the bytes to
the slot, from which readers get them. The memory on the device is allocated for each version and freed as
soon as it has moved, so nothing of it is left while training or an engine needs the device. Or it stays, for readers
that copy from there: then each slot has its own, which the slot's next version overwrites when the slot was claimed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Final

import torch

from starling.common.errors import WeightsError
from starling.weightsync.memory.arena import Arena
from starling.weightsync.memory.arrays import Memory
from starling.weightsync.memory.device_memory import (
    ROOM,
    DeviceAllocator,
    DeviceMemory,
    SharedDeviceMemory,
    SnapshotPlace,
    SnapshotPolicy,
)
from starling.weightsync.plan.layout import Layout
from starling.weightsync.tensors.cuda_memory import allocator_of
from starling.weightsync.tensors.views import packed_views

MOVE_TIMEOUT_S: Final = 600.0
"""Longest that a snapshot may take from its device to the host."""

Fill = Callable[[Sequence[torch.Tensor]], None]
"""Writes a version into tensors, one for each shard."""

log = logging.getLogger(__name__)


class SnapshotWriter:
    """Writes the versions of one rank. Used by one thread.

    Args:
        layout: what is published.
        rank: which rank of the layout this process is.
        arena: its slots.
        policy: where a version is copied while training waits.
        stays: whether a version that goes by way of the device also stays there.
        allocator_of: returns the allocator of a device, None for a device that has none.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        arena: Arena,
        policy: SnapshotPolicy,
        *,
        stays: bool = False,
        allocator_of: Callable[[torch.device], DeviceAllocator | None] = allocator_of,
    ) -> None:
        self._layout, self._rank, self._policy, self._allocator_of = layout, rank, policy, allocator_of
        self._extent_bytes = arena.extent_bytes
        self._slots: tuple[Memory, ...] = arena.slots
        self._views = tuple(packed_views(layout, rank, slot) for slot in arena.slots)
        self.place: SnapshotPlace = "host"
        """Where the last version was copied."""
        self._allocator: DeviceAllocator | None = None
        self._pinned = False
        self._on_device = False
        """Whether versions are copied through the device, if there is room."""
        self._is_prepared = False
        self._stays = stays
        self._shared: dict[int, SharedDeviceMemory] = {}
        """Memory that stays, by slot."""
        self._pool: ThreadPoolExecutor | None = None
        self._moving: Future[None] | None = None

    def prepare(self, device: torch.device) -> None:
        """Apply the policy to the first device that is published from; nothing after that.

        Raises:
            WeightsError: the policy is not available for this device or on this host.
        """
        if self._is_prepared:
            return
        allocator = self._allocator = self._allocator_of(device)
        policy = self._policy
        if allocator is None and policy in ("device", "pinned"):
            raise WeightsError(f"Snapshots of {device.type!r} tensors cannot be {policy!r}: choose 'auto' or 'host'.")
        automatic = policy == "auto" and allocator is not None and device.type != "cpu"
        self._on_device = policy == "device" or automatic
        if allocator is not None and (policy == "pinned" or automatic):
            try:
                self._pin(allocator)
            except WeightsError as error:
                if policy == "pinned":
                    raise
                log.warning("snapshots are copied to memory that is not locked: %s", error)
        self._is_prepared = True

    def write(self, slot: int, fill: Fill, device: torch.device) -> Future[None] | None:
        """Let `fill` write a version of tensors of `device`; it ends in the claimed slot.

        Returns: the end of the move to the slot; None if the version is there.

        Raises:
            WeightsError: this policy is not available for the device, or a move did not end in time.
        """
        self.prepare(device)
        self.settle()
        memory = self._memory_of(slot)
        self.place = "device" if memory is not None else "pinned" if self._pinned else "host"
        with torch.no_grad():
            if memory is None:
                fill(self._views[slot])
                return None
            try:
                with memory.opened() as flat:
                    fill(packed_views(self._layout, self._rank, flat))
            except BaseException:  # whatever it is: free the memory, and re-raise
                self._shared.pop(slot, None)
                memory.free()
                raise
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="weightsync-move")
        stays = slot in self._shared
        self._moving = self._pool.submit(_move, memory, self._slots[slot][: self._extent_bytes], stays=stays)
        return self._moving

    def memory(self, slot: int) -> SharedDeviceMemory | None:
        """Return the memory in which the version in a slot stays; None where it does not. Thread-safe."""
        return self._shared.get(slot)

    def settle(self) -> None:
        """Wait until no version is in memory of the device, but for those that stay there.

        Raises:
            WeightsError: one did not move within `MOVE_TIMEOUT_S`.
        """
        moving = self._moving
        if moving is None:
            return
        try:
            moving.exception(MOVE_TIMEOUT_S)  # that of a failed move is the offer's
        except TimeoutError as error:
            raise WeightsError(f"A snapshot did not leave its device within {MOVE_TIMEOUT_S:g} s.") from error
        self._moving = None

    def close(self) -> None:
        """End the moves, unlock the slots, and free what stays on the device. Its readers must have been told."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        while self._shared:
            self._shared.popitem()[1].free()
        if self._pinned and self._allocator is not None:
            for slot in self._slots:
                self._allocator.unpin(slot)
        self._slots, self._views = (), ()

    def _pin(self, allocator: DeviceAllocator) -> None:
        for index, slot in enumerate(self._slots):
            try:
                allocator.pin(slot)
            except WeightsError:
                for pinned in self._slots[:index]:
                    allocator.unpin(pinned)
                raise
        self._pinned = True

    def _memory_of(self, slot: int) -> DeviceMemory | None:
        """Return memory of the device for a version in a slot; None where there is no room, or the policy wants none.

        The claimed slot has no readers, or they find that it was revoked.
        """
        if not self._on_device or self._allocator is None or not self._extent_bytes:
            return None
        if self._policy == "auto" and self._allocator.available_bytes() < ROOM * self._extent_bytes:
            return None
        if self._stays and slot not in self._shared:
            self._share(self._allocator, slot)
        if slot in self._shared:
            return self._shared[slot]
        try:
            return self._allocator.allocate(self._extent_bytes)
        except WeightsError as error:
            log.warning("training waits until a snapshot is in memory of the host: %s", error)
            return None

    def _share(self, allocator: DeviceAllocator, slot: int) -> None:
        """Allocate the memory in which the versions of a slot stay; without it none stays any more."""
        try:
            self._shared[slot] = allocator.allocate_shared(self._extent_bytes)
        except WeightsError as error:
            self._stays = False
            log.warning("readers copy snapshots from memory of the host: %s", error)


def _move(memory: DeviceMemory, slot: Memory, *, stays: bool) -> None:
    """Copy a version from the device to its slot, and free it there unless it stays."""
    try:
        memory.copy_to(slot)
    finally:
        if not stays:
            memory.free()

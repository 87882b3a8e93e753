"""Mesh of a replica's ranks: its axes, their process groups, and this rank's place.

Each axis has a meaning, and the ranks along it hold or compute different parts of the same thing:

    pp            blocks of the model                       dp_shard      parameters, and microbatches
    dp_replicate  microbatches                              cp            tokens of a microbatch
    tp            matrices, the vocabulary, and tokens between matrices

The last axis varies fastest from rank to rank: tp communicates most, and should lie within a host.

The experts of a mixture are on the same ranks in another order: the ranks of dp_shard, cp and tp, which all compute
different tokens between the matrices, are efsdp groups of ep neighbours. Each group of ep has all experts once, and
efsdp is to a shard of experts what dp_shard is to other parameters.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings

AXES: Final = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""From the slowest to the fastest."""
DATA: Final = "dp"
"""The axes dp_replicate and dp_shard as one."""
SHARDS: Final = "dp_shard_cp"
"""The axes dp_shard and cp as one, over which FSDP shards parameters: ranks of cp would otherwise repeat them."""
RESULTS: Final = "results"
"""The axes along which ranks compute different parts of the results of a step, as one: pp and those of `DATA`."""
MATRICES: Final = "dp_shard_cp_tp"
"""The axes along which a matrix is divided, as one: dp_shard, cp and tp."""
JOINT: Final = {
    DATA: ("dp_replicate", "dp_shard"),
    SHARDS: ("dp_shard", "cp"),
    RESULTS: ("pp", "dp_replicate", "dp_shard"),
    MATRICES: ("dp_shard", "cp", "tp"),
}
"""Axes that consist of several."""
EXPERT_AXES: Final = ("pp", "dp_replicate", "efsdp", "ep")
"""Of the same ranks, for the experts of a mixture."""

PROGRESS_S: Final = 10.0
"""Interval at which rank 0 shows the others that it still makes what they wait for."""


class Mesh:
    """The ranks of a replica, which the default process group connects."""

    def __init__(
        self, settings: ParallelSettings, device_type: str = "cpu", turns: Path | None = None, first_rank: int = 0
    ) -> None:
        """Make the process groups of all axes. Every rank calls it; the default process group exists.

        Args:
            settings: sizes of the axes.
            device_type: of the model.
            turns: a file that all ranks of this host can lock, see `turn`.
            first_rank: of this host.

        Raises:
            ConfigError: the product of the sizes is not the number of ranks.
        """
        self.settings, self._turns, self._first_rank = settings, turns, first_rank
        self._turn: BinaryIO | None = None
        """The locked file, in a turn."""
        self._sizes: dict[str, int] = {axis: int(getattr(settings, axis)) for axis in AXES}
        check_sizes(self._sizes, dist.get_world_size())
        self.devices = init_device_mesh(device_type, tuple(self._sizes.values()), mesh_dim_names=AXES)
        shards = [axis for axis in JOINT[SHARDS] if self._sizes[axis] > 1] or [JOINT[SHARDS][0]]
        # The axis of FSDP is a joint one only where both of its axes have ranks.
        self._joint = {
            DATA: self.devices[JOINT[DATA]]._flatten(DATA),
            SHARDS: self.devices[JOINT[SHARDS]]._flatten(SHARDS) if len(shards) > 1 else self.devices[shards[0]],
            RESULTS: self.devices[JOINT[RESULTS]]._flatten(RESULTS),
            MATRICES: self.devices[JOINT[MATRICES]]._flatten(MATRICES),
        }
        self.experts: DeviceMesh | None = None
        """Of `EXPERT_AXES`; None where experts are not divided."""
        if settings.ep > 1:
            self._sizes |= {"efsdp": settings.dp_shard * settings.cp * settings.tp // settings.ep, "ep": settings.ep}
            self.experts = init_device_mesh(
                device_type, tuple(self._sizes[axis] for axis in EXPERT_AXES), mesh_dim_names=EXPERT_AXES
            )

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for those of experts that are not divided."""
        return self._joint[axis].size() if axis in self._joint else self._sizes.get(axis, 1)

    def place(self, axis: str) -> int:
        """Return the place of this rank along an axis."""
        return self._joint[axis].get_local_rank() if axis in self._joint else self._with(axis).get_local_rank(axis)

    def group(self, axis: str) -> ProcessGroup:
        """Return the ranks that differ from this one along an axis only."""
        return self._joint[axis].get_group() if axis in self._joint else self._with(axis).get_group(axis)

    def _with(self, axis: str) -> DeviceMesh:
        if axis in AXES:
            return self.devices
        assert self.experts is not None, "the experts are divided"
        return self.experts

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let ranks of a host do one after the other what takes much memory; without any collective operation."""
        if self._turns is None:
            yield
            return
        with self._turns.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._turn = file
            try:
                yield
            finally:
                self._turn = None

    @contextmanager
    def between_turns(self) -> Iterator[None]:
        """Leave the turn meanwhile, for a collective operation, and take another one after it."""
        file = self._turn
        if file is None:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_EX)

    def from_first(self, make: Callable[[], str], interval_s: float = PROGRESS_S) -> str:
        """Return the text that `make` returns on rank 0, where alone it is called; every rank calls this.

        `make` may take longer than an operation of the ranks: the others hear each `interval_s` that it goes on.
        """
        found: list[Any] = [None]
        thread = ThreadPoolExecutor(1, "first-rank")
        made = thread.submit(make) if dist.get_rank() == 0 else None
        thread.shutdown(wait=False)
        with self.between_turns():
            while found[0] is None:
                if made is not None and wait([made], interval_s).done:
                    found = [made.result()]
                dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return str(found[0])

    def device(self, name: str) -> str:
        """Return the device of this rank, where `name` is that of all: `model.device`."""
        return name if self.devices.device_type == "cpu" else f"cuda:{dist.get_rank() - self._first_rank}"

    @property
    def sharding(self) -> DeviceMesh:
        """The mesh of FSDP: dp_shard and cp as one, and dp_replicate before it where it replicates too (HSDP)."""
        shards = self._joint[SHARDS]
        if self.size("dp_replicate") == 1:
            return shards
        return DeviceMesh._concatenate([self.devices["dp_replicate"], shards])

    @property
    def expert_sharding(self) -> DeviceMesh:
        """The mesh of FSDP for experts, which are divided."""
        assert self.experts is not None, "the experts are divided"
        return self.experts["dp_replicate", "efsdp"] if self.size("dp_replicate") > 1 else self.experts["efsdp"]


def check_sizes(sizes: Mapping[str, int], num_ranks: int) -> None:
    """Check that the product of the axes is the number of ranks.

    Raises:
        ConfigError: names an axis that is wrong, and each value that would fit.
    """
    product = prod(sizes.values())
    if product == num_ranks:
        return
    fitting = {
        axis: num_ranks // (product // size) for axis, size in sizes.items() if not num_ranks % (product // size)
    }
    written = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"
    start = f"policy.parallel has {written} = {product} ranks, and there are {num_ranks}: "
    if not fitting:
        raise ConfigError(
            f"{start}no change of one axis makes them equal, so choose sizes whose product is {num_ranks}"
        )
    # An axis that the recipe has set is wrong more likely than one that it has not.
    order = sorted(fitting, key=lambda axis: (sizes[axis] == 1, axis != "dp_shard"))
    wrong, others = order[0], order[1:]
    also = "".join(f", or {axis} = {fitting[axis]}" for axis in others)
    raise ConfigError(f"{start}{wrong} = {sizes[wrong]} does not fit; set {wrong} = {fitting[wrong]}{also}")

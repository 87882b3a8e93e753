"""Process group of a replica's ranks, which are processes of one host: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d

from starling.common.errors import ConfigError
from starling.common.settings import set_variable
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.model.load import find_device
from starling.policy.train.parallel.mesh import AXES, Mesh, check_sizes

_LOOPBACK: Final = "lo"


class SharedFiles(NamedTuple):
    """Files that all ranks of a replica can open; empty at first."""

    store: Path
    """By which they find each other."""
    turns: Path
    """To be locked, see `Mesh.turn`."""


def join_ranks(settings: ParallelSettings, rank: int, device: str, files: SharedFiles) -> Mesh:
    """Connect this process with the other ranks of its replica, and return their mesh.

    Every rank calls it, before it has used any device. Ranks wait for each other for at most `settings.timeout_s`, in
    this and in every operation that follows.

    Args:
        settings: sizes of the axes.
        rank: of this process.
        device: of the model, as in `model.device`; with `cuda`, rank n takes the n-th visible GPU.
        files: of the replica.

    Raises:
        ConfigError: there are too few GPUs, or `device` names a single one.
    """
    num_ranks = settings.num_ranks
    kind = find_device(device).type
    if kind != "cpu":
        _take_gpu(settings, rank, device)
    # Otherwise gloo listens at the address that the host's name has, for everybody.
    set_variable("GLOO_SOCKET_IFNAME", _LOOPBACK)
    timeout = timedelta(seconds=settings.timeout_s)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=FileStore(str(files.store), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    mesh = Mesh(settings, kind, files.turns)
    # A mesh makes its groups with a default of half an hour.
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)
    return mesh


def control_group(timeout_s: float) -> dist.ProcessGroup:
    """Return a further group of all ranks, over gloo, for a thread of its own. Every rank calls it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group


def leave_ranks() -> None:
    """Disconnect from the other ranks, each of which calls this."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _take_gpu(settings: ParallelSettings, rank: int, device: str) -> None:
    if ":" in device:
        raise ConfigError(
            f"model.device = {device!r} is one device, and policy.parallel asks for {settings.num_ranks} ranks: set it "
            'to "cuda", and CUDA_VISIBLE_DEVICES to their GPUs'
        )
    num_gpus = torch.cuda.device_count()
    if num_gpus < settings.num_ranks:
        check_sizes({axis: int(getattr(settings, axis)) for axis in AXES}, num_gpus)
    torch.cuda.set_device(rank)

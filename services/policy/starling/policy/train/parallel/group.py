"""Process group of a replica's ranks, which are processes of one host or of several: NCCL between GPUs, else gloo."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import distributed_c10d

from starling.common.errors import ConfigError
from starling.common.settings import set_variable
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.model.load import find_device
from starling.policy.train.parallel.mesh import AXES, Mesh, check_sizes
from starling.weightsync.transports.devices import NCCL_INTERFACE, choose_interface

_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
LOOPBACK: Final = "127.0.0.1"


class SharedFiles(NamedTuple):
    """Files that all ranks of a host can open; empty at first."""

    store: Path
    """By which they find each other, if they are on one host."""
    turns: Path
    """To be locked, see `Mesh.turn`."""


@dataclass(frozen=True)
class RankHost:
    """The host of a rank, of a replica that has several."""

    node: int
    first_rank: int
    num_ranks: int
    store: str
    """``host:port`` of the store by which all ranks find each other, see `serve_store`."""


def serve_store(host: str, option: str = "--rdzv") -> tuple[TCPStore, str]:
    """Serve a store by which ranks of several hosts or replicas find each other, at an address of this host only.

    Args:
        host: name or address of this host, as others know it.
        option: that named it, for the error.

    Returns:
        The store, which serves as long as it exists, and its ``host:port``.

    Raises:
        ConfigError: this host does not have that address.
    """
    listener = socket.socket()
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {host} ({error.strerror}); give {option} an address of this host"
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


def join_ranks(
    settings: ParallelSettings,
    rank: int,
    device: str,
    files: SharedFiles,
    host: RankHost | None = None,
    *,
    address: str = LOOPBACK,
) -> Mesh:
    """Connect this process with the other ranks of its replica, and return their mesh.

    Every rank calls it, before it has used any device. Ranks wait for each other for at most `settings.timeout_s`, in
    this and in every operation that follows.

    Args:
        settings: sizes of the axes.
        rank: of this process.
        device: of the model, as in `model.device`; with `cuda`, the n-th rank of a host takes the n-th visible GPU.
        files: of this host.
        host: this one, of several; None for the only one.
        address: of the only host, at which this process also forms groups with other replicas; a loopback address if it
            forms none beyond this host. NCCL has one interface for all groups of a process.

    Raises:
        ConfigError: there are too few GPUs, or `device` names a single one.
    """
    num_ranks = settings.num_ranks
    kind = find_device(device).type
    first_rank = 0 if host is None else host.first_rank
    if kind != "cpu":
        _take_gpu(settings, rank - first_rank, device, None if host is None else host.num_ranks)
    timeout = timedelta(seconds=settings.timeout_s)
    store: FileStore | TCPStore
    if host is None:
        # Otherwise gloo listens at the address that the host's name has, and NCCL at that of another interface.
        set_variable(_GLOO_INTERFACE, "lo")
        choose_interface(address, NCCL_INTERFACE)
        store = FileStore(str(files.store), num_ranks)
    else:
        name, _, port = host.store.rpartition(":")
        choose_interface(name, _GLOO_INTERFACE, NCCL_INTERFACE)
        store = TCPStore(name, int(port), is_master=False, timeout=timeout)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    mesh = Mesh(settings, kind, files.turns, first_rank)
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


def _take_gpu(settings: ParallelSettings, place: int, device: str, share: int | None) -> None:
    """Take a GPU of this host for its rank number `place`. `share`: ranks of this host, of several."""
    if ":" in device:
        raise ConfigError(
            f"model.device = {device!r} is one device, and policy.parallel asks for {settings.num_ranks} ranks: set it "
            'to "cuda", and CUDA_VISIBLE_DEVICES to their GPUs'
        )
    num_gpus = torch.cuda.device_count()
    if share is None and num_gpus < settings.num_ranks:
        check_sizes({axis: int(getattr(settings, axis)) for axis in AXES}, num_gpus)
    if share is not None and num_gpus < share:
        raise ConfigError(f"{share} ranks are on this node, which has {num_gpus} GPUs; give --ranks-per-node")
    torch.cuda.set_device(place)

"""Child processes that write saved states, to be killed or refused while they write."""

from __future__ import annotations

import itertools
import resource
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.dcp import SavedTensors, write_tensors
from starling.policy.train.checkpoint.state import HostBuffers, StateMetadata, StateStore, in_section, take_state
from starling.policy.train.checkpoint.storage import Storage


def write_state(states: StateStore, version: int, weights: dict[str, Tensor]) -> None:
    """Write a state of these weights only."""
    metadata, tensors = StateMetadata(run="r", version=version), in_section("weights/", weights)
    states.write(take_state(metadata, tensors, torch.device("cpu"), HostBuffers()))


def write_endlessly(url: str, options: dict[str, Any], num_elements: int, pipe: Connection) -> None:
    """Write states of one tensor, all of whose elements are the version; report each before and after it is written."""
    torch.set_num_threads(1)
    states = StateStore(Storage(url, options))
    for version in itertools.count(1):
        pipe.send(f"writing {version}")
        write_state(states, version, {"w": torch.full((num_elements,), float(version))})
        pipe.send(f"wrote {version}")


def write_to_full_disk(folder: Path, pipe: Connection) -> None:
    """Write a state, and another one when files must not grow beyond 9,000 bytes; send the error."""
    states, weights = StateStore(Storage(str(folder))), {"w": torch.ones(64, 64)}
    write_state(states, 1, weights)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))
    try:
        write_state(states, 2, weights)
    except ConfigError as error:
        pipe.send(str(error))


WHOLE = {"weights/a": torch.arange(35.0).reshape(7, 5), "trainer/step:a": torch.tensor(3.0)}


def write_or_read_shards(action: str, folder: Path, rank: int, size: int, pipe: Connection) -> None:
    """Write or read `WHOLE` as rank `rank` of `size`, each of which holds a part of one tensor."""
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{action}-{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    if action == "write":
        held = {**WHOLE, "weights/a": distribute_tensor(WHOLE["weights/a"], mesh, [Shard(0)])}
        digests = write_tensors(LocalFileSystem(), f"{folder}/parts", held, dist.group.WORLD)
        assert len(digests) == size + 1, digests
    else:
        held = {"weights/a": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]), "trainer/step:a": torch.zeros(())}
        names = [file.name for file in (folder / "parts").iterdir()]
        SavedTensors(LocalFileSystem(), f"{folder}/parts", names).read_into(held, dist.group.WORLD)
        assert torch.equal(held["weights/a"].full_tensor(), WHOLE["weights/a"])
        assert held["trainer/step:a"] == 3.0
    pipe.send("done")
    dist.destroy_process_group()

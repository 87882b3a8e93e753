"""Gradients that several replicas add up: the order of the sums, and what ranks do when they lose another replica."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks, run_replicas
from small_steps import Array
from torch.distributed.tensor import Shard, distribute_tensor

from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.errors import PeersLostError
from starling.policy.train.parallel.group import serve_store
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.replicas.peers import PeerGroup, StepPeers
from starling.policy.train.parallel.weights.shards import LocalShards

CPU = torch.device("cpu")
WAIT_S = 60.0


def add_up(_: int, replica: int, address: str) -> Array:
    """Add up the gradients of two tensors over three replicas. Returns that of the one that all ranks have whole."""
    mesh = Mesh(ParallelSettings(tp=2, elastic=True))
    axis, generator = mesh.devices["tp"], torch.Generator().manual_seed(replica)

    def divide(rows: torch.Tensor) -> torch.Tensor:  # two of three on the first rank
        return distribute_tensor(rows, axis, [Shard(0)], src_data_rank=None)

    divided, whole = torch.nn.Parameter(divide(torch.zeros(3, 1000))), torch.nn.Parameter(torch.zeros(1500))
    whole.grad = torch.randn(1500, generator=generator)
    divided.grad = divide(torch.randn(3, 1000, generator=generator))
    peers = StepPeers(WAIT_S, CPU)
    peers.begin([address] * 3, replica, "step", lambda: {"whole": whole.detach()})
    shards = LocalShards({"divided": divided, "whole": whole}, mesh, peers=peers)
    shards.gather()
    peers.gather(None)  # the others have their sums, too
    found = shards.tensors["whole"].grad
    assert found is not None
    return found.numpy()


def test_ranks_add_up_a_whole_tensor_in_the_same_order() -> None:
    """The sum of three numbers depends on their order, and that on the place among what is summed together."""
    _store, address = serve_store("127.0.0.1")
    sums = [own for of_replica in run_replicas(3, 2, add_up, address) for own in of_replica]
    seeds = (torch.Generator().manual_seed(replica) for replica in range(3))
    expected = sum(torch.randn(1500, generator=generator).double() for generator in seeds)
    assert isinstance(expected, torch.Tensor)
    assert np.allclose(sums[0], expected.numpy(), rtol=0.0, atol=1e-6)
    for own in sums[1:]:
        assert np.array_equal(own, sums[0])


def leave_early(peers: Sequence[str], rank: int) -> None:
    """Be the same rank of another replica, which has a gradient; the first one ends a little later than the other."""
    group = PeerGroup(peers, 1, f"step/{rank}", WAIT_S, CPU)
    for _ in range(2):  # the comparison of the states
        group.all_reduce_(torch.full((1,), -(1 << 62)), dist.ReduceOp.MAX)
    if rank == 0:
        group.all_reduce_(torch.ones(1, dtype=torch.uint8), dist.ReduceOp.MAX)
    group.close()


def lose_replica(rank: int) -> str:
    """Complete the gradient of a step of which this replica has no microbatch, and another one all."""
    mesh = Mesh(ParallelSettings(dp_replicate=2, elastic=True))
    stores = [serve_store("127.0.0.1") for _ in range(2)]
    addresses = [address for _, address in stores]
    thread = threading.Thread(target=leave_early, args=(addresses, rank), daemon=True)
    thread.start()
    weight = torch.zeros(3, requires_grad=True)
    peers = StepPeers(WAIT_S, CPU)
    peers.begin(addresses, 0, "step", lambda: {"weight": weight})
    shards = LocalShards({"weight": weight}, mesh, peers=peers)
    with pytest.raises(PeersLostError) as caught:
        shards.gather()
    thread.join()
    peers.leave()
    return str(caught.value)


def test_replica_lost_between_ranks_is_noticed_by_all_of_them_at_once() -> None:
    """One rank knows that others have gradients and the other does not: they must not add up different tensors."""
    assert all("lost" in reason for reason in run_ranks(2, lose_replica))

"""This rank's shards of the trained tensors, as plain tensors for an optimizer that works on each element alone.

AdamW, clipping and averages of the weights compute an element from that element only, so each rank updates its own
shards; only the norm of the gradient needs the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from starling.policy.train.parallel.clip import gradient_norm
from starling.policy.train.parallel.mesh import AXES, DATA, EXPERT_AXES, JOINT, Mesh
from starling.policy.train.parallel.replicas.peers import StepPeers
from starling.policy.train.parallel.weights.matrices import DividedMatrices
from starling.weightsync.tensors.modules import local_tensor

_BUCKET_NUMEL: Final = 1 << 24
"""Numbers of gradients that are summed over replicas at a time."""


class LocalShards:
    """Shards of tensors that share memory with them, with gradients of their own."""

    def __init__(
        self,
        trained: Mapping[str, Tensor],
        mesh: Mesh,
        partial: Sequence[str] = (),
        tied: TiedWeights | None = None,
        peers: StepPeers | None = None,
        unused: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Take the shards.

        Args:
            trained: tensors that an optimizer would update, by name.
            mesh: of the ranks.
            partial: names of tensors of whose gradient each rank of the axis tp has a part.
            tied: weights that two stages of a pipeline have.
            peers: the other replicas that make the same steps, if there may be some.
            unused: returns which tensors have a gradient of 0 although a single process would have none.
        """
        self._peers, self._unused = peers, unused
        self._trained, self._mesh, self._partial, self._tied = dict(trained), mesh, frozenset(partial), tied
        self.tensors: dict[str, Tensor] = {name: local_part(tensor) for name, tensor in trained.items()}
        """By name."""
        self._axes = {name: sharded_axes(tensor) for name, tensor in trained.items()}
        self._numels = {self.tensors[name]: tensor.numel() for name, tensor in trained.items()}

    @property
    def copies(self) -> dict[str, str]:
        """The copy of tied weights on this rank, by name, and its original."""
        tied = self._tied
        if tied is None or tied.original is None or tied.copied is None or not tied.is_among(self.tensors):
            return {}
        return {tied.copied: tied.original}

    @torch.no_grad()
    def gather(self) -> None:
        """Complete the gradients: sum those of replicas, and hand each shard its part.

        Raises:
            PeersLostError: other replicas are lost, see `StepPeers.check`.
        """
        for name, tensor in self._trained.items():
            gradient = tensor.grad
            if isinstance(gradient, DTensor):
                assert isinstance(tensor, DTensor)
                gradient = gradient.redistribute(placements=tensor.placements).to_local()
                tensor.grad = None
            self.tensors[name].grad = gradient
        self._fill_in()
        for axis, names in self._sums().items():
            for gradients in self._alike(names):
                _sum(gradients, partial(dist.all_reduce, group=self._mesh.group(axis)))
        if self._peers is not None and self._peers.size > 1:
            for gradients in self._alike(self.tensors):
                _sum(gradients, self._peers.sum_)
            self._peers.check()
        if self._tied is not None and self._tied.is_among(self.tensors):
            self._tied.sum(self.tensors, self._mesh)

    def clear(self) -> None:
        """Free the gradients."""
        for name, tensor in self._trained.items():
            tensor.grad = self.tensors[name].grad = None

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, float32 []."""
        copied = None if self._tied is None else self._tied.copied
        parts = [
            (tensor.grad, self._axes[name])
            for name, tensor in self.tensors.items()
            if tensor.grad is not None and name != copied
        ]
        return gradient_norm(parts, self._mesh, next(iter(self.tensors.values())).device)

    def numel_of(self, part: Tensor) -> int:
        """Return the elements of the whole tensor of one of `tensors`."""
        return self._numels[part]

    @property
    def matrices(self) -> DividedMatrices:
        """The tensors as matrices, for an optimizer that computes from whole ones."""
        return DividedMatrices({self.tensors[name]: tensor for name, tensor in self._trained.items()}, self._mesh)

    def _fill_in(self) -> None:
        """Give a gradient of 0 to what only other ranks have one for: those without a microbatch have none."""
        tensors, unused = list(self.tensors.values()), self._unused()
        known = [tensor.grad is not None and name not in unused for name, tensor in self.tensors.items()]
        found = torch.tensor(known, dtype=torch.uint8)
        found = found.to(tensors[0].device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._mesh.group(DATA))
        if self._peers is not None:
            self._peers.max_(found)
            self._peers.check()  # ranks that have found different ones would add up different tensors
        for tensor, is_known in zip(tensors, found.tolist(), strict=True):
            if not is_known:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)

    def _alike(self, names: Iterable[str]) -> Iterator[list[Tensor]]:
        """Yield the gradients of those of `names` that the same axes shard.

        Ranks that repeat a tensor must add up in the same order, which depends on its place among those that are summed
        together: shards of other tensors may be of other sizes there.
        """
        found: dict[tuple[str, ...], list[Tensor]] = {}
        for name in names:
            gradient = self.tensors[name].grad
            if gradient is not None:
                found.setdefault(self._axes[name], []).append(gradient)
        yield from (found[axes] for axes in sorted(found))

    def _sums(self) -> dict[str, list[str]]:
        """Return which gradients are summed over which axis; FSDP has summed those of the tensors that it shards."""
        found: dict[str, list[str]] = {}
        for name, tensor in self._trained.items():
            axes = _axes(tensor)
            for axis in ("dp_replicate", "efsdp") if "ep" in axes else ("dp_replicate",):
                if self._mesh.size(axis) > 1 and axis not in axes:
                    found.setdefault(axis, []).append(name)
            if name in self._partial:
                found.setdefault("tp", []).append(name)
        return found


@dataclass(frozen=True, slots=True)
class TiedWeights:
    """An embedding and the output layer that is a copy of it, in the first and the last stage of a pipeline."""

    original: str | None
    """Name of the embedding; None where another rank has it."""
    copied: str | None
    """Name of the output layer, likewise."""
    other: int | None
    """Place along pp of the rank with the other one; None where both are on this rank."""

    def is_among(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether they are trained: base weights of adapters are not."""
        return self.original in tensors or self.copied in tensors

    def sum(self, tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
        """Give both the sum of their gradients, to the same bit."""
        if self.other is None:
            assert self.original is not None
            assert self.copied is not None
            one, two = tensors[self.original].grad, tensors[self.copied].grad
            if one is not None and two is not None:
                two.copy_(one.add_(two))
            return
        name = self.copied if self.original is None else self.original
        assert name is not None
        gradient = tensors[name].grad
        if gradient is None:  # no rank had a microbatch
            return
        theirs, group = torch.empty_like(gradient), mesh.group("pp")
        operations = [
            dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=self.other),
            dist.P2POp(dist.irecv, theirs, group=group, group_peer=self.other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient.add_(theirs)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, in the same memory; a tensor that is not sharded is its own."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def local_parameters(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Let the code of `module` see this rank's parts of its own parameters: its kernels take no distributed tensors.

    Gradients arrive at the parameters, which stay as they are.
    """
    own = module.named_parameters(recurse=False)
    return seen_as(module, {name: one.to_local() for name, one in own if isinstance(one, DTensor)})


@contextmanager
def seen_as(module: torch.nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Let the code of `module` see other tensors, by name, than its parameters."""
    # Attributes of the instance are found before the parameters.
    vars(module).update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            del vars(module)[name]


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes of the mesh that shard `tensor`."""
    return tuple(sorted(axis for axis, is_sharded in _axes(tensor).items() if is_sharded))


def owned(tensors: Mapping[str, Tensor], mesh: Mesh, copied: str | None = None) -> dict[str, Tensor]:
    """Return the local parts of `tensors`, but for the one `copied`, such that every element is on one rank only."""
    found = {}
    for name, tensor in tensors.items():
        if name == copied:
            continue
        axes = EXPERT_AXES if "ep" in _axes(tensor) else AXES
        # Stages have different tensors.
        if {axis for axis in axes if axis != "pp" and mesh.place(axis)} <= set(sharded_axes(tensor)):
            found[name] = local_part(tensor).detach()
    return found


def _axes(tensor: Tensor) -> dict[str, bool]:
    """Return the axes on which `tensor` is placed, and whether each shards it."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "the axes of the mesh have names"
    return {
        axis: not placement.is_replicate()
        for name, placement in zip(names, tensor.placements, strict=True)
        for axis in JOINT.get(name, (name,))
    }


def _sum(gradients: list[Tensor], sum_: Callable[[Tensor], object]) -> None:
    for bucket in _buckets(gradients):
        parts = [gradient.flatten() for gradient in bucket]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)  # one may be as large as the vocabulary: no copy
        sum_(joined)
        if joined.data_ptr() == bucket[0].data_ptr():
            continue
        for gradient, part in zip(bucket, torch.split(joined, [one.numel() for one in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket = list[Tensor]()
    for gradient in gradients:
        if bucket and (
            sum(one.numel() for one in bucket) + gradient.numel() > _BUCKET_NUMEL or gradient.dtype != bucket[0].dtype
        ):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket

"""Layouts of what exists: for now plain modules, every tensor whole on one rank."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch

from starling.common.errors import WeightsError
from starling.weightsync.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, check_layout


def layout_of(tensors: Mapping[str, torch.Tensor], replica: str, place: Place | None = None) -> Layout:
    """Describe a module's tensors, as `state_dict()` gives them, as a layout of one rank.

    Tensors that are the same memory (address, shape, strides and element type) are tied: the first name owns the
    memory, the others get a `TensorSpec` with `same_as`. The storage names of the layout are the tensors' names, so
    the same mapping serves to publish, to switch and to attest.

    Args:
        tensors: parameters and persistent buffers by name; any strides.
        replica: the name of the replica, for messages and plans.
        place: where the tensors are; by default this host and the device of the first tensor.

    Raises:
        WeightsError: a tensor that is not strided, is on `meta`, or has an element type that does not travel.
    """
    specs: list[TensorSpec] = []
    shards: list[Shard] = []
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise WeightsError(f"Tensor {name} of {replica} is {tensor.layout} on {tensor.device} and has no memory.")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        memory = (tensor.device, tensor.data_ptr(), shape, strides, tensor.dtype)
        owner = owners.setdefault(memory, name) if tensor.numel() else name
        tie = "" if owner == name else owner
        specs.append(TensorSpec(name=name, shape=shape, dtype=str(tensor.dtype).removeprefix("torch."), same_as=tie))
        if not tie:
            box = Box(offset=(0,) * len(shape), size=shape)
            shards.append(Shard(tensor=len(specs) - 1, box=box, storage=name, offset_bytes=0, strides=strides))
    if place is None:
        device = next((str(tensor.device) for tensor in tensors.values()), "cpu")
        place = Place(host=socket.gethostname(), device=device)
    layout = Layout(replica=replica, tensors=tuple(specs), ranks=(RankLayout(place=place, shards=tuple(shards)),))
    check_layout(layout)
    return layout

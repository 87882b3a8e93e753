"""This rank's parts of whole tensors, in terms that do not depend on the mesh: the content of states and exports.

A version has the element types of the model. FSDP trains parameters of fewer bits in float32; in a state these are the
masters of the optimizer, as on a single rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.parallel.weights.shards import local_part
from starling.weightsync.layouts.placements import Held, held_boxes
from starling.weightsync.plan.layout import Box
from starling.weightsync.tensors.modules import placements_of

SCALE: Final = ".scale"
"""Ending of the fields of an optimizer's state that have one number for each block of elements."""
MASTER = "master:"
"""Prefix of masters among the tensors of an optimizer, followed by the parameter's name."""


def part_of(name: str, tensor: Tensor) -> Part:
    """Return this rank's part of `tensor`, in its memory."""
    if not isinstance(tensor, DTensor):
        return Part.whole(tensor)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank has only tensors of meshes that it is on"
    held = held_boxes(shape, tuple(mesh.shape), tuple(coordinate), placements_of(tensor, name))
    return Part(shape, held, local_part(tensor).detach())


def state_parts(states: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return the parts of an optimizer's tensors.

    Args:
        states: by ``<field>:<parameter>``: of the shape of this rank's part of the parameter, one number for each block
            of it, or single numbers.
        parameters: by name.
    """
    found = {}
    for name, state in states.items():
        parameter = parameters[name.partition(":")[2]]
        if isinstance(parameter, DTensor) and not isinstance(state, DTensor) and state.dim():
            part = part_of(name, parameter)
            is_scale = name.partition(":")[0].endswith(SCALE)
            found[name] = _part_of_scales(part, state) if is_scale else part.moved(state)
        else:
            found[name] = part_of(name, state)
    return found


def runs_of(part: Part) -> list[tuple[int, int]]:
    """Return the elements of a part that are neighbours in the whole tensor, as first and number, in its order."""
    found: list[tuple[int, int]] = []
    for held in part.held:
        start, size, dim = held.box.offset, held.box.size, len(part.shape)
        while dim and size[dim - 1] == part.shape[dim - 1]:
            dim -= 1
        outer = max(dim - 1, 0)  # up to the last dimension that is cut, which may be cut
        length = prod(size[outer:])
        for place in product(
            *(range(first, first + number) for first, number in zip(start[:outer], size[:outer], strict=True))
        ):
            first = 0
            for index, extent in zip((*place, *start[outer:]), part.shape, strict=True):
                first = first * extent + index
            found.append((first, length))
    return found


def _part_of_scales(part: Part, scales: Tensor) -> Part:
    """Return `scales`, one for each block of the elements of a part, as a part of those of the whole tensor.

    The part consists of whole blocks, see `cuts_blocks`.
    """
    block = part.local.numel() // len(scales)
    held, origin = [], 0
    for first, length in runs_of(part):
        box = Box(offset=(first // block,), size=(length // block,))
        held.append(Held(box=box, origin=(origin,)))
        origin += length // block
    return Part((prod(part.shape) // block,), tuple(held), scales)


def cuts_blocks(tensor: Tensor, block: int) -> bool:
    """Whether this rank's part of `tensor` is empty, or ends within one of the blocks of so many of its elements.

    A part of columns counts as one that does: each of its rows would be saved apart.
    """
    part = part_of("", tensor)
    if not part.local.numel() or any(
        held.box.size[-1:] != part.shape[-1:] for held in part.held if len(part.shape) > 1
    ):
        return True
    return any(first % block or length % block for first, length in runs_of(part))


def hidden_masters(parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Part]:
    """Return the trained `parameters` that are their own masters, whose version has fewer bits: `dtypes`, by name."""
    return {
        MASTER + name: part_of(name, parameter)
        for name, parameter in parameters.items()
        if parameter.requires_grad and dtypes.get(name, parameter.dtype) != parameter.dtype
    }

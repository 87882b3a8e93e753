"""This rank's parts of whole tensors, in terms that do not depend on the mesh: the content of states and exports.

A version has the element types of the model. FSDP trains parameters of fewer bits in float32; in a state these are the
masters of the optimizer, as on a single rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.parallel.shards import local_part
from starling.weightsync.layouts.placements import held_boxes
from starling.weightsync.tensors.modules import placements_of

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
        states: by ``<field>:<parameter>``: of the shape of this rank's part of the parameter, or single numbers.
        parameters: by name.
    """
    found = {}
    for name, state in states.items():
        parameter = parameters[name.partition(":")[2]]
        if isinstance(parameter, DTensor) and not isinstance(state, DTensor) and state.dim():
            found[name] = part_of(name, parameter).moved(state)
        else:
            found[name] = part_of(name, state)
    return found


def hidden_masters(parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Part]:
    """Return the trained `parameters` that are their own masters, whose version has fewer bits: `dtypes`, by name."""
    return {
        MASTER + name: part_of(name, parameter)
        for name, parameter in parameters.items()
        if parameter.requires_grad and dtypes.get(name, parameter.dtype) != parameter.dtype
    }

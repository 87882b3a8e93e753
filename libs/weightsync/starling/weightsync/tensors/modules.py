"""Layouts of live tensors: plain modules, distributed tensors, and the parameters of an engine's worker.

Each rank describes its own tensors with `layout_of`; `starling.weightsync.plan.layout.join_ranks` joins the layouts of
all ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import msgspec
import torch

from starling.common.errors import WeightsError
from starling.weightsync.layouts.checkpoint import Folder
from starling.weightsync.layouts.parameters import Parameter, Table, shards_of, whole
from starling.weightsync.layouts.placements import REPLICATE, Held, Placement, Sharded, held_boxes, local_shape
from starling.weightsync.places.machine import find_machine
from starling.weightsync.plan.layout import CPU, ITEM_BYTES, Layout, Place, RankLayout, Shard, TensorSpec, check_layout
from starling.weightsync.tensors.cuda_ipc import uuid_of

if TYPE_CHECKING:  # their import takes half a second, see `is_distributed`
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

Memory: TypeAlias = tuple[torch.device, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def layout_of(
    tensors: Mapping[str, torch.Tensor],
    replica: str,
    place: Place | None = None,
    *,
    table: Table | None = None,
    names: Mapping[str, str] | None = None,
    base: str = "",
) -> Layout:
    """Describe the tensors of a module in this process as a layout of one rank.

    A plain tensor is held whole; of a `DTensor` the rank holds the boxes given by its mesh and placements. Tensors that
    are the same memory (address, shape, strides and element type) are tied: the first name owns the memory, the others
    get a `TensorSpec` with `same_as`. The storage names of the layout are the keys of `tensors`, so that
    `local_tensors(tensors)` can be published, switched and attested.

    Args:
        tensors: parameters and persistent buffers by the module's own names; any strides.
        replica: name of the replica, for messages and plans.
        place: place of the tensors; by default detected from this machine and the device of the first tensor.
        table: parts of the module's parameters, if they are not the canonical tensors themselves: from
            `transformers_table` or `worker_table`. Every one of `tensors` must be listed in it.
        names: names in the table (or else the checkpoint) of parameters that have other names in `tensors`, as in the
            stages of a pipeline.
        base: digest of the base weights of adapters; from `starling.weightsync.tensors.adapters.base_digest`.

    Raises:
        WeightsError: a tensor that is not strided, is on `meta`, has an unsupported element type, is a partial sum, or
            contradicts `table`.
    """
    known = {plain_name(parameter.name): parameter for parameter in table.parameters} if table else {}
    specs = {spec.name: spec for spec in table.tensors} if table else {}
    index = {name: i for i, name in enumerate(specs)}
    shards: list[Shard] = []
    owners: dict[Memory, str] = {}
    for key, tensor in tensors.items():
        name = (names or {}).get(key, key)
        memory = _memory(tensor, key, replica)
        owner = owners.setdefault(memory, name) if local_tensor(tensor).numel() else name
        if table:
            parameter = _listed(known, name, tensor, replica)
        else:
            parameter = _whole(name, key, tensor, replica)
            if name in index:
                raise WeightsError(f"Two tensors of {replica} are named {name}; {key} is the second.")
            index[name] = len(specs)
            tie = "" if owner == name else owner
            specs[name] = TensorSpec(name=name, shape=parameter.shape, dtype=parameter.dtype, same_as=tie)
        if owner == name:
            held = _held(tensor, key, replica) if is_distributed(tensor) else None
            shards.extend(shards_of(parameter, index, storage=key, strides=memory[3], held=held))
    ranks = (RankLayout(place=place or detect_place(tensors.values()), shards=tuple(shards)),)
    layout = Layout(replica=replica, tensors=tuple(specs.values()), ranks=ranks, base=base)
    check_layout(layout)
    return layout


def local_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the local part of each tensor: the tensor itself, or the local tensor of a `DTensor`."""
    return {key: local_tensor(tensor) for key, tensor in tensors.items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of `tensor`, detached; of one that torchao gathers in FP8, the tensor that it wraps."""
    # `to_local` would return a view of a view; a layout describes the memory itself.
    local: torch.Tensor = tensor._local_tensor if is_distributed(tensor) else tensor
    inner: torch.Tensor = getattr(local, "_tensor", local)
    return inner.detach()


def is_distributed(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether `tensor` is a `DTensor`; imports nothing, since a program that has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placements_of(tensor: DTensor, name: str) -> tuple[Placement, ...]:
    """Return the placements of `tensor` along the axes of its mesh.

    Raises:
        WeightsError: partial sums, which no rank holds, or a shard order other than from first axis to last.
    """
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    if order is not None and order != spec.compute_default_shard_order(spec.placements):
        raise WeightsError(
            f"Tensor {name} is split along the axes of its mesh in the order {order}; redistribute it to the default."
        )
    return tuple(_placement(placement, name) for placement in tensor.placements)


def _placement(placement: TorchPlacement, name: str) -> Placement:
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    if placement.is_replicate():
        return REPLICATE
    if isinstance(placement, _StridedShard):
        return Sharded(dim=placement.dim, factor=int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Sharded(dim=placement.dim)
    raise WeightsError(
        f"Tensor {name} is placed as {placement}: no rank holds its values. Redistribute it to Replicate or Shard."
    )


def _held(tensor: DTensor, name: str, replica: str) -> tuple[Held, ...]:
    """Return the boxes of `tensor` in this process."""
    mesh, coordinate = tensor.device_mesh, _coordinate(tensor.device_mesh)
    placements = placements_of(tensor, name)
    if coordinate is None:
        return ()
    shape, local = tuple(tensor.shape), tuple(local_tensor(tensor).shape)
    expected = local_shape(shape, mesh.shape, coordinate, placements)
    if local != expected:
        raise WeightsError(
            f"Tensor {name} of {replica}, shape {shape}, has a local part of shape {local} at {coordinate} of "
            f"mesh {tuple(mesh.shape)}, expected {expected}; only splits as torch.chunk makes them are known."
        )
    return held_boxes(shape, mesh.shape, coordinate, placements)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return this process's index along each axis of `mesh`, None outside it.

    From the present rank: equal meshes share cached values, even after the process group was re-initialised.
    """
    here = (mesh.mesh == mesh.get_rank()).nonzero()
    return tuple(here[0].tolist()) if len(here) else None


def _memory(tensor: torch.Tensor, key: str, replica: str) -> Memory:
    """Return the identity of the local memory of `tensor`, which is equal for tied tensors."""
    local = local_tensor(tensor)
    if local.layout is not torch.strided or local.device.type == "meta":
        raise WeightsError(f"Tensor {key} of {replica} is {local.layout} on {local.device} and has no memory.")
    return local.device, local.data_ptr(), tuple(local.shape), tuple(local.stride()), local.dtype


def _whole(name: str, key: str, tensor: torch.Tensor, replica: str) -> Parameter:
    """Return `tensor` as a parameter that is a canonical tensor itself."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise WeightsError(
            f"Tensor {key} of {replica} has element type {dtype}, expected one of {', '.join(ITEM_BYTES)}."
        )
    return whole(name, tuple(tensor.shape), dtype)


def _listed(known: Mapping[str, Parameter], name: str, tensor: torch.Tensor, replica: str) -> Parameter:
    """Return the table's entry for a live tensor, which must have its shape and element type."""
    parameter = known.get(plain_name(name))
    if parameter is None:
        raise WeightsError(f"Parameter {name} of {replica} is not in the table of its model's family.")
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if (shape, dtype) != (parameter.shape, parameter.dtype):
        raise WeightsError(
            f"Parameter {name} of {replica} is {dtype} of shape {shape}, the table of its model's family says "
            f"{parameter.dtype} of shape {parameter.shape}; check the configuration, the sizes of the groups and "
            "whether the engine repacks its weights."
        )
    return parameter


def plain_name(name: str) -> str:
    """Return `name` without the prefixes of wrappers and the differences between vLLM versions."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.replace(".experts.routed_experts.", ".experts.")


def detect_place(tensors: Iterable[torch.Tensor]) -> Place:
    """Return the place of a rank whose first tensor is the first of `tensors`."""
    machine = find_machine()
    device = next((tensor.device for tensor in tensors), torch.device(CPU))
    if device.type != "cuda":
        return machine.place() if device.type == CPU else msgspec.structs.replace(machine.place(), device=str(device))
    return machine.place_on(machine.gpu(uuid_of(device), _address_of(device)))


def _address_of(device: torch.device) -> str:
    """Return the PCI address of a GPU."""
    found: Any = torch.cuda.get_device_properties(device)  # torch's types lack the address
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def folder_tensors(folder: Folder) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint as views of its mapped files, by their names.

    Tensors of a checkpoint that was opened for reading must not be written to.
    """
    tensors: dict[str, torch.Tensor] = {}
    specs = {spec.name: spec for spec in folder.tensors}
    for name, array in folder.arrays().items():
        kind = getattr(torch, specs[name].dtype)
        if not array.size:
            tensors[name] = torch.empty(array.shape, dtype=kind)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the memory is read-only, as it says above
            tensors[name] = torch.from_numpy(array.view(f"i{array.itemsize}")).view(kind)
    return tensors

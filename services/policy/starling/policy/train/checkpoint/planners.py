"""Planners with which DCP writes and reads parts.

DCP itself knows the shards of `DTensor`, each of one box on the device of its mesh. A part may have several boxes, as
with FSDP around tensor parallelism, and its memory may be a copy on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from starling.policy.train.checkpoint.index import BadIndexError
from starling.policy.train.checkpoint.parts import Part

_Boxes = Mapping[str, Mapping[tuple[int, ...], Tensor]]
"""The boxes of parts, by name and by the index of their first element."""


class PartSavePlanner(DefaultSavePlanner):
    """Plans to write parts; what several ranks hold is written by one of them."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take the parts, by name."""
        self._parts: Mapping[str, Part] = state_dict
        self._boxes: _Boxes = {name: part.boxes() for name, part in self._parts.items()}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write."""
        items = [
            WriteItem(
                index=MetadataIndex(name, torch.Size(start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(start), sizes=box.size()),
                    properties=TensorProperties(dtype=box.dtype),
                    size=torch.Size(part.shape),
                ),
            )
            for name, part in self._parts.items()
            for start, box in self._boxes[name].items()
        ]
        self.plan = SavePlan(items, planner_data={name: (name,) for name in self._parts})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return a box."""
        return self._boxes[index.fqn][tuple(index.offset or ())]


class PartLoadPlanner(DefaultLoadPlanner):
    """Plans to read parts."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Take the parts, by name."""
        self._parts: Mapping[str, Part] = state_dict
        self._boxes: _Boxes = {name: part.boxes() for name, part in self._parts.items()}
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. Raises BadIndexError if a tensor is missing, or of another shape."""
        assert self.metadata is not None, "set up first"
        items = []
        for name, part in self._parts.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != part.shape:
                raise BadIndexError(f"{name} of shape {list(part.shape)} is missing")
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(start), sizes=box.size())
                for start, box in self._boxes[name].items()
            ]
            items += create_read_items_for_chunk_list(name, entry, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return a box."""
        return self._boxes[index.fqn][tuple(index.offset or ())]

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Refuse an entry of bytes: the default unpickles it, which executes any code. An index here has none."""
        raise BadIndexError(f"{read_item.dest_index.fqn} is no tensor")

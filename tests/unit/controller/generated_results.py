"""Results of groups, to be changed by a test and sent to a controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Note

KINDS = (("int32", 3), ("int32", 4), ("float32", 4), ("int32", 4))
"""A prompt of three tokens, and two completions of two."""


@dataclass
class Result:
    """A group as a rollout reports it, to be changed."""

    trajectories: list[wire.TrajectoryMeta] = field(default_factory=list)
    tensors: list[wire.TensorMeta] = field(default_factory=list)
    buffers: list[bytes] = field(default_factory=list)
    temperature: float = -1.0

    def send(self, script: Script, lease: str = "generate:t0:0", name: str = "rollout-0") -> list[str]:
        """`name` sends it."""
        message = wire.GroupGenerated(
            lease=lease,
            trajectories=tuple(self.trajectories),
            tensors=tuple(self.tensors),
            temperature=self.temperature,
        )
        return script.receive(name, message, *self.buffers)

    def put(self, index: int, array: np.ndarray[Any, Any], name: str = "") -> None:
        """Replace tensor `index`, or add one."""
        meta = wire.TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
        self.tensors[index : index + 1], self.buffers[index : index + 1] = [meta], [array.tobytes()]

    def change(self, index: int, **fields: Any) -> None:
        """Change the description of one completion."""
        self.trajectories[index] = replace(self.trajectories[index], **fields)


def valid() -> Result:
    """Return a group that can be trained."""
    meta = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=2, text="y", oldest_version=0, newest_version=0)
    result = Result([meta, meta])
    for kind, num in KINDS:
        result.put(len(result.tensors), np.zeros(num, kind))
    return result


def reason(script: Script) -> str:
    """Return why the group that was thrown away last was."""
    [note] = [c for c in script.commands if isinstance(c, Note) and c.kind in ("waiting", "discarded")]
    return str(note.fields["reason"])

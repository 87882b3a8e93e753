"""Trajectories of a diffusion engine: those that run, and what is recorded of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import LATENTS, STATES, Conditions
from starling.algo.diffusion.sampler import Sampler
from starling.common.wire.messages import Status
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult


@dataclass(slots=True, eq=False)
class RunningTrajectory:
    """One trajectory."""

    group: DiffusionGroup
    index: int
    state: Tensor
    """In the type that stores it, on the engine's device."""
    step: int = 0
    """The next one."""
    logprobs: list[float] = field(default_factory=list)
    """Of the actions so far."""
    versions: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    """The stored states so far, on the host."""


@dataclass(slots=True, eq=False)
class DiffusionGroup:
    """A group in the engine."""

    request: GroupRequest
    conditions: Conditions
    """Those of its prompt, with a batch axis of 1."""
    done: dict[int, RunningTrajectory] = field(default_factory=dict)
    """Trajectories that have ended, by their index."""

    def result(self, sampler: Sampler) -> GroupResult:
        """Return the group's completions; each has a token for each recorded step of the sampler, its number."""
        rows = [self.done[index] for index in range(self.request.num_completions)]
        numbers = np.array(sampler.recorded, np.int32)
        completions = tuple(
            Completion(numbers, np.array(row.logprobs, np.float32), np.array(row.versions, np.int32), Status.OK)
            for row in rows
        )
        tensors: dict[str, npt.NDArray[Any]] = {
            **self.request.tensors,
            LATENTS: torch.stack([row.state.cpu() for row in rows]).numpy(),
        }
        if sampler.actions:
            tensors[STATES] = torch.stack([torch.stack(row.states) for row in rows]).numpy()
        return GroupResult(self.request.lease, np.array(self.request.prompt_ids, np.int32), completions, tensors)

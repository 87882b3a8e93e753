"""Trajectories of a diffusion engine: those that run, and what is recorded of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions
from starling.algo.diffusion.sampler import Sampler
from starling.common.wire.messages import Sampling, Status
from starling.common.wire.tensors import LATENTS, STATES
from starling.rollout.engine.base import Completion, GroupRequest, GroupResult

OF_TOKENS: Final = ("top_p", "top_k", "min_p", "logprobs", "routing")
"""Fields of `Sampling` that a trajectory has no use for. Ends of completions are ignored: each has all its steps."""


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
    sampler: Sampler
    """Draws its trajectories."""
    done: dict[int, RunningTrajectory] = field(default_factory=dict)
    """Trajectories that have ended, by their index."""

    def result(self) -> GroupResult:
        """Return the group's completions; each has a token for each recorded step of the sampler, its number."""
        sampler = self.sampler
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


def sampling_problem(sampling: Sampling) -> str:
    """Return what trajectories cannot be drawn with, and the remedy; empty if they can."""
    if sampling.temperature not in (0.0, 1.0):
        return (
            f"temperature is {sampling.temperature:g}; give 1 to draw trajectories with the sampler, or 0 to draw them "
            "without noise"
        )
    usual = Sampling(max_tokens=1)
    for name in OF_TOKENS:
        if (value := getattr(sampling, name)) != getattr(usual, name):
            return f"{name} is {value!r}, which is for tokens; leave it out for the steps of a trajectory"
    return ""

"""Scored denoising trajectories as arrays: the data of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from starling.algo.denoising import conditions_problem
from starling.algo.diffusion.conditions import Conditions, conditions_of, joined
from starling.algo.diffusion.sampler import STORED, Sampler
from starling.common.errors import ConfigError
from starling.common.wire.tensors import LATENTS, STATES
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.data.packing import Index
from starling.policy.train.errors import RejectedGroupsError


@dataclass(frozen=True, slots=True, eq=False)
class DenoisedGroup:
    """The scored trajectories of one prompt."""

    scored: ScoredGroup
    """A token for each action of each trajectory: its step in the sampler."""
    states: Tensor
    """[trajectories, actions + 1, ...], from the first action's state to the last one's successor."""
    conditions: Conditions
    """Of the prompt, with a batch axis of 1."""
    latents: Tensor | None = None
    """[trajectories, ...], where each of them ends; None where they were not sent."""

    def check(self, sampler: Sampler) -> None:
        """Check that the trajectories are the sampler's.

        Raises:
            ConfigError: they are not.
        """
        name, expected = self.scored.prompt_id, list(sampler.actions)
        for length in self.scored.lengths:
            if length not in (0, len(expected)):
                raise ConfigError(
                    f"group {name!r} has a trajectory of {length} actions, and the sampler has {len(expected)}: start "
                    "rollouts and policies with the same sampler"
                )
        num_whole = sum(length > 0 for length in self.scored.lengths)
        if self.scored.completion_ids.tolist() != expected * num_whole:
            raise ConfigError(
                f"group {name!r} has other actions than the steps {expected}: start rollouts and policies with the "
                "same sampler"
            )
        shape = list(self.states.shape)
        if shape[:2] != [num_whole, len(expected) + 1] or self.states.dtype != STORED[sampler.stored]:
            raise ConfigError(
                f"group {name!r} has states of the shape {shape} in {self.states.dtype} for {num_whole} trajectories "
                f"of {len(expected)} actions, stored as {sampler.stored}"
            )
        if not bool(self.states.isfinite().all()):
            raise ConfigError(f"group {name!r} cannot be trained: a state is not finite")


def read_group(
    scored: ScoredGroup, tensors: Mapping[str, npt.NDArray[Any]], length: int, device: torch.device
) -> DenoisedGroup:
    """Return a group from the tensors that a rollout has sent with it.

    Args:
        scored: its tokens and rewards.
        tensors: by name: the conditions of the prompt, and ``states``, ``latents`` or both, which stay on the host.
        length: tokens of a text that the model was trained with.
        device: of the conditions.

    Raises:
        ConfigError: a tensor is missing, or not in the form of its name.
    """
    prompt = {name: array for name, array in tensors.items() if name not in (STATES, LATENTS)}
    if problem := conditions_problem(prompt, length):
        raise ConfigError(f"group {scored.prompt_id!r} cannot be trained: {problem}")
    # A copy, as torch has no tensors that cannot be written, such as those in the buffers of a message.
    found = {name: torch.from_numpy(tensors[name].copy()) for name in (STATES, LATENTS) if name in tensors}
    if not found:
        raise ConfigError(f"group {scored.prompt_id!r} cannot be trained: it has neither {STATES} nor {LATENTS}")
    states = found.get(STATES, torch.zeros(0, 0))
    return DenoisedGroup(scored, states, conditions_of(prompt, length, device), found.get(LATENTS))


def check_alike(groups: Sequence[DenoisedGroup]) -> None:
    """Check that the prompts of a step have conditions of the same shapes, which are computed together.

    Raises:
        RejectedGroupsError: with those that differ from most.
    """
    shapes = Counter(group.conditions.shapes for group in groups)
    if len(shapes) > 1:
        (usual, _), *_ = shapes.most_common(1)
        rejected = [group.scored.prompt_id for group in groups if group.conditions.shapes != usual]
        what = "have embeddings or given frames of other shapes than the others of the step: make them alike"
        raise RejectedGroupsError(f"the groups {', '.join(rejected[:3])} {what}", rejected)


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """All actions of a step, by number: those of each trajectory are consecutive."""

    states: Tensor
    """[trajectories, actions + 1, ...], on the host."""
    conditions: Conditions
    """Of each group."""
    group: Index
    """int64 [trajectories]."""
    steps: tuple[int, ...]
    """Of the sampler, of each action of a trajectory."""

    def take(self, numbers: Index, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Conditions]:
        """Return states [B, ...], the states drawn next, steps int64 [B] and conditions of some actions."""
        trajectories, offsets = np.divmod(numbers, len(self.steps))
        rows, columns = torch.from_numpy(trajectories), torch.from_numpy(offsets)
        steps = torch.tensor(self.steps)[columns]
        conditions = self.conditions.rows(torch.from_numpy(self.group[trajectories]).to(self.conditions.text.device))
        return (
            self.states[rows, columns].to(device),
            self.states[rows, columns + 1].to(device),
            steps.to(device),
            conditions,
        )


def number_actions(groups: Sequence[DenoisedGroup], sampler: Sampler) -> tuple[list[ScoredGroup], Actions]:
    """Return the actions of `groups` by number, and the groups with that number as the token id of each action.

    Raises:
        ConfigError: trajectories are not the sampler's, or groups of different shapes.
    """
    for group in groups:
        group.check(sampler)
    shapes = {tuple(group.states.shape[2:]) for group in groups}
    if len(shapes) > 1:
        raise ConfigError(f"the trajectories of a step have different shapes: {sorted(shapes)}")
    numbered, owner, start = list[ScoredGroup](), list[int](), 0
    for index, group in enumerate(groups):
        end = start + len(group.scored.completion_ids)
        numbered.append(replace(group.scored, completion_ids=np.arange(start, end, dtype=np.int32)))
        owner += [index] * len(group.states)
        start = end
    actions = Actions(
        torch.cat([group.states for group in groups]),
        joined([group.conditions for group in groups]),
        np.array(owner, dtype=np.int64),
        tuple(sampler.actions),
    )
    return numbered, actions

"""Denoising trajectories: whether the tensors of a group are those that a diffusion model is trained on.

A rollout makes these tensors. The controller checks them before they are stored, and the policy before a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import DenoisingForm
from starling.common.wire.tensors import CONDITION_FORMS, DENOISING_TENSORS, LATENTS, STATES, TEXT, TEXT_MASK

Array = npt.NDArray[Any]

RANKS: Final = {name: form.num_dims for name, form in CONDITION_FORMS.items()}
"""Dimensions of each tensor of a prompt, by its name."""


def conditions_problem(tensors: Mapping[str, Array], length: int) -> str:
    """Return what is wrong with the tensors of a prompt for a model of texts of `length`; empty if nothing is."""
    if TEXT not in tensors:
        return f"the prompt has no {TEXT}; compute them, or read them from a file"
    for name, array in tensors.items():
        if name not in RANKS or array.ndim != RANKS[name]:
            known = ", ".join(f"{one} of {number}" for one, number in RANKS.items())
            return f"the prompt has the tensor {name!r} of {array.ndim} dimensions; give {known}"
        if not np.isfinite(array).all():
            return f"{name} has numbers that are not finite; compute them anew"
    num_tokens = len(tensors[TEXT])
    if not 1 <= num_tokens <= length:
        return f"{TEXT} has {num_tokens} tokens, and the model reads 1 to {length}; shorten the prompt"
    if TEXT_MASK in tensors and len(tensors[TEXT_MASK]) != num_tokens:
        return f"{TEXT_MASK} has {len(tensors[TEXT_MASK])} elements for {num_tokens} embeddings; compute them anew"
    return ""


def trajectories_problem(
    tensors: Mapping[str, Array], lengths: Sequence[int], steps: npt.NDArray[np.int32], form: DenoisingForm
) -> str:
    """Return why a model cannot be trained on a group of denoising trajectories, as a clause; empty if it can.

    Args:
        tensors: those of the group by name.
        lengths: recorded steps of each trajectory.
        steps: their numbers, those of all trajectories one after another.
        form: what the model is trained on.
    """
    num = len(lengths)
    expected = np.arange(form.first_step, form.first_step + form.num_steps, dtype=np.int32)
    if any(length != form.num_steps for length in lengths) or not np.array_equal(steps, np.tile(expected, num)):
        return (
            f"its trajectories have other steps than {form.num_steps} from number {form.first_step} on: start rollouts "
            "and policies with the same [diffusion]"
        )
    shapes = {LATENTS: (num, *form.latents)}
    if form.num_states:
        shapes[STATES] = (num, form.num_states, *form.latents)
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or found.shape != shape or found.dtype.name != form.dtype:
            came = "nothing" if found is None else f"{found.dtype.name}{list(found.shape)}"
            return (
                f"its {name} are {came} instead of {form.dtype}{list(shape)}: start rollouts and policies with the "
                "same [diffusion]"
            )
        if not np.isfinite(found).all():
            return f"its {name} have numbers that are not finite"
    conditions = {name: array for name, array in tensors.items() if name in RANKS}
    return conditions_problem(conditions, form.text_length)


def group_problem(
    tensors: Mapping[str, Array], lengths: Sequence[int], steps: npt.NDArray[np.int32], form: DenoisingForm | None
) -> str:
    """Return why a model cannot be trained on a group: as `trajectories_problem`, or because it is no diffusion model.

    `form`: None for a language model.
    """
    if form is not None:
        return trajectories_problem(tensors, lengths, steps, form)
    came = next((name for name in tensors if name in DENOISING_TENSORS), None)
    return f"it has {came}, and the model is no diffusion model" if came else ""

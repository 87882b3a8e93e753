"""Denoising trajectories: whether the tensors of a group are those that a diffusion model is trained on.

A rollout makes these tensors. The controller checks them before they are stored, and the policy before a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.common.wire.messages import DenoisingForm
from starling.common.wire.tensors import (
    CONDITION_FORMS,
    DENOISING_TENSORS,
    FRAMES,
    LATENTS,
    POOLED,
    STATES,
    TEXT,
    TEXT_MASK,
)

Array = npt.NDArray[Any]

RANKS: Final = {name: form.num_dims for name, form in CONDITION_FORMS.items()}
"""Dimensions of each tensor of a prompt, by its name."""
MAX_CONDITION: Final = 1e6
"""Largest absolute number of a condition: text encoders have outliers of some thousand."""
MAX_LATENT: Final = 1e4
"""Largest absolute number of a state: latents and noise are near 1, and at 1e19 no gradient of a step is finite."""


def conditions_problem(tensors: Mapping[str, Array], length: int) -> str:
    """Return what is wrong with the tensors of a prompt for a model of texts of `length`; empty if nothing is."""
    if TEXT not in tensors:
        return f"the prompt has no {TEXT}; compute them, or read them from a file"
    for name, array in tensors.items():
        if name not in RANKS or array.ndim != RANKS[name]:
            known = ", ".join(f"{one} of {number}" for one, number in RANKS.items())
            return f"the prompt has the tensor {name!r} of {array.ndim} dimensions; give {known}"
        if not _is_within(array, MAX_CONDITION):
            return f"{name} has numbers that are not finite, or beyond {MAX_CONDITION:g}; compute them anew"
    num_tokens = len(tensors[TEXT])
    if not 1 <= num_tokens <= length:
        return f"{TEXT} has {num_tokens} tokens, and the model reads 1 to {length}; shorten the prompt"
    if TEXT_MASK in tensors and len(tensors[TEXT_MASK]) != num_tokens:
        return f"{TEXT_MASK} has {len(tensors[TEXT_MASK])} elements for {num_tokens} embeddings; compute them anew"
    return ""


def _is_within(array: Array, most: float) -> bool:
    """Return whether all numbers of an array are from -`most` to `most`, so that none is NaN. It makes no copy."""
    return not array.size or bool(array.min() >= -most and array.max() <= most)


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
    if foreign := next((name for name in tensors if name not in DENOISING_TENSORS), ""):
        return f"it has {foreign}, which is for the tokens of a language model"
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
    if problem := _shapes_problem(tensors, shapes, form):
        return problem
    conditions = {name: array for name, array in tensors.items() if name in RANKS}
    return conditions_problem(conditions, form.text_length) or _widths_problem(conditions, form)


def _shapes_problem(tensors: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], form: DenoisingForm) -> str:
    """Return which tensor is missing, or of another shape or type, or not finite; empty if none is."""
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None or found.shape != shape or found.dtype.name != form.dtype:
            came = "nothing" if found is None else f"{found.dtype.name}{list(found.shape)}"
            return (
                f"its {name} are {came} instead of {form.dtype}{list(shape)}: start rollouts and policies with the "
                "same [diffusion]"
            )
        if not _is_within(found, MAX_LATENT):
            return f"its {name} have numbers that are not finite, or beyond {MAX_LATENT:g}"
    return ""


def _widths_problem(conditions: Mapping[str, Array], form: DenoisingForm) -> str:
    """Return why the model cannot read the conditions of a prompt, whose dimensions are right; empty if it can."""
    for name, width in ((TEXT, form.text_width), (POOLED, form.pooled_width)):
        found = conditions[name].shape[-1] if name in conditions else 0
        if found != width:
            return (
                f"its {name} have {found} numbers, and the model reads {width}: take the embeddings of the pipeline's "
                "own text encoders"
            )
    frames = conditions.get(FRAMES)
    if frames is None:
        return ""
    channels, *size = form.latents
    if not form.takes_frames:
        return f"it has {FRAMES}, and the model takes none"
    if frames.shape[1] < 1 or (frames.shape[0], *frames.shape[2:]) != (channels, *size[-2:]):
        return f"its {FRAMES} have the shape {list(frames.shape)}, and samples {list(form.latents)}"
    return ""


def group_problem(
    tensors: Mapping[str, Array],
    lengths: Sequence[int],
    steps: npt.NDArray[np.int32],
    form: DenoisingForm | None,
    *,
    is_trained: bool = True,
) -> str:
    """Return why a model cannot be trained on a group: as `trajectories_problem`, or because it is no diffusion model.

    Args:
        tensors: those of the group by name.
        lengths: see `trajectories_problem`.
        steps: see there.
        form: None for a language model.
        is_trained: otherwise the group is of an evaluation, whose steps may be others: scorers read its latents.
    """
    if form is None:
        came = next((name for name in tensors if name in DENOISING_TENSORS), None)
        return f"it has {came}, and the model is no diffusion model" if came else ""
    if is_trained:
        return trajectories_problem(tensors, lengths, steps, form)
    return _shapes_problem(tensors, {LATENTS: (len(lengths), *form.latents)}, form)

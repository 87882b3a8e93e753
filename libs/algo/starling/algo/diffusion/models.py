"""Velocity of a diffusion transformer, in one form for all families of diffusers.

A model predicts the velocity ``v = e - x0`` of `starling.algo.diffusion.flow` at a state and a noise level sigma in
[0, 1]. What differs between families is the scale of the time, the embeddings that they read, and how they are
conditioned on frames:

    WanTransformer3DModel          time 1000 sigma; text embeddings, padded with zeros
    CosmosTransformer3DModel       (2.5) time sigma; text embeddings; the first frames may be given, which then have a
                                   time of their own
    SD3Transformer2DModel          time 1000 sigma; text embeddings, and a pooled one
    SanaTransformer2DModel,        time 1000 sigma `timestep_scale`; text embeddings with a mask
    SanaVideoTransformer3DModel

A state has the frames that are to be generated; given ones are a condition and not part of it, so that no step of a
sampler and no loss has to leave them out.

A model of one's own is any module with a method ``velocity(state, sigma, conditions)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions

GIVEN_FRAME_TIME: Final = 1e-4
"""Time of given frames in Cosmos-Predict 2.5: as good as clean."""


VelocityOf = Callable[[Any, Tensor, Tensor, Conditions], Tensor]


def velocity(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    """Return the velocity that `model` predicts, in the shape of `state` and in float32.

    Args:
        model: a transformer of diffusers of one of the families above, or a module with a method of this name.
        state: [B, C, H, W] for images, [B, C, T, H, W] for videos: the frames to be generated.
        sigma: float [B], the noise levels.
        conditions: see there; in any type, converted to the model's.

    Raises:
        ValueError: the family is not known, or the conditions are not those that it reads.
    """
    found = family(model)(model, state.to(model.dtype), sigma.float(), conditions).float()
    if found.shape != state.shape:
        raise ValueError(
            f"the velocity has the shape {list(found.shape)} for a state of {list(state.shape)}: the latents do not "
            "fit the patches of the model"
        )
    return found


def condition_widths(model: Any) -> tuple[int, int]:
    """Return the numbers of an embedding that a model of one of the families reads, and of a pooled one; 0 for none."""
    config, name = model.config, type(model).__name__
    if name == "SD3Transformer2DModel":
        return config.joint_attention_dim, config.pooled_projection_dim
    if name == "CosmosTransformer3DModel":
        return _cosmos_width(config), 0
    return (config.text_dim if name == "WanTransformer3DModel" else config.caption_channels), 0


def takes_frames(model: Any) -> bool:
    """Return whether a model can be given the first frames."""
    return type(model).__name__ == "CosmosTransformer3DModel"


def _cosmos_width(config: Any) -> int:
    width: int = config.crossattn_proj_in_channels if config.use_crossattn_projection else config.text_embed_dim
    return width


def family(model: Any) -> VelocityOf:
    """Return the function that computes the velocity of a model.

    Raises:
        ValueError: there is none.
    """
    if hasattr(model, "velocity"):
        return _own
    name = type(model).__name__
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{name} is no family whose velocity is known: use {known}, or give it a method `velocity`")
    return FAMILIES[name]


def _own(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    found: Tensor = model.velocity(state, sigma, conditions)
    return found


def _wan(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    _refuse_frames(model, conditions)
    _check_text(conditions, state, model.config.text_dim)
    found: Tensor = model(
        hidden_states=state,
        timestep=1000.0 * sigma,
        encoder_hidden_states=_masked_text(conditions).to(model.dtype),
        return_dict=False,
    )[0]
    return found


def _cosmos(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    if model.config.in_channels != state.shape[1] + 1:
        raise ValueError(
            f"the model reads {model.config.in_channels} channels, and the latents have {state.shape[1]}: only "
            "Cosmos-Predict 2.5, which reads one more for the frames that are given, is supported"
        )
    _check_text(conditions, state, _cosmos_width(model.config))
    given = conditions.frames
    num_given = 0 if given is None else given.shape[2]
    if given is not None and (given.shape[1], *given.shape[3:]) != (state.shape[1], *state.shape[3:]):
        raise ValueError(
            f"the given frames have the shape {list(given.shape)}, and the latents {list(state.shape)}: give frames of "
            "the same channels, height and width"
        )
    hidden = state if given is None else torch.cat([given.to(state.dtype), state], dim=2)
    batch, _, num_frames, height, width_ = hidden.shape
    is_given = torch.zeros(batch, 1, num_frames, 1, 1, dtype=torch.bool, device=state.device)
    is_given[:, :, :num_given] = True
    times = torch.where(is_given, GIVEN_FRAME_TIME, sigma.view(-1, 1, 1, 1, 1).expand_as(is_given))
    found: Tensor = model(
        hidden_states=hidden,
        condition_mask=is_given.to(state.dtype).expand(-1, -1, -1, height, width_),
        timestep=times if num_given else sigma,
        encoder_hidden_states=_masked_text(conditions).to(model.dtype),
        padding_mask=state.new_zeros(1, 1, height, width_),
        return_dict=False,
    )[0]
    return found[:, :, num_given:]


def _sd3(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    _refuse_frames(model, conditions)
    _check_text(conditions, state, model.config.joint_attention_dim)
    if conditions.pooled is None:
        raise ValueError("SD3 reads a pooled embedding of the prompt, and there is none: compute the embeddings anew")
    if conditions.pooled.shape[1] != model.config.pooled_projection_dim:
        raise ValueError(
            f"the pooled embeddings have {conditions.pooled.shape[1]} numbers, and the model reads "
            f"{model.config.pooled_projection_dim}: they are of another text encoder"
        )
    found: Tensor = model(
        hidden_states=state,
        timestep=1000.0 * sigma,
        encoder_hidden_states=_masked_text(conditions).to(model.dtype),
        pooled_projections=conditions.pooled.to(model.dtype),
        return_dict=False,
    )[0]
    return found


def _sana(model: Any, state: Tensor, sigma: Tensor, conditions: Conditions) -> Tensor:
    _refuse_frames(model, conditions)
    _check_text(conditions, state, model.config.caption_channels)
    scale = getattr(model.config, "timestep_scale", 1.0)
    mask = conditions.text_mask
    found: Tensor = model(
        hidden_states=state,
        timestep=1000.0 * sigma * scale,
        encoder_hidden_states=conditions.text.to(model.dtype),
        encoder_attention_mask=None if mask is None else mask.to(model.dtype),
        return_dict=False,
    )[0]
    # Some of its models predict a variance, too.
    return found[:, : state.shape[1]]


FAMILIES: Final[Mapping[str, VelocityOf]] = {
    "WanTransformer3DModel": _wan,
    "CosmosTransformer3DModel": _cosmos,
    "SD3Transformer2DModel": _sd3,
    "SanaTransformer2DModel": _sana,
    "SanaVideoTransformer3DModel": _sana,
}
"""By the name of the class in diffusers."""


def _masked_text(conditions: Conditions) -> Tensor:
    """Return the embeddings with zeros for padding, as the families without a mask were trained."""
    if conditions.text_mask is None:
        return conditions.text
    return conditions.text * conditions.text_mask.unsqueeze(-1).to(conditions.text.dtype)


def _check_text(conditions: Conditions, state: Tensor, width: int) -> None:
    shape = list(conditions.text.shape)
    if len(shape) != 3 or shape[0] != state.shape[0] or shape[2] != width:
        raise ValueError(
            f"the text embeddings have the shape {shape}, and the model reads [{state.shape[0]}, tokens, {width}]: "
            "they are of another text encoder"
        )


def _refuse_frames(model: Any, conditions: Conditions) -> None:
    if conditions.frames is not None:
        raise ValueError(f"{type(model).__name__} takes no given frames: use Cosmos-Predict 2.5, or leave them out")

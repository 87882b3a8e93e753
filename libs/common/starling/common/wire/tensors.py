"""Tensors of a group: the element type and the number of dimensions of each, by position or by name.

`TrainGroup` says what each of them means. The controller checks by this table what a replica sends, and a policy reads
its groups by it.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class TensorForm(NamedTuple):
    """Element type and number of dimensions of a tensor."""

    dtype: str
    """Its name in numpy."""
    item_bytes: int
    num_dims: int


GROUP_TENSORS: Final = (
    TensorForm("int32", 4, 1),
    TensorForm("int32", 4, 1),
    TensorForm("float32", 4, 1),
    TensorForm("int32", 4, 1),
)
"""The first tensors of a group, in order: token ids of the prompt, and of its completions end to end; of each of these
its log-probability, and its weight version."""
PIXEL_GRIDS: Final = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
"""The tensor of patches by its name, and the tensor of the grids that describe it."""
POSITION_IDS: Final = "position_ids"
LOSS_MASK: Final = "loss_mask"
PROMPT_TENSORS: Final[dict[str, TensorForm]] = {
    **{pixels: TensorForm("float32", 4, 2) for pixels in PIXEL_GRIDS},
    **{grid: TensorForm("int64", 8, 2) for grid in PIXEL_GRIDS.values()},
    POSITION_IDS: TensorForm("int32", 4, 2),
}
"""Tensors of a prompt with images or videos, by name."""
MASK_FORM: Final = TensorForm("uint8", 1, 1)
KEPT_COUNTS: Final = "kept_counts"
KEPT_IDS: Final = "kept_ids"
KEPT_TENSORS: Final[dict[str, TensorForm]] = {
    KEPT_COUNTS: TensorForm("int32", 4, 1),
    KEPT_IDS: TensorForm("int32", 4, 1),
}
"""Tensors of the tokens that truncated sampling kept, by name. A group has both, or none."""
MAX_KEPT_PER_TOKEN: Final = 1024
"""Largest `sampling.top_k` with which the kept tokens are recorded."""
MAX_KEPT_BYTES: Final = 1 << 28
"""Largest `kept_ids` of one group: the controller holds those of all groups of some steps."""
PROMPT_ROUTING: Final = "prompt_routing"
ROUTING: Final = "routing"
ROUTING_TENSORS: Final = (PROMPT_ROUTING, ROUTING)
"""Names of the tensors of the experts that a rollout's routers chose. A group has both, or none."""
ROUTING_FORMS: Final[dict[str, TensorForm]] = {
    "uint8": TensorForm("uint8", 1, 3),
    "uint16": TensorForm("uint16", 2, 3),
}
"""Form of such a tensor by its element type: the first one for models of at most 255 experts in a layer."""
MAX_ROUTING_BYTES: Final = 1 << 28
"""Largest `prompt_routing` and `routing` of one group together: the controller holds those of all groups of some
steps."""
TEACHER_TENSORS: Final[dict[str, TensorForm]] = {
    "teacher_logprobs": TensorForm("float32", 4, 1),
    "teacher_top_ids": TensorForm("int32", 4, 2),
    "teacher_top_logprobs": TensorForm("float32", 4, 2),
}
"""Tensors of a teacher, by name. It sends all of them, or only the first if it reports no likeliest tokens."""

TEXT: Final = "text_embeddings"
TEXT_MASK: Final = "text_mask"
POOLED: Final = "pooled_embeddings"
FRAMES: Final = "given_frames"
STATES: Final = "states"
LATENTS: Final = "latents"
CONDITION_FORMS: Final[dict[str, TensorForm]] = {
    TEXT: TensorForm("float32", 4, 2),
    TEXT_MASK: TensorForm("uint8", 1, 1),
    POOLED: TensorForm("float32", 4, 1),
    FRAMES: TensorForm("float32", 4, 4),
}
"""Tensors that the trajectories of a diffusion model are conditioned on, by name."""
STORED_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2}
"""Bytes of a number of a state, by the element types that states can have."""
SAMPLE_DIMS: Final = (3, 4)
"""Dimensions of a sample of a diffusion model: [C, H, W] of an image, [C, T, H, W] of a video."""
OUTER_DIMS: Final = {STATES: 2, LATENTS: 1}
"""Tensors of denoising trajectories, by name, with the number of their dimensions before those of a sample."""
DENOISING_TENSORS: Final = (*CONDITION_FORMS, *OUTER_DIMS)
"""All tensors of a group of denoising trajectories, by name."""


def form_of(name: str, dtype: str, num_dims: int) -> TensorForm | None:
    """Return the form that a named tensor of a group has to have, given what it says of itself.

    The types of some, and the dimensions of others, are a choice: what is none of these gives the first of them. None
    if no tensor has this name.
    """
    if name == LOSS_MASK:
        return MASK_FORM
    if name in ROUTING_TENSORS:
        return ROUTING_FORMS.get(dtype, ROUTING_FORMS["uint8"])
    if name in OUTER_DIMS:
        stored = dtype if dtype in STORED_BYTES else next(iter(STORED_BYTES))
        inner = num_dims - OUTER_DIMS[name]
        return TensorForm(
            stored, STORED_BYTES[stored], OUTER_DIMS[name] + (inner if inner in SAMPLE_DIMS else SAMPLE_DIMS[0])
        )
    return _FORMS.get(name)


_FORMS: Final = {**PROMPT_TENSORS, **KEPT_TENSORS, **CONDITION_FORMS}

"""Images and videos in the forward pass of a vision-language model whose tokens, blocks or parameters are divided.

The code of transformers puts the features that its vision tower computes at the placeholders of a whole row. Here a
rank has some tokens of a row, and each knows by its number which feature it is:

    tower       computes all images and videos of the microbatch in one call, images first, where the embedding is
    numbers     of each token of this rank: its feature, or -1
    deepstack   features of the tower's inner blocks are added after the first blocks, at the same tokens (Qwen3-VL)

Every rank computes the tower of a microbatch, and has a part of the gradient of its features: that of its own tokens.
Ranks of FSDP gather the tower together, so that one without images computes one of zeros, whose features are not used
and whose gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.architecture import media_inputs
from starling.common.errors import ConfigError
from starling.common.wire.tensors import PIXEL_GRIDS
from starling.policy.train.memory.blocks import replace_forward

MEDIA_SLOTS: Final = "media_slots"
"""Model argument: the feature of each token, int64 [R, L]; see `media_slots`."""


def vision_tower(model: Any) -> torch.nn.Module | None:
    """Return the vision tower of `model`; None for a text model, also one that scores sequences."""
    if not hasattr(model, "config") or not media_inputs(model.config):
        return None
    tower: torch.nn.Module = model.base_model.visual
    return tower


def tower_blocks(model: Any) -> list[torch.nn.Module]:
    """Return the blocks of the vision tower of `model`, if it has one on this rank."""
    return list(getattr(vision_tower(model), "blocks", ()))


def check_first_stage(model: Any, pp: int, num_blocks: int) -> None:
    """Check that a first stage of `num_blocks` has all blocks after which features are added.

    Raises:
        ConfigError: others would need them too.
    """
    vision = getattr(model.config, "vision_config", None) if media_inputs(model.config) else None
    needed = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if needed > num_blocks:
        raise ConfigError(
            f"policy.parallel.pp = {pp} gives the first stage {num_blocks} of the blocks of {type(model).__name__}, "
            f"and features of images are added after the first {needed}: use fewer stages"
        )


def media_slots(input_ids: Tensor, tokens: Sequence[int]) -> Tensor:
    """Return the number of each token's feature, int64 [R, L]; -1 for text.

    Args:
        input_ids: of the whole microbatch, [R, L].
        tokens: placeholders, of images and of videos.
    """
    found, first = torch.full_like(input_ids, -1), 0
    for token in tokens:
        is_media = input_ids == token
        num = int(is_media.sum())
        found[is_media] = torch.arange(first, first + num, device=found.device)
        first += num
    return found


class MediaForward:
    """The forward pass of a vision-language model's body, on this rank's tokens."""

    def __init__(
        self,
        model: Any,
        *,
        own_tokens: Callable[[Tensor], Tensor],
        embedding: Callable[[], torch.nn.Module],
        is_first: Callable[[], bool],
        always: bool,
    ) -> None:
        """Replace the forward pass of `model`, in place.

        Args:
            model: which is divided.
            own_tokens: returns those that the embedding returns, [R, l], of the values of all tokens, [R, L].
            embedding: returns the embedding of the stage that computes.
            is_first: returns whether that has the tower.
            always: whether the tower computes in each pass.
        """
        self._own_tokens, self._embedding, self._is_first, self._always = own_tokens, embedding, is_first, always
        self._inputs = media_inputs(model.config)
        tower = vision_tower(model)
        self._names = frozenset(
            name
            for name, parameter in model.named_parameters()
            if tower is not None and any(parameter is one for one in tower.parameters())
        )
        self._is_used = False
        replace_forward(model.base_model, self._compute)

    def unused(self) -> frozenset[str]:
        """Return the tower's parameters if it has computed nothing but zeros since the last call."""
        is_used, self._is_used = self._is_used, False
        return frozenset() if is_used else self._names

    def _compute(
        self,
        body: Any,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        media_slots: Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        """Return what `body` returns for this rank's tokens, from its arguments in transformers and `MEDIA_SLOTS`."""
        pixels = {name: arguments.pop(name, None) for pair in PIXEL_GRIDS.items() for name in pair}
        # The model's own code names all arguments that there are.
        arguments = {name: value for name, value in arguments.items() if value is not None}
        embedded, deep = self._embedding()(input_ids), dict[str, Any]()
        if self._is_first():
            embedded, deep = self._with_media(body, embedded, media_slots, pixels)
        output = body.language_model(
            input_ids=None, inputs_embeds=embedded, position_ids=position_ids, **deep, **arguments
        )
        output.rope_deltas = None  # which the model's own code hands on
        return output

    def _with_media(
        self, body: Any, embedded: Tensor, slots: Tensor | None, pixels: Mapping[str, Tensor | None]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the embeddings with features in their places, and what the first blocks add."""
        given = [(pixels[name], pixels[grid]) for name, grid in PIXEL_GRIDS.items() if pixels[name] is not None]
        if not given and not self._always:
            return embedded, {}
        if not given:
            features, deep = self._features(body, *self._zeros(embedded))
            return _attach(embedded, features, *deep), {}
        self._is_used |= torch.is_grad_enabled()
        features, deep = self._features(body, *(torch.cat(one) for one in zip(*given, strict=True)))
        assert slots is not None, "a microbatch that is divided has numbered its features"
        own = self._own_tokens(slots)
        is_media = own >= 0
        embedded = torch.where(is_media[..., None], features.to(embedded.dtype)[own.clamp(min=0)], embedded)
        if not deep:
            return embedded, {}
        added = [one[own[is_media]] for one in deep]
        return embedded, {"visual_pos_masks": is_media, "deepstack_visual_embeds": added}

    def _features(self, body: Any, pixels: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the features of images, [F, H], and those of each inner block that the model uses."""
        found = body.get_image_features(pixels, grids, return_dict=True)
        return torch.cat(found.pooler_output), [torch.cat(one) for one in getattr(found, "deepstack_features", ())]

    def _zeros(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest image, of zeros."""
        assert self._inputs is not None, "the model takes images"
        size = self._inputs.merge_size
        grid = torch.tensor([[1, size, size]], device=like.device)
        return like.new_zeros(size * size, self._inputs.patch_values), grid


def _attach(values: Tensor, *unseen: Tensor) -> Tensor:
    """Return `values`, with a gradient of 0 for `unseen`."""
    attached: Tensor = _Attach.apply(values, *unseen)  # type: ignore[no-untyped-call]
    return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *unseen: Tensor) -> Tensor:
        ctx.shapes = [(one.shape, one.dtype, one.device) for one in unseen]
        return values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes)
        return gradient, *zeros

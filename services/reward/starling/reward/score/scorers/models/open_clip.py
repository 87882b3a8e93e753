"""Weights of open_clip's CLIP models under the names that transformers has for them. The shapes of both are checked.

visual.conv1.weight                          vision_model.embeddings.patch_embedding.weight
visual.transformer.resblocks.N.attn.in_proj  vision_model.encoder.layers.N.self_attn.{q,k,v}_proj, each a third
visual.proj                                  visual_projection.weight, transposed
token_embedding, transformer.resblocks.N     text_model ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from starling.common.errors import ConfigError

_OUTER: Final = {
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_TRANSPOSED: Final = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}
_BLOCKS: Final = {"visual.transformer.resblocks.": "vision_model", "transformer.resblocks.": "text_model"}
_IN_BLOCK: Final = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_QKV: Final = ("q_proj", "k_proj", "v_proj")


def clip_weights(weights: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the weights of a model of transformers from those of open_clip.

    Args:
        weights: tensors by open_clip's names.
        model: what they are for.

    Raises:
        ConfigError: they are of another model.
    """
    found = dict(pair for name, tensor in weights.items() for pair in _renamed(name, tensor))
    wanted = model.state_dict()
    found = {name: tensor for name, tensor in found.items() if name in wanted}
    for name, tensor in wanted.items():
        if name not in found and name.endswith("position_ids"):  # no weights
            found[name] = tensor
        elif name not in found or found[name].shape != tensor.shape:
            shape = list(found[name].shape) if name in found else "nothing"
            raise ConfigError(
                f"the checkpoint has {shape} for {name} of shape {list(tensor.shape)}: it is of another model than the "
                "folder."
            )
    return found


def _renamed(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of transformers that one of open_clip has."""
    if name in _OUTER:
        yield _OUTER[name], tensor
    elif name in _TRANSPOSED:
        yield _TRANSPOSED[name], tensor.T.contiguous()
    else:
        for prefix, tower in _BLOCKS.items():
            if name.startswith(prefix):
                number, _, rest = name.removeprefix(prefix).partition(".")
                yield from _in_block(f"{tower}.encoder.layers.{number}", rest, tensor)
                return


def _in_block(layer: str, rest: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    if rest in ("attn.in_proj_weight", "attn.in_proj_bias"):
        kind = rest.rpartition("_")[2]
        for part, third in zip(_QKV, tensor.chunk(3), strict=True):
            yield f"{layer}.self_attn.{part}.{kind}", third.contiguous()
        return
    module, _, kind = rest.rpartition(".")
    if module in _IN_BLOCK:
        yield f"{layer}.{_IN_BLOCK[module]}.{kind}", tensor

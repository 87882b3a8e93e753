"""Properties of a model from its configuration: its class in transformers, the maximum length of its sequences, and the
form in which it takes images.

Policy and rollout share them, so that both use the same class, and no sequence is sampled that cannot be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from starling.algo.media import placeholder_ids
from starling.common.wire.messages import MediaInputs

TIMESTAMPED: Final = ("qwen3_vl", "qwen3_vl_moe")
"""Models whose videos are frames with a timestamp as text before each, and a pixel limit for the whole video."""
_VISION_FAMILY: Final = ("qwen2_vl", "qwen2_5_vl", *TIMESTAMPED)


def remedy(folder: Path, trust_remote_code: bool) -> str:
    """Return the remedy to append to a loading error if the cause may be custom code in `folder`, else ""."""
    has_code = b'"auto_map"' in (folder / "config.json").read_bytes()  # which need not be valid JSON
    advice = "; the folder contains custom code: review it, and set model.trust_remote_code = true to run it"
    return advice if has_code and not trust_remote_code else ""


def auto_class(config: Any) -> Any:
    """Return the auto class whose `from_config` and `from_pretrained` create the model of `config`.

    `AutoModelForCausalLM`, or `AutoModelForImageTextToText` for vision-language models that are not registered there,
    such as Qwen2.5-VL.
    """
    # Imported here, because importing transformers takes seconds.
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    own = getattr(config, "auto_map", None) or {}
    if AutoModelForCausalLM.__name__ in own:
        return AutoModelForCausalLM
    if AutoModelForImageTextToText.__name__ in own:
        return AutoModelForImageTextToText
    of_text, with_images = (
        _is_registered(config, auto) for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    )
    return AutoModelForImageTextToText if with_images and not of_text else AutoModelForCausalLM


def _is_registered(config: Any, auto: Any) -> bool:
    """Return whether the class of `config` is a key of an auto class's mapping.

    The mapping's own `keys` imports the configuration of every model, which takes longer than to load a small model;
    its own `__contains__` looks at one model type of the class only.
    """
    mapping, kind = auto._model_mapping, type(config)
    if kind in mapping._extra_content:
        return True
    is_of_library = kind.__module__.startswith("transformers.")
    return is_of_library and any(
        name == kind.__name__ and model_type in mapping._model_mapping
        for model_type, name in mapping._config_mapping.items()
    )


def kept_in_float32(model: Any, dtype: Any) -> Callable[[str], bool]:
    """Return whether `from_pretrained` loads a parameter, by its name, in float32 although it is asked for `dtype`.

    Source: `_get_dtype_plan` of transformers, as its loader applies it.
    """
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda _: False
    pattern, _, _ = build_glob_alternation(list(plan))
    return lambda name: pattern.search(name) is not None


def random_model(kind: Any, config: Any, dtype: Any, *, trust_remote_code: bool = False) -> Any:
    """Return an auto class's model with random weights, in the element types in which its own would be loaded.

    `from_config` alone makes some buffers in `dtype` that `from_pretrained` loads in float32.
    """
    model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    kept = kept_in_float32(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if kept(name):
            tensor.data = tensor.data.float()
    return model


def context_length(config: Any) -> int | None:
    """Return the context length of a model, None if `config` declares none.

    With rotary embeddings of type longrope (Phi-3, Phi-4-mini) it is the context of the first pretraining. Beyond it
    such a model switches to other frequencies for all tokens at once: transformers by the longest sequence of a batch,
    vLLM by its longest possible sequence. One sequence would have other log-probabilities in every batch.
    """
    config = config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), *_longrope_contexts(config)]
    return min((int(limit) for limit in limits if limit), default=None)


def _longrope_contexts(config: Any) -> list[int | None]:
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    own = getattr(config, "original_max_position_embeddings", None)
    return [
        one.get("original_max_position_embeddings", own)
        for one in (rope, *by_layer_type)
        if one.get("rope_type") == "longrope"
    ]


def turn_off_router_logits(config: Any) -> None:
    """Have a mixture of experts return no router logits, whatever its `config` says.

    With them transformers adds its own auxiliary loss to a loss that is not computed here, and fails.
    """
    config = config.get_text_config()
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False


def media_inputs(config: Any) -> MediaInputs | None:
    """Return the form in which a model takes images and videos; None for a text model, and for other families."""
    if config.model_type not in _VISION_FAMILY:
        return None
    vision = config.vision_config
    return MediaInputs(
        image_token_id=int(config.image_token_id),
        video_token_id=int(config.video_token_id),
        patch_values=int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2),
        merge_size=int(vision.spatial_merge_size),
        num_positions=context_length(config) or 0,
    )


def placeholders(config: Any) -> dict[str, int]:
    """Return the placeholder tokens of images and videos by the names of their grids; empty for a text model."""
    inputs = media_inputs(config)
    return {} if inputs is None else placeholder_ids(inputs)

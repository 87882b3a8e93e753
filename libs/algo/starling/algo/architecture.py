"""What follows from a model's configuration: its class in transformers, and how long its sequences may be.

Policy and rollout must agree here: on the class to the name, and on the length so that no sequence is sampled that
cannot be trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def remedy(folder: Path, trust_remote_code: bool) -> str:
    """Return what to add to the reason why the model in `folder` was not made, where its own code may be it."""
    brings_code = b'"auto_map"' in (folder / "config.json").read_bytes()  # which need not be valid JSON
    allow = "; the folder brings its own code: read it, and set model.trust_remote_code = true to run it"
    return allow if brings_code and not trust_remote_code else ""


def auto_class(config: Any) -> Any:
    """Return the auto class whose `from_config` and `from_pretrained` make the model of `config`.

    That is `AutoModelForCausalLM`, but for models that take images too and are not listed there, such as Qwen2.5-VL:
    those are made by `AutoModelForImageTextToText`.
    """
    # Only now: importing transformers takes seconds.
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    own = getattr(config, "auto_map", None) or {}
    if AutoModelForCausalLM.__name__ in own:
        return AutoModelForCausalLM
    if AutoModelForImageTextToText.__name__ in own:
        return AutoModelForImageTextToText
    # Of the keys: the mapping itself has its own idea of what it contains.
    of_text, with_images = (
        set(auto._model_mapping.keys()) for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    )
    return AutoModelForImageTextToText if type(config) in with_images - of_text else AutoModelForCausalLM


def most_tokens(config: Any) -> int | None:
    """Return the most tokens of a sequence that can be trained, None where `config` declares no limit.

    It is the context of the model or, where layers attend to a window or a chunk only, the size of that: up to it they
    attend to everything, as the masks of packed rows say.
    """
    config = config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    limits = [getattr(config, "max_position_embeddings", None)]
    if not kinds or "sliding_attention" in kinds:
        limits.append(getattr(config, "sliding_window", None))
    if "chunked_attention" in kinds:
        limits.append(getattr(config, "attention_chunk_size", None))
    return min((int(limit) for limit in limits if limit), default=None)

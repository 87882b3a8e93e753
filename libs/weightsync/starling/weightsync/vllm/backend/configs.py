"""Configurations of models that must be equal where a trainer's weights are to mean the same in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

COMPARED: Final = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "tie_word_embeddings",
    "num_experts_per_tok",
    "norm_topk_prob",
    "scoring_func",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "text_config",
)
"""Fields that change what a model computes from its weights. Others differ between versions of transformers, or are of
no consequence here."""


def first_difference(engine: Mapping[str, Any], trainer: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the first field that both configurations have with different values, and both values; None for none."""
    return next(_differences(engine, trainer), None)


def _differences(engine: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in COMPARED:
        if key in engine and key in trainer:
            yield from _compare(key, engine[key], trainer[key])


def _compare(key: str, mine: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        if key == "text_config":
            yield from ((f"{key}.{name}", a, b) for name, a, b in _differences(mine, theirs))
            return
        for name in mine.keys() & theirs.keys():  # one side may have filled in defaults
            yield from _compare(f"{key}.{name}", mine[name], theirs[name])
    elif isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
        if [*mine] != [*theirs]:
            yield key, mine, theirs
    elif mine is not None and theirs is not None and mine != theirs:
        yield key, mine, theirs


def plain(config: Any) -> dict[str, Any]:
    """Return the compared fields of a configuration of transformers, or of a mapping; empty for None."""
    if config is None:
        return {}
    values = config if isinstance(config, Mapping) else config.to_dict()
    return {key: _plain(values[key]) for key in COMPARED if key in values}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)

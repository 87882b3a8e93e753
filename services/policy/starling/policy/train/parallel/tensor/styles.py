"""Styles of the matrices of a model: the plan that transformers ships with it, mapped onto what ranks compute here.

A matrix in a region is divided by one of these styles:

    columns    each rank has some columns of the output
    gathered   the same, and the output is gathered: something needs all of it, such as a norm over all heads
    rows       each rank has some rows of the input, which is its own already
    split      the same, of an input that each rank has whole
    packed     columns of two matrices in one, of which each rank goes on with its part of both
    kept       a norm over all heads, of which each rank goes on with its own

Where there are fewer key heads than ranks, projections of keys and values are whole on each rank, which keeps the head
of its query heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch

from starling.algo.experts import find_experts
from starling.common.errors import ConfigError
from starling.policy.train.memory.blocks import find_blocks, last_norm
from starling.policy.train.model.lm_head import (
    has_final_layer,
)
from starling.policy.train.parallel.weights.adapters import base_layer

Style = Literal["columns", "gathered", "rows", "split", "packed", "kept", "whole"]

_STYLES: Final[dict[str, Style]] = {
    "colwise": "columns",
    "colwise_gather_output": "gathered",
    "rowwise": "rows",
    "rowwise_split_input": "split",
    "packed_colwise": "packed",
    "replicated_with_grad_allreduce": "whole",
    "mla_kv_a_proj": "whole",
}
"""By the names of transformers."""
_HEADS: Final = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_LATENT_HEADS: Final = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_GATED: Final = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_ADDED: Final[dict[str, dict[str, dict[str, str]]]] = {
    "deepseek_v3": {"self_attn": _LATENT_HEADS},
    "gpt_oss": {"self_attn": _HEADS | {"sinks": "colwise"}},
    "qwen3_vl_text": {"self_attn": _HEADS, "mlp": _GATED},
}
"""What the plans of some models lack, by type of the language model and module of a block."""
_ENDS: Final = ("embed_tokens", "norm", "lm_head")
"""Modules beside the blocks, which are divided in one way only, whatever a plan says."""


def check_tensors(model: Any, size: int) -> None:
    """Check that `size` ranks can divide `model`.

    Raises:
        ConfigError: it has no plan, an entry of its plan has no counterpart here, or ranks cannot divide a matrix.
    """
    given = f"policy.parallel.tp = {size}"
    if not has_final_layer(model) or not _plan(model):
        raise ConfigError(
            f"{given} has no plan for {type(model).__name__}, only for language and reward models for which "
            "transformers has one: set it to 1, and use dp_shard"
        )
    last_norm(model)
    config = model.config.get_text_config()
    divided, heads = {"attention heads": int(config.num_attention_heads)}, set[int]()
    for block, styles in zip(find_blocks(model), block_styles(model), strict=True):
        for name, style in styles.items():
            is_module = name in dict(block.named_modules())
            found = base_layer(block.get_submodule(name)) if is_module else block.get_parameter(name)
            weight: Any = getattr(found, "weight", found)
            if name.endswith(("k_proj", "v_proj")) and (own := key_heads(block, name)):
                heads.add(own)
            elif style in ("rows", "split"):
                divided.setdefault(f"inputs of {name}", weight.shape[1])
            elif style in ("columns", "gathered"):
                divided.setdefault(f"outputs of {name}", weight.shape[0])
            elif style == "packed":
                divided.setdefault(f"outputs of each half of {name}", weight.shape[0] // 2)
    fitting = [
        str(one)
        for one in range(1, divided["attention heads"] + 1)
        if not any(number % one for number in divided.values()) and not any(each % one and one % each for each in heads)
    ]
    remedy = f"set tp = {' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))}"
    for name, number in divided.items():
        if number % size:
            raise ConfigError(f"{given} does not divide the {number} {name}: {remedy}")
    for each in sorted(heads):
        if each % size and size % each:
            raise ConfigError(f"{given} neither divides the {each} key heads nor is a multiple of them: {remedy}")


def block_styles(model: Any) -> list[dict[str, Style]]:
    """Return how each block of `model` is divided: styles by name of a module or parameter.

    Raises:
        ConfigError: an entry of its plan has no counterpart here.
    """
    blocks = find_blocks(model)
    plan = [(_pattern(model, entry), entry, style) for entry, style in _plan(model).items()]
    return [_styles_of(type(model).__name__, block, plan) for block in blocks]


def _plan(model: Any) -> dict[str, str]:
    """Return styles of transformers by its patterns of names in the language model's body."""
    config = model.config.get_text_config()
    own = getattr(config, "base_model_tp_plan", None) or {}
    added = {
        f"layers.*.{module}.{name}": style
        for module, styles in _ADDED.get(config.model_type, {}).items()
        for name, style in styles.items()
    }
    return {entry: style for entry, style in (added | dict(own)).items() if entry not in _ENDS}


def _pattern(model: Any, entry: str) -> re.Pattern[str]:
    """Return the expression of names within a block that `entry` means."""
    blocks, wildcard, name = entry.partition(".*.")
    if not wildcard or "." in blocks:
        raise _no_counterpart(type(model).__name__, entry, "it is not part of a block")
    return re.compile(re.escape(name).replace(r"\*", r"[^.]+"))


def _styles_of(kind: str, block: torch.nn.Module, plan: list[tuple[re.Pattern[str], str, str]]) -> dict[str, Style]:
    modules, parameters = dict(block.named_modules()), dict(block.named_parameters())
    # Whole, or divided by expert parallelism.
    experts = tuple(name.partition(".base_layer")[0] for name in find_experts(block))
    found: dict[str, Style] = {}
    for pattern, entry, style in plan:
        for name in modules | parameters:
            if not pattern.fullmatch(name) or any(f"{name}.".startswith(f"{one}.") for one in experts):
                continue
            if style not in _STYLES:
                raise _no_counterpart(kind, entry, f'its style "{style}" is not known')
            is_matrix = name in modules and isinstance(base_layer(modules[name]), torch.nn.Linear)
            if _STYLES[style] != "whole" and not is_matrix and not (name in parameters and style == "colwise"):
                raise _no_counterpart(kind, entry, "it is no matrix")
            if not name.rpartition(".")[0]:
                raise _no_counterpart(kind, entry, "it is not in a module of its own within the block")
            found[name] = _STYLES[style]
    found = {name: style for name, style in found.items() if style != "whole"}
    for region in {name.rpartition(".")[0] for name in found}:
        found |= _own_heads(block.get_submodule(region), region, found)
    return found


def _no_counterpart(kind: str, entry: str, reason: str) -> ConfigError:
    return ConfigError(
        f"policy.parallel.tp above 1 is not available for {kind}: the entry {entry} of its plan cannot be mapped "
        f"exactly, because {reason}; set tp = 1, and use dp_shard"
    )


def _own_heads(attention: torch.nn.Module, region: str, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return styles with which a rank attends with its own heads only, where those of transformers compute all.

    They gather queries, keys and values, because there are norms over all heads (OLMo 2).
    """
    own = {name.removeprefix(f"{region}."): style for name, style in styles.items() if name.startswith(f"{region}.")}
    if own != {"q_proj": "gathered", "k_proj": "gathered", "v_proj": "gathered", "o_proj": "split"}:
        return {}
    found: dict[str, Style] = {f"{region}.v_proj": "columns", f"{region}.o_proj": "rows"}
    for name in ("q", "k"):
        norm: Any = getattr(attention, f"{name}_norm", None)
        matrix: Any = base_layer(attention.get_submodule(f"{name}_proj"))
        if norm is not None and norm.weight.numel() == matrix.out_features:
            found[f"{region}.{name}_norm"] = "kept"
        else:
            found[f"{region}.{name}_proj"] = "columns"
    return found


def key_heads(block: torch.nn.Module, name: str) -> int | None:
    """Return the heads of a projection of keys or values; None where they are not known."""
    attention: Any = block.get_submodule(name.rpartition(".")[0])
    matrix: Any = base_layer(block.get_submodule(name))
    head_dim = getattr(attention, "head_dim", None)
    return int(matrix.out_features) // int(head_dim) if head_dim else None

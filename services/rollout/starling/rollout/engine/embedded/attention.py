"""Attention function of the embedded engine, registered with transformers: packed prefill and decode over blocks.

A prefill is one row of packed segments (`starling.algo.attention`), and a decode step reads the blocks of the KV cache
in place (`cache.PagedCache`); both are keyword arguments of the model's forward pass, which transformers hands through
to its layers. Where a step gathers a small cache instead, the query heads that share a key head take the place of query
positions, so that keys and values are not copied once per query head, as in the stock function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.algo.attention.probe import (
    PROBE,
    WINDOWS_DIFFER,
    is_close,
    layer_windows,
    probe_paths,
    probe_tokens,
)
from starling.rollout.engine.embedded.cache import LayerShape, PagedCache

PAGED: Final = "starling_paged"
_OTHER_ATTENTION: Final = ("softcap", "s_aux", "position_bias", "head_mask", "indexer_topk")
"""Arguments of attention functions that change the attention, and that only other functions of transformers know."""


class _Observed(NamedTuple):
    """What a layer attends to."""

    window: int | None
    num_heads: int
    key_dim: int
    value_dim: int


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    structure: Forest | None = None,
    blocks: PagedCache | None = None,
    observed: list[_Observed] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from `query` [rows, heads, q, dim] to `key`, `value` [rows, kv_heads, k, dim].

    Args:
        module, attention_mask, dropout, kwargs: see transformers.
        query, key, value: with `structure` one row of packed tokens; with `blocks` one token per row.
        scaling: factor of the scores; by default the inverse square root of dim.
        structure: segments of a prefill.
        blocks: the cache that a decode step reads in place.
        observed: with `structure`, receives what the layer attends to.

    Returns [rows, q, heads, dim], and None for the attention weights. Calls with several query tokens, without shared
    key heads, or with a mask per head go to the stock function.

    Raises:
        NotImplementedError: with `structure` or `blocks`, an argument that changes the attention.
    """
    rows, heads, q_len, dim = query.shape
    if (structure is not None or blocks is not None) and getattr(module, "is_causal", True):
        _check_arguments(kwargs)
        scale = dim**-0.5 if scaling is None else scaling
        window: int | None = kwargs.get("sliding_window")
        if blocks is not None:
            return blocks.attend(query, scale, window), None
        assert structure is not None
        if observed is not None:
            observed.append(_Observed(window, key.shape[1], key.shape[3], value.shape[3]))
        packed = [one[0].transpose(0, 1) for one in (query, key, value)]
        return attention(packed[0], packed[1], packed[2], structure, scale, window=window)[None], None
    kv_heads = key.shape[1]
    per_head = attention_mask is not None and attention_mask.shape[1] != 1
    if q_len != 1 or heads == kv_heads or per_head or kwargs.get("position_bias") is not None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    folded = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    output = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, 1, heads, -1), None


def use_paged_attention(model: PreTrainedModel) -> None:
    """Make `model` use `paged_attention` if it uses sdpa attention; eager attention if that would ignore soft caps."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, sdpa_mask)
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
        model.set_attn_implementation(PAGED if capped is None else "eager")


def unread_mask(model: PreTrainedModel) -> torch.Tensor:
    """Return a mask that is handed through unread, where without one transformers would make one of L x L."""
    return torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)


@torch.inference_mode()
def why_unpacked(model: PreTrainedModel) -> str | None:
    """Return why `model` cannot compute packed rows, nor read blocks in place; None if it can, which is observed."""
    if not model._supports_sdpa:
        return f"its attention is computed by {model.config._attn_implementation!r} only"
    if model.config._attn_implementation != PAGED:
        return f"its attention is {model.config._attn_implementation!r}, or does not use the interface of transformers"
    try:
        return _probe(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a model raises anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _probe(model: Any) -> str | None:
    """Compare the logits of a packed row with those of its sequences alone; return what is wrong, None for nothing."""
    expected = Counter(layer_windows(model.config))
    observed: list[_Observed] = []

    def packed_logits(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        observed.clear()
        return _packed_probe(model, tokens, positions, observed)

    matches = _matches(model, packed_logits)
    if Counter(one.window for one in observed) != expected:
        return WINDOWS_DIFFER
    return None if matches else "a packed row and its sequences alone differ"


def _packed_probe(model: Any, tokens: torch.Tensor, positions: torch.Tensor, observed: list[_Observed]) -> torch.Tensor:
    """Return the logits of a packed row, and what each layer attends to in `observed`."""
    logits: torch.Tensor = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        structure=PROBE,
        attention_mask=unread_mask(model),
        observed=observed,
    ).logits[0]
    return logits


@torch.inference_mode()
def attends_to_cached(model: Any, shapes: Sequence[LayerShape]) -> bool:
    """Return whether a model that computes packed rows attends to what it caches, and not to what it makes of that.

    Latent attention caches one narrow row for all heads, of which it makes their keys and values in each step.

    Args:
        model: a causal language model of transformers.
        shapes: of what each layer caches.
    """
    observed: list[_Observed] = []
    tokens, positions = next(iter(probe_tokens(model))), torch.from_numpy(PROBE.positions).to(model.device)
    _packed_probe(model, tokens, positions, observed)
    cached = [(one.num_heads, one.key_dim, one.value_dim) for one in shapes]
    return [(one.num_heads, one.key_dim, one.value_dim) for one in observed] == cached


@torch.inference_mode()
def matches_model(model: Any, packed_logits: Callable[..., torch.Tensor]) -> bool:
    """Return whether `packed_logits` computes what `model` does, observed on two short sequences.

    Args:
        model: a causal language model of transformers.
        packed_logits: returns [T, vocabulary], given token ids and positions, int64 [T], and the attention of a layer
            (`decoder.Attend`).
    """

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        return attention(query, key, value, PROBE, scale, window=window)

    return _matches(model, lambda tokens, positions: packed_logits(tokens, positions, attend))


def _matches(model: Any, packed_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> bool:
    """Compare the logits of a packed row with the model's of its sequences alone."""
    paths, positions = probe_paths(model.device), torch.from_numpy(PROBE.positions).to(model.device)
    for tokens in probe_tokens(model):
        alone = model(input_ids=tokens[paths], use_cache=False).logits
        if is_close(packed_logits(tokens, positions)[paths], alone, model.dtype):
            return True
    return False


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for name in _OTHER_ATTENTION:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"its attention has the argument {name}")

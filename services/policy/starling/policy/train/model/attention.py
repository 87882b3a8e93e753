"""Attention of microbatches in models of transformers: the function that they call, and its arguments.

The structure of a packed microbatch, a forest of segments, is a keyword argument of the model's forward pass, which
transformers hands through to the attention function of each layer. A recomputed block therefore has it too. Without a
structure each row is one sequence, and attention is causal. Neither needs a mask, and none is made, with or without
sliding windows. Masks of callers, and the layers of a vision tower, are computed by scaled dot-product attention.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend, attention
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.data.share import TokenShare

PACKED: Final = "starling_packed"
"""Name of the attention function in transformers."""
_OTHER_ATTENTION: Final = ("position_bias", "head_mask", "indexer_topk")
"""Arguments of attention functions that change the attention, and that only other functions of transformers know."""
_WINDOWS: ContextVar[list[int | None] | None] = ContextVar("windows", default=None)


def model_arguments(model: torch.nn.Module, inputs: MicrobatchInputs) -> dict[str, Any]:
    """Return the arguments of a forward pass of `model` over a microbatch; a structure needs a model that takes it."""
    found: dict[str, Any] = {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "use_cache": False,
        **inputs.extra,
    }
    if inputs.structure is not None:
        use_packed(model)
        found |= structured(model, inputs.structure, inputs.backend)
    if inputs.share is not None:
        found["share"] = inputs.share
    return found


def structured(model: Any, structure: Forest, backend: Backend) -> dict[str, Any]:
    """Return the arguments of a forward pass over a packed row."""
    # A mask of four dimensions is handed through unread, where without one transformers would make one of L x L.
    mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    return {"structure": structure, "attention_backend": backend, "attention_mask": mask}


def use_packed(model: Any) -> None:
    """Make `model` use `packed_attention`."""
    if model.config._attn_implementation == PACKED:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    function: Any = packed_attention
    if (
        "torch._dynamo" in sys.modules
    ):  # Compiled blocks call it as it is. Importing this for other models takes a second.
        function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED, function)
    AttentionMaskInterface.register(PACKED, packed_mask)
    model.set_attn_implementation(PACKED)


@contextmanager
def observed_windows() -> Iterator[list[int | None]]:
    """Collect the windows of the layers that compute by `packed_attention`."""
    found: list[int | None] = []
    token = _WINDOWS.set(found)
    try:
        yield found
    finally:
        _WINDOWS.reset(token)


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the mask of a forward pass, see transformers' `sdpa_mask`; None where `packed_attention` needs none.

    That is where all tokens of a row are seen by those behind them, as far as the model's window reaches.
    """
    from transformers.masking_utils import sdpa_mask

    window = getattr(kwargs.get("config"), "sliding_window", None)
    if (
        window is not None
        and kwargs.get("local_size") == window
        and kwargs.get("allow_is_causal_skip", True)
        and kwargs.get("attention_mask") is None
        and kwargs.get("q_length") == kwargs.get("kv_length")
    ):
        return None
    found: Tensor | None = sdpa_mask(*args, **kwargs)
    return found


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    structure: Forest | None = None,
    attention_backend: Backend = "segments",
    share: TokenShare | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by `structure`, or causally in each row where there is none; see `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [R, H, L, D]; one row of T tokens with a structure.
        key: [R, G, L, D], likewise.
        value: [R, G, L, E], likewise.
        attention_mask: see transformers; not read where there is a structure.
        dropout: likewise; 0 but with a mask.
        scaling: factor of the scores; by default the inverse square root of D.
        structure: segments of the row.
        attention_backend: of the computation.
        share: where the tokens are those of this rank.
        sliding_window: of the layer; None for all tokens.
        softcap: bound of the layer's scores.
        s_aux: the layer's sinks, [H].
        is_causal: whether tokens see only those before them; by default what the layer says.
        kwargs: further arguments of the layer.

    Returns:
        [R, L, H, E], and None for the attention weights.

    Raises:
        NotImplementedError: an argument changes the attention in a way that is not computed.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if structure is None or not causal:
        assert share is None, "only models that attend by segments are divided over ranks"
        special, rowwise = softcap is not None or s_aux is not None, causal and attention_mask is None
        if not (rowwise and _needs_segments(query, key, value, sliding_window, special=special)):
            if special:
                raise NotImplementedError("its attention has soft caps or sinks, which are not computed with a mask")
            _note(sliding_window)
            return _sdpa(module, query, key, value, attention_mask, dropout, scaling, is_causal, kwargs)
        structure = Forest.of_documents([query.shape[2]] * query.shape[0])
    for name in _OTHER_ATTENTION:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention has the argument {name}")
    assert not dropout, "models are trained in evaluation mode"
    _note(sliding_window)
    rows = [one.transpose(1, 2).flatten(0, 1) for one in (query, key, value)]
    attend = attention if share is None else share.attend
    output = attend(
        rows[0],
        rows[1],
        rows[2],
        structure,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        backend=attention_backend,
    )
    return output.view(query.shape[0], -1, *output.shape[1:]), None


def _needs_segments(query: Tensor, key: Tensor, value: Tensor, window: int | None, *, special: bool) -> bool:
    """Whether causal rows are computed as documents, by segments: SDPA would be slower, or cannot compute them.

    `special`: the layer has a soft cap or sinks.
    """
    if query.shape[2] != key.shape[2]:
        return False
    is_windowed = window is not None and window < key.shape[2]
    return special or is_windowed or query.shape[-1] != value.shape[-1]


def _note(window: int | None) -> None:
    if (windows := _WINDOWS.get()) is not None:
        windows.append(window)


def _sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(
        module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return output, None

"""Attention of packed microbatches in models of transformers: its registration, and which layout a model can compute.

The structure of a microbatch, a forest of segments, is a keyword argument of the model's forward pass, which
transformers hands through to the attention function of each layer. A recomputed block therefore has it too. A forward
pass without a structure, and the layers of a vision tower, compute as before, by scaled dot-product attention.

Not every model does this: some have layers that carry a state along the row, or attention of their own. Whether the
model at hand does is not looked up in a list but observed, on seven tokens, forward and backward.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import attention
from starling.policy.train.data.packing import Layout, MicrobatchInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

log = structlog.get_logger(__name__)

PACKED: Final = "starling_packed"
"""Name of the attention function in transformers."""
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_OTHER_ATTENTION: Final = ("softcap", "s_aux", "position_bias", "head_mask", "indexer_topk")
"""Arguments of attention functions that change the attention, and that only other functions of transformers know."""
_PROBE: Final = Forest((3, 1, 1, 2), (-1, 0, 1, 0))
"""Two sequences of five tokens, which have three in common."""
_TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of the probe's results, relative to the largest: above rounding, far below a token that is seen by mistake. Norms,
routers and rotary embeddings compute in single precision in models of double precision, too."""
_PROBES: Final = 3
"""Draws of the probe's tokens: rounding may send a token of one to another expert, but not of all."""

_LAYOUTS: Final[WeakKeyDictionary[torch.nn.Module, Layout]] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Layout:
    """Return the layout of microbatches for `model`, which then has the attention function that this needs.

    The first call for a model runs it on a few tokens; the result is cached for the lifetime of the model. A model that
    cannot compute a forest of segments is named once, with the reason.
    """
    if model not in _LAYOUTS:
        reason = _named_reason(model) or _observed_reason(model)
        if reason is not None:
            log.warning(
                "each sequence is trained in a row of its own, and shared prefixes are computed for each: the model "
                "cannot attend by segments",
                model=type(model).__name__,
                reason=reason,
            )
        _LAYOUTS[model] = "forest" if reason is None else "rows"
    return _LAYOUTS[model]


def model_arguments(model: torch.nn.Module, inputs: MicrobatchInputs) -> dict[str, Any]:
    """Return the arguments of a forward pass of `model` over a microbatch; a structure needs a model that takes it."""
    found: dict[str, Any] = {
        "input_ids": inputs.input_ids,
        "position_ids": inputs.position_ids,
        "use_cache": False,
        **inputs.extra,
    }
    if inputs.structure is not None:
        _use_packed(model)
        found |= _structured(model, inputs.structure)
    return found


def _structured(model: Any, structure: Forest) -> dict[str, Any]:
    # A mask of four dimensions is handed through unread, where without one transformers would make one of L x L.
    return {"structure": structure, "attention_mask": torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)}


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    structure: Forest | None = None,
    observed_windows: list[int | None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend by `structure`, or as transformers does where there is none; see `AttentionInterface`.

    Args:
        module: the attention layer.
        query: [1, H, T, D]; without a structure [R, H, L, D].
        key: [1, G, T, D], likewise.
        value: [1, G, T, E], likewise.
        attention_mask: see transformers; not read where there is a structure.
        dropout: likewise; 0 with a structure.
        scaling: factor of the scores; by default the inverse square root of D.
        structure: segments of the row.
        observed_windows: receives the window of the layer.
        kwargs: further arguments of the layer: ``sliding_window`` is its window.

    Returns:
        [1, T, H, E], and None for the attention weights.

    Raises:
        NotImplementedError: there is a structure, and an argument that changes the attention.
    """
    if structure is None or not getattr(module, "is_causal", True):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    for name in _OTHER_ATTENTION:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"its attention has the argument {name}")
    assert not dropout, "models are trained in evaluation mode"
    window: int | None = kwargs.get("sliding_window")
    if observed_windows is not None:
        observed_windows.append(window)
    rows = [one[0].transpose(0, 1) for one in (query, key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention(rows[0], rows[1], rows[2], structure, scale, window=window)[None], None


def _use_packed(model: Any) -> None:
    """Make `model` use `packed_attention`."""
    if model.config._attn_implementation == PACKED:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    function: Any = packed_attention
    if (
        "torch._dynamo" in sys.modules
    ):  # Compiled blocks call it as it is. Importing this for other models takes a second.
        function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    AttentionInterface.register(PACKED, function)
    AttentionMaskInterface.register(PACKED, sdpa_mask)
    model.set_attn_implementation(PACKED)


def _named_reason(model: PreTrainedModel) -> str | None:
    """Return why a model cannot compute a forest by its configuration; None for no known reason."""
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {_FULL, _WINDOWED})
    if others or getattr(model, "_is_stateful", False):
        return f"it has layers of other kinds than full and sliding attention ({', '.join(others) or 'recurrent'})"
    if not model._supports_sdpa:
        return f"its attention is computed by {model.config._attn_implementation!r} only"
    if not model._can_set_attn_implementation():
        return "its code does not use the attention interface of transformers"
    return None


def _observed_reason(model: PreTrainedModel) -> str | None:
    """Compare a forest with its sequences alone; return what is wrong, None for nothing."""
    before = model.config._attn_implementation
    try:
        reason = _differences(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a model raises anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if reason is not None:
        model.set_attn_implementation(before)
    return reason


def _differences(model: PreTrainedModel) -> str | None:
    _use_packed(model)
    paths = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]], device=model.device)
    positions = torch.from_numpy(_PROBE.positions)[None].to(model.device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for _ in range(_PROBES):
        tokens = torch.randint(vocabulary, (1, _PROBE.num_tokens), generator=generator).to(model.device)
        windows: list[int | None] = []
        alone, by_row = _hidden(model, lambda found: found, input_ids=tokens[0][paths])
        packed, by_token = _hidden(
            model,
            lambda found: found[0][paths],
            input_ids=tokens,
            position_ids=positions,
            observed_windows=windows,
            **_structured(model, _PROBE),
        )
        if Counter(windows) != _windows_of(model):
            return "its layers do not hand their windows to the attention function of transformers"
        # What a token of the forest receives is what it receives in each of its sequences.
        summed = torch.zeros_like(by_token[0]).index_add(0, paths.flatten(), by_row.flatten(0, 1))
        if _is_close(packed, alone) and _is_close(by_token[0], summed):
            return None
    return "a forest of segments and its sequences alone differ"


def _is_close(found: Tensor, expected: Tensor) -> bool:
    tolerance = _TOLERANCE.get(found.dtype, 0.05)
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _windows_of(model: PreTrainedModel) -> Counter[int | None]:
    """Return the windows that a model's configuration gives to its layers, counted."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [_WINDOWED] * config.num_hidden_layers
    return Counter(window if kind == _WINDOWED else None for kind in kinds)


def _hidden(model: PreTrainedModel, by_sequence: Callable[[Tensor], Tensor], **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the last hidden states of the model's body by sequence, and a gradient with respect to the embeddings.

    Parameters receive none.
    """
    embedded: list[Tensor] = []

    def observe(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    handle = model.get_input_embeddings().register_forward_hook(observe)
    try:
        with torch.enable_grad():
            hidden = by_sequence(model.base_model(use_cache=False, **arguments)[0])
            weights = torch.linspace(-1.0, 1.0, hidden.numel(), device=hidden.device).view_as(hidden)
            (gradient,) = torch.autograd.grad(hidden, embedded, weights.to(hidden.dtype))
    finally:
        handle.remove()
    return hidden.detach(), gradient

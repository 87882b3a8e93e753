"""Which microbatches a model can compute, and how its attention is computed there.

Not every model takes a forest of segments: some have layers that carry a state along the row, or attention of their
own. Whether the model at hand does is not looked up in a list but observed, on seven tokens, forward and backward, with
each backend that the device has. One that does not is trained with a row for each sequence, without masks where its
attention can do without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor

from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend, BackendChoice, backends_for
from starling.policy.train.data.packing import Layout
from starling.policy.train.model.attention import PACKED, observed_windows, structured, use_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

log = structlog.get_logger(__name__)

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_PROBE: Final = Forest((3, 1, 1, 2), (-1, 0, 1, 0))
"""Two sequences of five tokens, which have three in common."""
_PATHS: Final = ((0, 1, 2, 3, 4), (0, 1, 2, 5, 6))
_TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of the probe's results, relative to the largest: above rounding, far below a token that is seen by mistake. Norms,
routers and rotary embeddings compute in single precision in models of double precision, too."""
_PROBES: Final = 3
"""Draws of the probe's tokens: rounding may send a token of one to another expert, but not of all."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the microbatches of a model are laid out and computed."""

    layout: Layout
    backend: Backend
    longest: int | None = None
    """Tokens beyond which the model's own code would make a mask with an element for each pair; None for no such
    limit that is known."""


_PLANS: Final[WeakKeyDictionary[torch.nn.Module, AttentionPlan]] = WeakKeyDictionary()


def attention_plan(model: PreTrainedModel, choice: BackendChoice = "auto") -> AttentionPlan:
    """Return the plan for `model`, which then has the attention function that this needs.

    The first call for a model runs it on a few tokens; the result is cached for the lifetime of the model. A model that
    cannot compute a forest of segments is named once, with the reason.

    Args:
        model: to be trained, on its device.
        choice: backend of the attention.

    Raises:
        ConfigError: the device does not have the chosen backend.
    """
    if model not in _PLANS:
        _PLANS[model] = _plan(model, choice)
    return _PLANS[model]


def _plan(model: PreTrainedModel, choice: BackendChoice) -> AttentionPlan:
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or 0
    softcap = getattr(config, "attn_logit_softcapping", None)
    backends = backends_for(choice, model.device, model.dtype, head_dim, softcap=softcap)
    before, reason = model.config._attn_implementation, _named_reason(model)
    if before == PACKED:  # the configuration of another model, which could compute by it
        before = "sdpa" if model._supports_sdpa else "eager"
    if reason is None:
        for backend in backends:
            reason = _observed_reason(model, lambda own: _forest_differs(model, own), backend)
            if reason is None:
                return AttentionPlan("forest", backend)
            if backend != backends[-1]:
                log.warning(
                    "an attention backend is not used: it does not compute the model", backend=backend, reason=reason
                )
    masked = _without_interface(model) or _observed_reason(model, lambda _: _rows_differ(model), backends[-1])
    longest = min(_limits(config, windows=masked is not None), default=None)
    if masked is not None and model.config._attn_implementation != before:
        model.set_attn_implementation(before)
    log.warning(
        "each sequence is trained in a row of its own, and shared prefixes are computed for each: the model cannot "
        "attend by segments",
        model=type(model).__name__,
        reason=reason,
        longest=longest,
    )
    return AttentionPlan("rows", backends[-1], longest)


def _limits(config: Any, *, windows: bool) -> Iterator[int]:
    """Yield the tokens beyond which transformers makes masks for the layers of a model."""
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        yield config.attention_chunk_size
    if windows and (_WINDOWED in kinds or not kinds) and getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
        if window is not None:
            yield window


def _without_interface(model: PreTrainedModel) -> str | None:
    if not model._can_set_attn_implementation():
        return "its code does not use the attention interface of transformers"
    return None


def _named_reason(model: PreTrainedModel) -> str | None:
    """Return why a model cannot compute a forest by its configuration; None for no known reason."""
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {_FULL, _WINDOWED})
    if others or getattr(model, "_is_stateful", False):
        return f"it has layers of other kinds than full and sliding attention ({', '.join(others) or 'recurrent'})"
    return _without_interface(model)


def _observed_reason(
    model: PreTrainedModel, differences: Callable[[Backend], str | None], backend: Backend
) -> str | None:
    """Compare the model with its own attention; return what is wrong, None for nothing."""
    try:
        return differences(backend)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the code of a model raises anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _forest_differs(model: PreTrainedModel, backend: Backend) -> str | None:
    """Compare a forest with its sequences alone, computed by the model's own code."""
    paths = torch.tensor(_PATHS, device=model.device)
    positions = torch.from_numpy(_PROBE.positions)[None].to(model.device)
    for tokens in _probes(model):
        model.set_attn_implementation("eager")  # the only one that knows all arguments of the layers
        alone, by_row = _hidden(model, lambda found: found, input_ids=tokens[0][paths])
        use_packed(model)
        with observed_windows() as windows:
            packed, by_token = _hidden(
                model,
                lambda found: found[0][paths],
                input_ids=tokens,
                position_ids=positions,
                **structured(model, _PROBE, backend),
            )
        if Counter(windows) != _windows_of(model):
            return "its layers do not hand their windows to the attention function of transformers"
        # What a token of the forest receives is what it receives in each of its sequences.
        summed = torch.zeros_like(by_token[0]).index_add(0, paths.flatten(), by_row.flatten(0, 1))
        if _is_close(packed, alone) and _is_close(by_token[0], summed):
            return None
    return "a forest of segments and its sequences alone differ"


def _rows_differ(model: PreTrainedModel) -> str | None:
    """Compare rows without a mask with the model's own code, and see that windows do not depend on a mask."""
    for tokens in _probes(model):
        rows = tokens[0][torch.tensor(_PATHS, device=model.device)]
        model.set_attn_implementation("eager")
        expected, own = _hidden(model, lambda found: found, input_ids=rows)
        use_packed(model)
        with observed_windows() as windows:
            found, gradient = _hidden(model, lambda found: found, input_ids=rows)
        if not windows:
            return "it has no layers that use the attention interface of transformers"
        expected_windows = _windows_of(model)
        del expected_windows[None]  # also those of layers without attention
        if Counter(window for window in windows if window is not None) != expected_windows:
            return "its layers do not hand their windows to the attention function of transformers"
        if _is_close(found, expected) and _is_close(gradient, own):
            return None
    return "rows without a mask differ from its own attention"


def _probes(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield draws of the probe's tokens, [1, 7]."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    for _ in range(_PROBES):
        yield torch.randint(vocabulary, (1, _PROBE.num_tokens), generator=generator).to(model.device)


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

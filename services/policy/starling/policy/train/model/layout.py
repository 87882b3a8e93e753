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

from starling.algo.attention.interface import Backend, BackendChoice, backends_for
from starling.algo.attention.probe import (
    FULL,
    PROBE,
    WINDOWED,
    WINDOWS_DIFFER,
    is_close,
    layer_windows,
    probe_paths,
    probe_tokens,
)
from starling.policy.train.data.packing import Layout
from starling.policy.train.model.attention import PACKED, observed_windows, structured, use_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the microbatches of a model are laid out and computed."""

    layout: Layout
    backend: Backend
    longest: int | None = None
    """Tokens beyond which the model's own code would make a mask with an element for each pair; None for no such
    limit that is known."""
    reason: str | None = None
    """Why the model does not attend by segments; None where it does."""


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


def copy_plan(sample: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `model` have the plan, and the attention function, that `attention_plan` has found for a sample of it."""
    _PLANS[model] = _PLANS[sample]
    if sample.config._attn_implementation == PACKED:
        use_packed(model)
    elif model.config._attn_implementation != sample.config._attn_implementation:
        model.set_attn_implementation(sample.config._attn_implementation)


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
    return AttentionPlan("rows", backends[-1], longest, reason)


def _limits(config: Any, *, windows: bool) -> Iterator[int]:
    """Yield the tokens beyond which transformers makes masks for the layers of a model."""
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" in kinds:
        yield config.attention_chunk_size
    if windows and (WINDOWED in kinds or not kinds) and getattr(config, "use_sliding_window", True):
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
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, WINDOWED})
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
    paths = probe_paths(model.device)
    positions = torch.from_numpy(PROBE.positions)[None].to(model.device)
    for tokens in probe_tokens(model):
        model.set_attn_implementation("eager")  # the only one that knows all arguments of the layers
        alone, by_row = hidden_and_gradient(model, lambda found: found, input_ids=tokens[paths])
        use_packed(model)
        with observed_windows() as windows:
            packed, by_token = hidden_and_gradient(
                model,
                lambda found: found[0][paths],
                input_ids=tokens[None],
                position_ids=positions,
                **structured(model, PROBE, backend),
            )
        if Counter(windows) != Counter(layer_windows(model.config)):
            return WINDOWS_DIFFER
        # What a token of the forest receives is what it receives in each of its sequences.
        summed = torch.zeros_like(by_token[0]).index_add(0, paths.flatten(), by_row.flatten(0, 1))
        if is_close(packed, alone, model.dtype) and is_close(by_token[0], summed, model.dtype):
            return None
    return "a forest of segments and its sequences alone differ"


def _rows_differ(model: PreTrainedModel) -> str | None:
    """Compare rows without a mask with the model's own code, and see that windows do not depend on a mask."""
    for tokens in probe_tokens(model):
        rows = tokens[probe_paths(model.device)]
        model.set_attn_implementation("eager")
        expected, own = hidden_and_gradient(model, lambda found: found, input_ids=rows)
        use_packed(model)
        with observed_windows() as windows:
            found, gradient = hidden_and_gradient(model, lambda found: found, input_ids=rows)
        if not windows:
            return "it has no layers that use the attention interface of transformers"
        observed, declared = Counter(windows), Counter(layer_windows(model.config))
        del observed[None], declared[None]  # also those of layers without attention
        if observed != declared:
            return WINDOWS_DIFFER
        if is_close(found, expected, model.dtype) and is_close(gradient, own, model.dtype):
            return None
    return "rows without a mask differ from its own attention"


def hidden_and_gradient(
    model: PreTrainedModel, by_sequence: Callable[[Tensor], Tensor], **arguments: Any
) -> tuple[Tensor, Tensor]:
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
            # Of a sum: autograd imports sympy, half a second, for the gradient of a tensor.
            (gradient,) = torch.autograd.grad((hidden * weights.to(hidden.dtype)).sum(), embedded)
    finally:
        handle.remove()
    return hidden.detach(), gradient

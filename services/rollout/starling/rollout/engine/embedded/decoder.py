"""Forward pass of Llama, Mistral, Qwen2 and Qwen3 without the modules of transformers.

A decode step of a small model, or of few rows, is bound by what surrounds its matrix products: calls of modules, masks,
casts, copies of rotated halves. Here each layer computes what its modules would, in the same order and types, with the
attention left to the caller. The weights stay those of the modules, so that adoptions need not know of this.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import PreTrainedModel

from starling.algo.attention.probe import layer_windows
from starling.rollout.engine.embedded.attention import matches_model

PLAIN_MODELS: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_LINEARS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP_LINEARS: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")

TABLE_POSITIONS: Final = 1 << 14
"""Longest sequence whose rotations are kept: 16 MiB of a head of 128."""
MIN_TABLE_POSITIONS: Final = 256
Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines with the sign of the exchanged halves, [T, 1, D]."""
Attend = Callable[[int, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""Attention of a layer: its number, queries [T, H, D], keys and values [T, G, D] of the tokens, the factor of the
scores and the window; returns [T, H, D]."""


def plain_decoder(model: PreTrainedModel) -> PlainDecoder | None:
    """Return the decoder of `model`, whose logits were compared with the model's; None if it has none.

    Adapters, quantised layers and code from a model's folder are left to their modules.
    """
    of_transformers = type(model).__module__.startswith("transformers.models.")
    if not of_transformers or type(model).__name__ not in PLAIN_MODELS or not _has_plain_layers(model):
        return None
    decoder = PlainDecoder(model)
    return decoder if matches_model(model, decoder.packed_logits) else None


class PlainDecoder:
    """The layers of a model. Used under `torch.inference_mode`."""

    def __init__(self, model: Any) -> None:
        """Take the layers of `model`, one of `PLAIN_MODELS`."""
        self._model, self._head = model.model, model.lm_head
        self._layers = [_Layer(layer) for layer in model.model.layers]
        self._windows = layer_windows(model.config)
        self._table: Rotation | None = None
        # With other types the frequencies depend on the longest position of a batch.
        self._has_table = getattr(model.model.rotary_emb, "rope_type", "") in ("default", "linear", "llama3", "yarn")

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the last layer's normalised output, [T, C].

        Args:
            token_ids, positions: int64 [T].
            attend: the attention, called once per layer in their order.
        """
        states: Tensor = self._model.embed_tokens(token_ids)
        rotation = self._rotation(states, positions)
        for number, (layer, window) in enumerate(zip(self._layers, self._windows, strict=True)):
            states = layer(states, rotation, number, attend, window)
        return _normalised(states, self._model.norm)

    def _rotation(self, states: Tensor, positions: Tensor) -> Rotation:
        """Return the rotation of each position; on a CPU from a table, which grows with the longest sequence."""
        if not self._has_table or positions.device.type != "cpu":
            return self._computed(states, positions)
        num = int(positions.max()) + 1
        if num > TABLE_POSITIONS:
            return self._computed(states, positions)
        if self._table is None or len(self._table[0]) < num or self._table[0].dtype != states.dtype:
            length = min(TABLE_POSITIONS, max(MIN_TABLE_POSITIONS, 2 * num))
            self._table = self._computed(states, torch.arange(length, device=positions.device))
        cos, signed = self._table
        return cos.index_select(0, positions), signed.index_select(0, positions)

    def _computed(self, states: Tensor, positions: Tensor) -> Rotation:
        cos, sin = (table[0, :, None] for table in self._model.rotary_emb(states[None], positions[None]))
        half = sin.shape[-1] // 2
        # The rotation takes the halves of a head exchanged, the second one negated.
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [T, vocabulary] after tokens whose `hidden` [T, C] is given."""
        return linear(hidden, self._head.weight, self._head.bias)

    def packed_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the logits after each token, [T, vocabulary]."""
        return self.logits(self.hidden(token_ids, positions, attend))


class _Layer:
    """One layer of a plain decoder."""

    def __init__(self, layer: Any) -> None:
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._has_head_norms = hasattr(layer.self_attn, "q_norm")

    def __call__(self, states: Tensor, rotation: Rotation, number: int, attend: Attend, window: int | None) -> Tensor:
        own, mlp = self._attention, self._mlp
        inputs = _normalised(states, self._norms[0])
        query, key, value = (
            _linear(inputs, part).view(len(inputs), -1, own.head_dim) for part in (own.q_proj, own.k_proj, own.v_proj)
        )
        if self._has_head_norms:
            query, key = _normalised(query, own.q_norm), _normalised(key, own.k_norm)
        rotated = _rotated(torch.cat((query, key), dim=1), *rotation)
        heads = query.shape[1]
        attended = attend(number, rotated[:, :heads], rotated[:, heads:], value, own.scaling, window)
        states = states + _linear(attended.reshape(len(inputs), -1), own.o_proj)
        inputs = _normalised(states, self._norms[1])
        gated = mlp.act_fn(_linear(inputs, mlp.gate_proj)).mul_(_linear(inputs, mlp.up_proj))
        return states.add_(_linear(gated, mlp.down_proj))


def _linear(inputs: Tensor, module: Any) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _normalised(states: Tensor, norm: Any) -> Tensor:
    """Return the root-mean-square norm; the weight multiplies what was rounded, as in transformers."""
    return rms_norm(states, states.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)


def _rotated(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Return `heads` [T, H, D] with their positions (Su et al., arXiv:2104.09864, halves instead of pairs)."""
    half = heads.shape[-1] // 2
    exchanged = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos).add_(exchanged.mul_(signed_sin))


def _has_plain_layers(model: Any) -> bool:
    """Return whether all layers have the modules that `_Layer` reads, and no others in their place."""
    try:
        layers = [layer.get_submodule(name) for layer in model.model.layers for name in (*_LINEARS, *_MLP_LINEARS)]
        norms = [layer.get_submodule(name) for layer in model.model.layers for name in _NORMS]
        attrgetter("embed_tokens", "rotary_emb", "norm")(model.model)
        for layer in model.model.layers:
            attrgetter("self_attn.head_dim", "self_attn.scaling", "mlp.act_fn")(layer)
    except AttributeError:
        return False
    is_linear = all(type(one) is nn.Linear for one in (*layers, model.lm_head))
    return is_linear and all(hasattr(norm, "variance_epsilon") for norm in (*norms, model.model.norm))

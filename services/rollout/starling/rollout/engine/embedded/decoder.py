"""Forward pass of Llama, Mistral, Qwen2 and Qwen3 without the modules of transformers.

A decode step of a small model, or of few rows, is bound by what surrounds its matrix products: calls of modules, masks,
casts, copies of rotated halves. Here each layer computes what its modules would, in the same order and types, with the
attention left to the caller. The weights stay those of the modules, so that adoptions need not know of this. On a CPU
those that multiply the same input lie in one tensor, and one product computes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
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
_KINDS: Final = ("weight", "bias")
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
        self._heads = _Joined(layer.self_attn, "q_proj", "k_proj", "v_proj")
        self._gates = _Joined(layer.mlp, "gate_proj", "up_proj")

    def __call__(self, states: Tensor, rotation: Rotation, number: int, attend: Attend, window: int | None) -> Tensor:
        own, mlp = self._attention, self._mlp
        projected = self._heads(_normalised(states, self._norms[0]))
        query_key, value = (part.view(len(states), -1, own.head_dim) for part in projected)
        num_queries = query_key.shape[1] - value.shape[1]  # There are as many keys as values.
        if self._has_head_norms:
            query_key = _unit(query_key, own.q_norm.variance_epsilon)
            query_key[:, :num_queries].mul_(own.q_norm.weight)
            query_key[:, num_queries:].mul_(own.k_norm.weight)
        rotated = _rotated(query_key, *rotation)
        attended = attend(number, rotated[:, :num_queries], rotated[:, num_queries:], value, own.scaling, window)
        states = states + _linear(attended.reshape(len(states), -1), own.o_proj)
        gate, up = self._gates(_normalised(states, self._norms[1]))
        return states.add_(_linear(mlp.act_fn(gate).mul_(up), mlp.down_proj))


class _Joined:
    """Linear layers of one input, whose weights become parts of one tensor if they are on a CPU.

    The modules keep their parameters, with other memory, so what is written into them changes the product. Once a
    parameter has been replaced, the layers are computed one by one, and the joined tensors are freed.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        """Join the modules `names` of `owner`."""
        self._modules = attrgetter(*names)
        self._owner = owner
        weights, biases = ([getattr(one, kind) for one in self._modules(owner)] for kind in _KINDS)
        has_biases = any(one is not None for one in biases)
        self._bias = _joined(biases) if has_biases else None
        self._weight = None if has_biases and self._bias is None else _joined(weights)
        self._addresses = self._addresses_of(self._modules(owner))
        self._num_first = sum(len(one) for one in weights[:-1])

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of all layers but the last side by side, and those of the last: [T, features] each."""
        modules = self._modules(self._owner)
        if self._weight is not None and self._addresses_of(modules) == self._addresses:
            outputs = linear(inputs, self._weight, self._bias)
            return outputs[:, : self._num_first], outputs[:, self._num_first :]
        # For good: other tensors may get the addresses of what is freed.
        self._weight = self._bias = None
        *first, last = (_linear(inputs, one) for one in modules)
        return torch.cat(first, dim=-1) if len(first) > 1 else first[0], last

    @staticmethod
    def _addresses_of(modules: Sequence[Any]) -> list[int | None]:
        # No other tensor has an address of the joined ones while they exist.
        parameters = [getattr(one, kind) for one in modules for kind in _KINDS]
        return [None if one is None else one.data_ptr() for one in parameters]


def _joined(parameters: Sequence[Any]) -> Tensor | None:
    """Move `parameters` into one tensor, and return it; None if they cannot be moved."""
    known = {id(one): one for one in parameters if type(one) is nn.Parameter}
    if len(known) < len(parameters) or any(one.device.type != "cpu" for one in parameters):
        return None
    if len({one.dtype for one in parameters}) > 1 or any(one.is_inference() for one in parameters):
        return None
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat(list(parameters))
        for parameter, part in zip(parameters, torch.split(joined, [len(one) for one in parameters]), strict=True):
            parameter.data = part
    return joined


def _linear(inputs: Tensor, module: Any) -> Tensor:
    return linear(inputs, module.weight, module.bias)


def _normalised(states: Tensor, norm: Any) -> Tensor:
    """Return the root-mean-square norm; the weight multiplies what was rounded, as in transformers."""
    return _unit(states, norm.variance_epsilon).mul_(norm.weight)


def _unit(states: Tensor, epsilon: float) -> Tensor:
    """Return `states` [..., C] divided by their root mean square."""
    width = states.shape[-1]
    if states.device.type != "cpu" or states.dtype not in (torch.float32, torch.float64):
        return rms_norm(states, (width,), None, epsilon)
    # A product computes the mean of few elements in half the time of a reduction.
    column, offset = _mean_and_epsilon(width, epsilon, states.dtype)
    return states * linear(states * states, column, offset).rsqrt_()


@lru_cache(maxsize=16)
def _mean_and_epsilon(width: int, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.full((1, width), 1 / width, dtype=dtype), torch.full((1,), epsilon, dtype=dtype)


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

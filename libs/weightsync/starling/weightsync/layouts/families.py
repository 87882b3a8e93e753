"""Model families: names and shapes of the tensors of a model, from its configuration, and how parallelism may cut them.

One function per family lists the canonical tensors, by the names of the published checkpoints; vision towers, which
turn patches into tokens before the decoder, come from the `vision_config`. `FAMILIES` adds the differences between
families in a module's own parameters: how transformers stacks and renames tensors, and which ones vLLM fuses. Neither
weights nor torch are needed, so a model can be planned before it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.layouts.weights import Config, Cut, Entries, Model, Tensors, Weight
from starling.weightsync.plan.layout import ITEM_BYTES


def qwen2_tower(config: Config, dtype: str) -> tuple[Weight, ...]:
    """List the tower of Qwen2-VL.

    Tensor parallelism in vLLM cuts the rows of its joined queries, keys and values without regard to which they are.
    """
    read, make = _vision(config), Tensors(dtype, tower=True)
    hidden, heads, at = read.size("embed_dim"), read.size("num_heads"), "visual"
    weights = [_patches(read, make, at, hidden, patch_size=14)]
    for block in (f"{at}.blocks.{i}" for i in range(read.size("depth"))):
        weights += _norms(make, block, hidden)
        weights += make.linear(
            f"{block}.attn.qkv", 3 * hidden, hidden, cut="rows", units=3 * heads, layer=-1, bias=True
        )
        weights += make.linear(f"{block}.attn.proj", hidden, hidden, cut="columns", units=heads, layer=-1, bias=True)
        weights += _pair(make, f"{block}.mlp.fc1", f"{block}.mlp.fc2", hidden, hidden * read.size("mlp_ratio"), hidden)
    weights += [make(f"{at}.merger.ln_q.{part}", hidden) for part in ("weight", "bias")]
    weights += _merger(read, make, f"{at}.merger.mlp.0", f"{at}.merger.mlp.2", hidden, read.size("hidden_size"))
    return tuple(weights)


def qwen2_5_tower(config: Config, dtype: str) -> tuple[Weight, ...]:
    """List the tower of Qwen2.5-VL."""
    read, make = _vision(config), Tensors(dtype, tower=True)
    hidden, at = read.size("hidden_size"), "visual"
    weights = [_patches(read, make, at, hidden, patch_size=14)]
    for block in (f"{at}.blocks.{i}" for i in range(read.size("depth"))):
        weights += [make(f"{block}.norm{n}.weight", hidden) for n in (1, 2)]
        weights += _attention(make, block, hidden, read.size("num_heads"))
        weights += make.gated(f"{block}.mlp", hidden, read.size("intermediate_size"), layer=-1, bias=True)
    weights.append(make(f"{at}.merger.ln_q.weight", hidden))
    weights += _merger(read, make, f"{at}.merger.mlp.0", f"{at}.merger.mlp.2", hidden, read.size("out_hidden_size"))
    return tuple(weights)


def qwen3_tower(config: Config, dtype: str) -> tuple[Weight, ...]:
    """List the tower of Qwen3-VL, and the deepstack mergers that feed its features into the decoder's first layers."""
    read, make = _vision(config), Tensors(dtype, tower=True)
    hidden, at = read.size("hidden_size"), "model.visual"
    merged, out = hidden * read.size("spatial_merge_size", 2) ** 2, read.size("out_hidden_size")
    weights = [
        _patches(read, make, at, hidden, patch_size=16),
        make(f"{at}.patch_embed.proj.bias", hidden),
        make(f"{at}.pos_embed.weight", read.size("num_position_embeddings"), hidden),
    ]
    for block in (f"{at}.blocks.{i}" for i in range(read.size("depth"))):
        weights += _norms(make, block, hidden)
        weights += _attention(make, block, hidden, read.size("num_heads"))
        names = (f"{block}.mlp.linear_fc1", f"{block}.mlp.linear_fc2")
        weights += _pair(make, *names, hidden, read.size("intermediate_size"), hidden)
    deep = range(len(read.indices("deepstack_visual_indexes")))
    mergers = [(f"{at}.merger", hidden), *((f"{at}.deepstack_merger_list.{i}", merged) for i in deep)]
    for merger, normed in mergers:
        weights += [make(f"{merger}.norm.{part}", normed) for part in ("weight", "bias")]
        weights += _merger(read, make, f"{merger}.linear_fc1", f"{merger}.linear_fc2", hidden, out)
    return tuple(weights)


def _vision(config: Config) -> Entries:
    return Entries(config.get("vision_config") or {})


def _patches(read: Entries, make: Tensors, at: str, hidden: int, *, patch_size: int) -> Weight:
    """Return the patch embedding convolution; `patch_size` is the default of the family."""
    patch, frames = read.size("patch_size", patch_size), read.size("temporal_patch_size", 2)
    channels = read.size("in_channels", read.size("in_chans", 3))
    return make(f"{at}.patch_embed.proj.weight", hidden, channels, frames, patch, patch)


def _norms(make: Tensors, block: str, hidden: int) -> Iterator[Weight]:
    yield from (make(f"{block}.norm{n}.{part}", hidden) for n in (1, 2) for part in ("weight", "bias"))


def _attention(make: Tensors, block: str, hidden: int, heads: int) -> Iterator[Weight]:
    """Yield an attention with joined queries, keys and values; tensor parallelism cuts each of the three."""
    for name, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
        yield make(f"{block}.attn.qkv.{name}", *shape, cut="rows", units=3 * heads, blocks=3)
    yield from make.linear(f"{block}.attn.proj", hidden, hidden, cut="columns", units=heads, layer=-1, bias=True)


def _pair(make: Tensors, first: str, second: str, hidden: int, inner: int, out: int) -> Iterator[Weight]:
    """Yield two consecutive projections."""
    yield from make.linear(first, inner, hidden, cut="rows", layer=-1, bias=True)
    yield from make.linear(second, out, inner, cut="columns", layer=-1, bias=True)


def _merger(read: Entries, make: Tensors, first: str, second: str, hidden: int, out: int) -> Iterator[Weight]:
    """Yield the merger of neighbouring patches into one token."""
    merged = hidden * read.size("spatial_merge_size", 2) ** 2
    yield from _pair(make, first, second, merged, merged, out)


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that holds several canonical tensors of one module, concatenated along dim 0.

    It exists only if all its members do.
    """

    members: tuple[str, ...]
    """The last parts of the tensors' names before `.weight` or `.bias`, in order."""
    name: str
    """Name of the parameter that replaces them."""
    stacked: bool = False
    """Members of all experts are stacked along a new first dim, and `.weight` is dropped."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of one model family."""

    weights: Callable[[Config, str], Model]
    transformers: tuple[Fusion, ...] = ()
    """Fused parameters of the class in transformers."""
    transformers_prefixes: tuple[tuple[str, str], ...] = ()
    """Prefixes of canonical names and their replacements in transformers; the first match applies."""
    vllm: tuple[Fusion, ...] = ()
    """Fused parameters of the class in vLLM."""
    vllm_prefixes: tuple[tuple[str, str], ...] = ()
    vllm_repeats_ends: bool = False
    """vLLM has the tensors before and after the layers in every pipeline stage, even where it does not use them."""


def model_of(config: Config, dtype: str = "") -> Model:
    """List the canonical tensors of a model.

    Args:
        config: the contents of its `config.json`.
        dtype: element type of the weights; by default the one in the configuration, else bfloat16.

    Raises:
        WeightsError: an unknown family, a missing or invalid entry, or an unsupported element type.
    """
    family = family_of(config)
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"Element type {dtype} is not supported; choose one of {', '.join(ITEM_BYTES)}.")
    return family.weights(config, dtype)


def family_of(config: Config) -> Family:
    """Return the family that `model_type` of the configuration names.

    Raises:
        WeightsError: a family without a table.
    """
    kind = str(config.get("model_type", ""))
    family = FAMILIES.get(kind)
    if family is None:
        raise WeightsError(
            f"There is no table of tensors for model type {kind!r}, only for {', '.join(FAMILIES)}; "
            "make the layout from the module's own tensors instead."
        )
    return family


class _Text(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between the decoders with ordinary attention."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False


def _decoder(
    config: Config,
    dtype: str,
    family: str,
    text: _Text,
    *,
    num_experts: int = 0,
    sparse: Callable[[int], bool] = lambda _: False,
) -> Model:
    """List a decoder with grouped-query attention and gated feed-forward blocks, some of them of experts."""
    read, make = Entries(config), Tensors(dtype)
    hidden, num_layers, heads = (
        read.size("hidden_size"),
        read.size("num_hidden_layers"),
        read.size("num_attention_heads"),
    )
    kv_heads = read.size("num_key_value_heads", heads)
    head = read.size("head_dim", hidden // max(heads, 1))
    first, after = make.ends(read.size("vocab_size"), hidden, read.flag("tie_word_embeddings"))
    weights = [first]
    for i in range(num_layers):
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        projections: tuple[tuple[str, Cut, int], ...] = (
            ("q", "rows", heads),
            ("k", "key_value", kv_heads),
            ("v", "key_value", kv_heads),
        )
        for name, cut, count in projections:
            weights += make.linear(
                f"{attention}.{name}_proj", count * head, hidden, cut=cut, units=count, layer=i, bias=text.qkv_bias
            )  # fmt: skip
        weights += make.linear(
            f"{attention}.o_proj", hidden, heads * head, cut="columns", units=heads, layer=i, bias=text.output_bias
        )
        if text.head_norms:
            weights += [make(f"{attention}.{name}_norm.weight", head, layer=i) for name in ("q", "k")]
        if sparse(i):
            weights.append(make(f"{at}.mlp.gate.weight", num_experts, hidden, layer=i))
            weights += make.experts(f"{at}.mlp", hidden, read.size("moe_intermediate_size"), num_experts, layer=i)
        else:
            weights += make.gated(f"{at}.mlp", hidden, read.size("intermediate_size"), layer=i, bias=text.mlp_bias)
        weights += [make(f"{at}.{name}_layernorm.weight", hidden, layer=i) for name in ("input", "post_attention")]
    weights += after
    return Model(family=family, num_layers=num_layers, num_experts=num_experts, weights=tuple(weights))


def _llama(config: Config, dtype: str) -> Model:
    bias = Entries(config).flag("attention_bias")
    text = _Text(qkv_bias=bias, output_bias=bias, mlp_bias=Entries(config).flag("mlp_bias"))
    return _decoder(config, dtype, "llama", text)


def _qwen2(config: Config, dtype: str) -> Model:
    return _decoder(config, dtype, "qwen2", _Text(qkv_bias=True))


def _qwen3(config: Config, dtype: str) -> Model:
    bias = Entries(config).flag("attention_bias")
    return _decoder(config, dtype, "qwen3", _Text(qkv_bias=bias, output_bias=bias, head_norms=True))


def _qwen3_moe(config: Config, dtype: str) -> Model:
    read = Entries(config)
    bias = read.flag("attention_bias")
    num_experts, step, dense = (
        read.num_experts("num_experts"),
        read.size("decoder_sparse_step", 1),
        read.indices("mlp_only_layers"),
    )
    return _decoder(
        config,
        dtype,
        "qwen3_moe",
        _Text(qkv_bias=bias, output_bias=bias, head_norms=True),
        num_experts=num_experts,
        sparse=lambda layer: layer not in dense and num_experts > 0 and (layer + 1) % max(step, 1) == 0,
    )


def _qwen2_vl(config: Config, dtype: str) -> Model:
    """List a vision tower and a Qwen2 decoder."""
    return _with_tower(_qwen2(_text_entries(config), dtype), "qwen2_vl", qwen2_tower(config, dtype))


def _qwen2_5_vl(config: Config, dtype: str) -> Model:
    """List a vision tower and a Qwen2 decoder."""
    return _with_tower(_qwen2(_text_entries(config), dtype), "qwen2_5_vl", qwen2_5_tower(config, dtype))


def _qwen3_vl(config: Config, dtype: str) -> Model:
    """List a vision tower with deepstack mergers, and a Qwen3 decoder."""
    decoder = _renamed(_qwen3(_text_entries(config), dtype), "model.", "model.language_model.")
    return _with_tower(decoder, "qwen3_vl", qwen3_tower(config, dtype))


def _qwen3_vl_moe(config: Config, dtype: str) -> Model:
    """List the same with a mixture-of-experts decoder.

    Published files hold all experts of a layer in one tensor, transposed, and those that transformers writes in one
    that is not. Here each expert has its own, as in the files of `qwen3_moe`: the parameters of trainers and engines
    consist of the same rows.
    """
    decoder = _renamed(_qwen3_moe(_text_entries(config), dtype), "model.", "model.language_model.")
    return _with_tower(decoder, "qwen3_vl_moe", qwen3_tower(config, dtype))


def _text_entries(config: Config) -> Config:
    """Return the entries of the decoder: in `text_config` or, in older files, at the top level."""
    text = {**config, **(config.get("text_config") or {})}
    # A tie belongs to the whole model: the text part of the configuration may or may not repeat it.
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return text


def _with_tower(decoder: Model, family: str, tower: Sequence[Weight]) -> Model:
    """Return a decoder with a vision tower before it."""
    return msgspec.structs.replace(decoder, family=family, weights=(*tower, *decoder.weights))


def _renamed(model: Model, before: str, now: str) -> Model:
    """Return `model` with another prefix of names."""

    def name(given: str) -> str:
        return now + given.removeprefix(before) if given.startswith(before) else given

    weights = []
    for weight in model.weights:
        spec = msgspec.structs.replace(weight.spec, name=name(weight.spec.name), same_as=name(weight.spec.same_as))
        weights.append(msgspec.structs.replace(weight, spec=spec))
    return msgspec.structs.replace(model, weights=tuple(weights))


def _deepseek_v3(config: Config, dtype: str) -> Model:
    """List a decoder with latent attention and routed and shared experts; layers for multi-token prediction are not."""
    read, make = Entries(config), Tensors(dtype)
    hidden, num_layers, heads = (
        read.size("hidden_size"),
        read.size("num_hidden_layers"),
        read.size("num_attention_heads"),
    )
    nope, rope, value = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim"), read.size("v_head_dim")
    q_rank, kv_rank, bias = read.size("q_lora_rank", 0), read.size("kv_lora_rank"), read.flag("attention_bias")
    num_experts, inner = read.num_experts("n_routed_experts"), read.size("moe_intermediate_size")
    first, after = make.ends(read.size("vocab_size"), hidden, read.flag("tie_word_embeddings"))
    weights = [first]
    for i in range(num_layers):
        at = f"model.layers.{i}"
        attention = f"{at}.self_attn"
        if q_rank:
            weights += make.linear(f"{attention}.q_a_proj", q_rank, hidden, cut="whole", layer=i, bias=bias)
            weights.append(make(f"{attention}.q_a_layernorm.weight", q_rank, layer=i))
            weights += make.linear(
                f"{attention}.q_b_proj", heads * (nope + rope), q_rank, cut="rows", units=heads, layer=i
            )
        else:
            weights += make.linear(
                f"{attention}.q_proj", heads * (nope + rope), hidden, cut="rows", units=heads, layer=i
            )
        latent = f"{attention}.kv_a_proj_with_mqa"
        weights += make.linear(latent, kv_rank + rope, hidden, cut="whole", layer=i, bias=bias)
        weights.append(make(f"{attention}.kv_a_layernorm.weight", kv_rank, layer=i))
        weights += make.linear(
            f"{attention}.kv_b_proj", heads * (nope + value), kv_rank, cut="rows", units=heads, layer=i
        )
        weights += make.linear(
            f"{attention}.o_proj", hidden, heads * value, cut="columns", units=heads, layer=i, bias=bias
        )
        if num_experts and i >= read.size("first_k_dense_replace", 0):
            weights.append(make(f"{at}.mlp.gate.weight", num_experts, hidden, layer=i))
            weights.append(make(f"{at}.mlp.gate.e_score_correction_bias", num_experts, layer=i, dtype="float32"))
            weights += make.experts(f"{at}.mlp", hidden, inner, num_experts, layer=i)
            shared = read.size("n_shared_experts", 0)
            if shared:
                weights += make.gated(f"{at}.mlp.shared_experts", hidden, inner * shared, layer=i)
        else:
            weights += make.gated(f"{at}.mlp", hidden, read.size("intermediate_size"), layer=i)
        weights += [make(f"{at}.{name}_layernorm.weight", hidden, layer=i) for name in ("input", "post_attention")]
    weights += after
    return Model(family="deepseek_v3", num_layers=num_layers, num_experts=num_experts, weights=tuple(weights))


_STACKED: Final = (
    Fusion(members=("gate_proj", "up_proj"), name="gate_up_proj", stacked=True),
    Fusion(members=("down_proj",), name="down_proj", stacked=True),
)
_VLLM_MLP: Final = Fusion(members=("gate_proj", "up_proj"), name="gate_up_proj")
_VLLM: Final = (Fusion(members=("q_proj", "k_proj", "v_proj"), name="qkv_proj"), _VLLM_MLP)
_VLLM_STACKED: Final = (
    Fusion(members=("gate_proj", "up_proj"), name="routed_experts.w13_weight", stacked=True),
    Fusion(members=("down_proj",), name="routed_experts.w2_weight", stacked=True),
)
_VLLM_LATENT: Final = (Fusion(members=("q_a_proj", "kv_a_proj_with_mqa"), name="fused_qkv_a_proj"), _VLLM_MLP)
_DEEPSEEK: Final = Family(weights=_deepseek_v3, transformers=_STACKED, vllm=(*_VLLM_LATENT, *_VLLM_STACKED))
_QWEN3_MOE: Final = Family(
    weights=_qwen3_moe, transformers=_STACKED, vllm=(*_VLLM, *_VLLM_STACKED), vllm_repeats_ends=True
)
_QWEN2_VISION: Final[dict[str, Any]] = {
    "transformers_prefixes": (("visual.", "model.visual."), ("model.", "model.language_model.")),
    "vllm": _VLLM,
    "vllm_prefixes": (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
}
_QWEN3_VISION: Final = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(weights=_llama, vllm=_VLLM),
    "qwen2": Family(weights=_qwen2, vllm=_VLLM),
    "qwen3": Family(weights=_qwen3, vllm=_VLLM),
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_vl": Family(weights=_qwen2_vl, **_QWEN2_VISION),
    "qwen2_5_vl": Family(weights=_qwen2_5_vl, **_QWEN2_VISION),
    "qwen3_vl": Family(weights=_qwen3_vl, vllm=_VLLM, vllm_prefixes=_QWEN3_VISION),
    "qwen3_vl_moe": msgspec.structs.replace(_QWEN3_MOE, weights=_qwen3_vl_moe, vllm_prefixes=_QWEN3_VISION),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
"""Families by the `model_type` of their configurations."""

"""The tensors of a model, from its configuration alone: names, shapes, and how parallelism may cut each of them.

One function per family lists the canonical tensors, that is, those of the published checkpoints, by the names that they
have there. `FAMILIES` adds what differs by family in a module's own parameters: how transformers stacks and renames
them, and what vLLM fuses. No weights and no torch are needed, so a model can be planned before it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.layout import ITEM_BYTES
from starling.weightsync.layouts.weights import Config, Cut, Entries, Model, Tensors, Weight


class Fusion(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter that holds several canonical tensors of one module, one after the other along dim 0.

    It stands only where all its members are.
    """

    members: tuple[str, ...]
    """The last parts of the tensors' names before `.weight` or `.bias`, in the order in which they lie."""
    name: str
    """What stands in their place."""
    stacked: bool = False
    """Members are those of every expert: one more dim in front counts the experts, and `.weight` is dropped."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What is peculiar to one family of models."""

    weights: Callable[[Config, str], Model]
    transformers: tuple[Fusion, ...] = ()
    """Fused parameters of the class in transformers."""
    transformers_prefixes: tuple[tuple[str, str], ...] = ()
    """Beginnings of canonical names and what transformers has instead; the first that fits."""
    vllm: tuple[Fusion, ...] = ()
    """Fused parameters of the class in vLLM."""
    vllm_prefixes: tuple[tuple[str, str], ...] = ()


def model_of(config: Config, dtype: str = "") -> Model:
    """List the canonical tensors of a model.

    Args:
        config: the contents of its `config.json`.
        dtype: element type of the weights; by default the one in the configuration, else bfloat16.

    Raises:
        WeightsError: an unknown family, a missing or unfit entry, or an element type that does not travel.
    """
    family = family_of(config)
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"Weights of element type {dtype} do not travel; choose one of {', '.join(ITEM_BYTES)}.")
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
    """What tells the decoders with ordinary attention apart."""

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


def _qwen2_5_vl(config: Config, dtype: str) -> Model:
    """List a vision tower and a Qwen2 decoder."""
    decoder = _decoder(_text_entries(config), dtype, "qwen2_5_vl", _Text(qkv_bias=True))
    read, make = Entries(config.get("vision_config") or {}), Tensors(dtype)
    hidden, inner, heads = read.size("hidden_size"), read.size("intermediate_size"), read.size("num_heads")
    patch, merged = read.size("patch_size", 14), hidden * read.size("spatial_merge_size", 2) ** 2
    channels, frames = read.size("in_channels", read.size("in_chans", 3)), read.size("temporal_patch_size", 2)
    weights = [make("visual.patch_embed.proj.weight", hidden, channels, frames, patch, patch, stage="first")]
    for i in range(read.size("depth")):
        at = f"visual.blocks.{i}"
        weights += [make(f"{at}.norm{n}.weight", hidden) for n in (1, 2)]
        for name, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
            weights.append(make(f"{at}.attn.qkv.{name}", *shape, cut="rows", units=3 * heads, blocks=3))
        weights += make.linear(f"{at}.attn.proj", hidden, hidden, cut="columns", units=heads, layer=-1, bias=True)
        weights += make.gated(f"{at}.mlp", hidden, inner, layer=-1, bias=True)
    out = read.size("out_hidden_size")
    weights.append(make("visual.merger.ln_q.weight", hidden))
    weights += make.linear("visual.merger.mlp.0", merged, merged, cut="rows", layer=-1, bias=True)
    weights += make.linear("visual.merger.mlp.2", out, merged, cut="columns", layer=-1, bias=True)
    return _with_tower(decoder, weights)


def _qwen3_vl(config: Config, dtype: str) -> Model:
    """List a vision tower and a Qwen3 decoder, into whose first layers mergers of their own feed deeper features."""
    text = _text_entries(config)
    bias = Entries(text).flag("attention_bias")
    decoder = _decoder(text, dtype, "qwen3_vl", _Text(qkv_bias=bias, output_bias=bias, head_norms=True))
    vision = config.get("vision_config") or {}
    read, make = Entries(vision), Tensors(dtype)
    hidden, inner, heads = read.size("hidden_size"), read.size("intermediate_size"), read.size("num_heads")
    patch, merged = read.size("patch_size", 16), hidden * read.size("spatial_merge_size", 2) ** 2
    channels, frames = read.size("in_channels", 3), read.size("temporal_patch_size", 2)
    at = "model.visual"
    weights = [
        make(f"{at}.patch_embed.proj.weight", hidden, channels, frames, patch, patch),
        make(f"{at}.patch_embed.proj.bias", hidden),
        make(f"{at}.pos_embed.weight", read.size("num_position_embeddings"), hidden),
    ]
    for block in (f"{at}.blocks.{i}" for i in range(read.size("depth"))):
        weights += [make(f"{block}.norm{n}.{part}", hidden) for n in (1, 2) for part in ("weight", "bias")]
        for name, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
            weights.append(make(f"{block}.attn.qkv.{name}", *shape, cut="rows", units=3 * heads, blocks=3))
        weights += make.linear(f"{block}.attn.proj", hidden, hidden, cut="columns", units=heads, layer=-1, bias=True)
        weights += make.linear(f"{block}.mlp.linear_fc1", inner, hidden, cut="rows", layer=-1, bias=True)
        weights += make.linear(f"{block}.mlp.linear_fc2", hidden, inner, cut="columns", layer=-1, bias=True)
    deep = range(len(read.indices("deepstack_visual_indexes")))
    mergers = [(f"{at}.merger", hidden), *((f"{at}.deepstack_merger_list.{i}", merged) for i in deep)]
    for merger, normed in mergers:
        weights += [make(f"{merger}.norm.{part}", normed) for part in ("weight", "bias")]
        weights += make.linear(f"{merger}.linear_fc1", merged, merged, cut="rows", layer=-1, bias=True)
        weights += make.linear(
            f"{merger}.linear_fc2", read.size("out_hidden_size"), merged, cut="columns", layer=-1, bias=True
        )
    return _with_tower(_renamed(decoder, "model.", "model.language_model."), weights)


def _text_entries(config: Config) -> Config:
    """Return the entries of the decoder: in `text_config` or, in older files, beside it."""
    text = {**config, **(config.get("text_config") or {})}
    # A tie is the whole model's: the text part of the configuration may repeat it, or not.
    text["tie_word_embeddings"] = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return text


def _with_tower(decoder: Model, weights: Sequence[Weight]) -> Model:
    """Put a vision tower before a decoder: it runs before the first layer, and so lives where that does."""
    tower = tuple(msgspec.structs.replace(weight, stage="first") for weight in weights)
    return msgspec.structs.replace(decoder, weights=(*tower, *decoder.weights))


def _renamed(model: Model, before: str, now: str) -> Model:
    """Return `model` with another beginning of names."""

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

FAMILIES: Final[dict[str, Family]] = {
    "llama": Family(weights=_llama, vllm=_VLLM),
    "qwen2": Family(weights=_qwen2, vllm=_VLLM),
    "qwen3": Family(weights=_qwen3, vllm=_VLLM),
    "qwen3_moe": Family(weights=_qwen3_moe, transformers=_STACKED, vllm=(*_VLLM, *_VLLM_STACKED)),
    "qwen2_5_vl": Family(
        weights=_qwen2_5_vl,
        transformers_prefixes=(("visual.", "model.visual."), ("model.", "model.language_model.")),
        vllm=_VLLM,
        vllm_prefixes=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    "qwen3_vl": Family(
        weights=_qwen3_vl,
        vllm=_VLLM,
        vllm_prefixes=(
            ("model.visual.", "visual."),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
    ),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
"""The families by `model_type` of their configurations."""

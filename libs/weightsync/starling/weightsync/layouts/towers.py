"""The vision towers of families of models: what stands before a decoder, and makes tokens of patches.

By the names of the published checkpoints, from the `vision_config` of the model's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator

from starling.weightsync.layouts.weights import Config, Entries, Tensors, Weight


def qwen2_tower(config: Config, dtype: str) -> tuple[Weight, ...]:
    """List the tower of Qwen2-VL.

    Tensor parallelism in vLLM cuts the rows of its joined queries, keys and values as they lie, whichever they are.
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
    """List the tower of Qwen3-VL, and the mergers that feed its deeper features into the decoder's first layers."""
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
    """Return the convolution that takes patches in; a family has its usual `patch_size`."""
    patch, frames = read.size("patch_size", patch_size), read.size("temporal_patch_size", 2)
    channels = read.size("in_channels", read.size("in_chans", 3))
    return make(f"{at}.patch_embed.proj.weight", hidden, channels, frames, patch, patch)


def _norms(make: Tensors, block: str, hidden: int) -> Iterator[Weight]:
    yield from (make(f"{block}.norm{n}.{part}", hidden) for n in (1, 2) for part in ("weight", "bias"))


def _attention(make: Tensors, block: str, hidden: int, heads: int) -> Iterator[Weight]:
    """Yield an attention whose queries, keys and values are joined, of which tensor parallelism cuts each."""
    for name, shape in (("weight", (3 * hidden, hidden)), ("bias", (3 * hidden,))):
        yield make(f"{block}.attn.qkv.{name}", *shape, cut="rows", units=3 * heads, blocks=3)
    yield from make.linear(f"{block}.attn.proj", hidden, hidden, cut="columns", units=heads, layer=-1, bias=True)


def _pair(make: Tensors, first: str, second: str, hidden: int, inner: int, out: int) -> Iterator[Weight]:
    """Yield two projections, one after the other."""
    yield from make.linear(first, inner, hidden, cut="rows", layer=-1, bias=True)
    yield from make.linear(second, out, inner, cut="columns", layer=-1, bias=True)


def _merger(read: Entries, make: Tensors, first: str, second: str, hidden: int, out: int) -> Iterator[Weight]:
    """Yield what makes one token of neighbouring patches."""
    merged = hidden * read.size("spatial_merge_size", 2) ** 2
    yield from _pair(make, first, second, merged, merged, out)

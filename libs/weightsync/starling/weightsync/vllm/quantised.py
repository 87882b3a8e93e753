"""The tensors that a policy publishes of a model whose weights it quantises, recorded as those of a checkpoint.

Codes and scales take the way of the weight that they replace: transformers' conversion runs over the codes, and again
over the scales, under the name of the weight. So they are renamed, taken apart and joined as the weight would be. Then
the loader of vLLM, which has built its model for the format, copies both into its parameters, and the recorder sees
where to. What it saw is checked against the format, as a loader that does not know scales may misplace them silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention, set_default_quant_scales

from starling.common.errors import WeightsError
from starling.weightsync.layouts.strided import BoxCopy, Strided, merged, row_major
from starling.weightsync.plan.layout import ITEM_BYTES, Box, Shard, TensorSpec
from starling.weightsync.quantise.layouts import quantisation_of
from starling.weightsync.quantise.recipe import QuantRecipe
from starling.weightsync.quantise.spec import QuantSpec
from starling.weightsync.tensors.recording import Recorder
from starling.weightsync.vllm.recorded import PublishedModel, RecordedWorker, record_worker

_REMEDY: Final = "Leave weights.quantise empty, or set rollout.engine = 'transformers'."


class QuantisedModel:
    """The codes, scales and other tensors that a policy publishes, and their form in a checkpoint.

    Args:
        full: the model in full precision.
        recipe: by which the policy quantises.
        parameter: returns vLLM's name of the published name of codes or scales.

    Raises:
        WeightsError: a tensor that the recipe cannot quantise.
    """

    def __init__(self, full: PublishedModel, recipe: QuantRecipe, parameter: Callable[[str], str]) -> None:
        self._full, self._parameter, self.recipe = full, parameter, recipe
        made = quantisation_of(tuple(full.tensors.values()), recipe)
        self.tensors: dict[str, TensorSpec] = {spec.name: spec for spec in made.tensors}
        self.specs: tuple[QuantSpec, ...] = tuple(spec for spec in made.specs if spec is not None)
        """Of the tensors that are quantised."""
        self._parts: dict[str, tuple[str, str]] = {}
        """By name of a part of a quantised tensor: the original's name, and what follows it."""
        for spec in self.specs:
            for part in spec.tensors():
                self._parts[part.name] = spec.tensor.name, part.name.removeprefix(spec.tensor.name)
        self.quantised = frozenset(self._parts)

    def in_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some of the tensors as a checkpoint in the format has them."""
        found = self._full.in_checkpoint({name: tensor for name, tensor in tensors.items() if name not in self._parts})
        kinds: dict[str, dict[str, Tensor]] = {}
        for name in filter(self.quantised.__contains__, tensors):
            original, suffix = self._parts[name]
            tensor = tensors[name]
            # Files have powers of two as bytes.
            as_stored = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
            kinds.setdefault(suffix, {})[original] = as_stored
        for suffix, of_kind in kinds.items():
            for name, tensor in self._full.in_checkpoint(of_kind).items():
                found[self._parameter(name + suffix)] = tensor
        return found

    def unquantised_modules(self) -> set[str]:
        """Return the modules of tensors that are not quantised, by their names in a checkpoint."""
        recorder = Recorder({})
        with recorder:
            plain = {
                name: recorder.stand_in(spec)
                for name, spec in self.tensors.items()
                if name not in self.quantised and name.endswith(".weight")
            }
            names = self._full.in_checkpoint(plain).keys() | self._full.tied
        return {name.removesuffix(".weight") for name in names}


def record_quantised(
    model: torch.nn.Module, config: VllmConfig, published: QuantisedModel, replica: str
) -> RecordedWorker:
    """Record the layout of one worker with quantised weights; arguments as for `record_worker`.

    Raises:
        WeightsError: vLLM's loader does not take the codes and scales, or not as the format has them.
    """
    try:
        recorded = record_worker(model, config, published, replica)
        _check(recorded, published)
    except WeightsError as error:
        raise WeightsError(f"weights.quantise does not fit this model: {error} {_REMEDY}") from error
    # Random initialisation also draws the scales of the KV cache, which a quantised checkpoint might contain.
    for module in model.modules():
        if isinstance(module, Attention):
            set_default_quant_scales(module)
    return recorded


def _check(recorded: RecordedWorker, published: QuantisedModel) -> None:
    """Check that every scale is where the layers of the format look for it."""
    held: dict[str, dict[str, list[Shard]]] = {}  # by tensor and module
    for shard in recorded.layout.ranks[0].shards:
        modules = held.setdefault(recorded.layout.tensors[shard.tensor].name, {})
        modules.setdefault(shard.storage.rpartition(".")[0], []).append(shard)
    whole = {name: group.reason for group in recorded.whole for name in group.tensors}
    totals: dict[str, str] = {}  # the first tensor of each module
    for spec in published.specs:
        codes, *scales = (part.name for part in spec.tensors())
        for name in (codes, *scales):
            if name in whole:
                raise WeightsError(f"{whole[name]}, so vLLM does not hold {codes} in the format.")
        for module, shards in held.get(codes, {}).items():
            _check_module(recorded, spec, shards, [held.get(name, {}).get(module, ()) for name in scales])
            first = totals.setdefault(module, codes)
            if spec.format.two_level and published.recipe.scale_of(first) != published.recipe.scale_of(codes):
                raise WeightsError(f"vLLM has one scale for all of {first} and {codes}, and each has its own.")


def _check_module(
    recorded: RecordedWorker, spec: QuantSpec, codes: Sequence[Shard], kinds: Sequence[Sequence[Shard]]
) -> None:
    """Check where one module has the scales of its part of a tensor; `kinds` are those of groups and of the whole."""
    if not all(kinds):
        raise WeightsError(f"vLLM's loader does not put all scales of {spec.tensor.name} beside its codes.")
    scales = kinds[0]  # the whole tensor's fills one place or several of a fused layer
    size = ITEM_BYTES[spec.format.scale_dtype]
    found = [BoxCopy(shard.box, Strided(shard.offset_bytes // size, shard.strides)) for shard in scales]
    grid = recorded.shapes[scales[0].storage]
    expected = [_scales_of(shard, spec, recorded.shapes[shard.storage], grid) for shard in codes]
    if merged(found) != merged(expected):
        raise WeightsError(f"vLLM's loader puts scales of {spec.tensor.name} where it puts other codes.")


def _scales_of(shard: Shard, spec: QuantSpec, shape: Sequence[int], grid: Sequence[int]) -> BoxCopy:
    """Return the scales of a box of codes, and where a parameter of shape `grid` must have them.

    `shape` is that of the parameter with the codes.
    """
    name, per_byte, num_dims = spec.tensor.name, spec.format.codes_per_byte, len(shard.box.size)
    offset, size = [*shard.box.offset], [*shard.box.size]
    offset[-1] *= per_byte
    size[-1] = min(size[-1] * per_byte, spec.tensor.shape[-1] - offset[-1])
    box, at = Box(offset=tuple(offset), size=tuple(size)), _index(shard.offset_bytes, shape)
    at[-1] *= per_byte
    step = (spec.format.rows, spec.format.columns or 1)  # a row of one scale may be divided: all parts have it
    ends = (n if begin + n < whole else 0 for begin, n, whole in zip(offset, size, spec.tensor.shape, strict=True))
    for begins in (at[-2:], offset[-2:], [*ends][-2:]):
        if any(begin % n for begin, n in zip(begins, step, strict=True)):
            raise WeightsError(
                f"it has one scale for {' x '.join(map(str, spec.group[-2:]))} elements, and this worker of vllm would "
                f"hold {' x '.join(map(str, size[-2:]))} of {name}; choose another format, or a smaller "
                "rollout.vllm.tensor_parallel_size."
            )
    at[-2:] = at[-2] // step[0], at[-1] // step[1] if spec.format.columns else 0
    groups, strides = spec.scale_box(box), []
    of_codes, of_grid = row_major(shape)[-num_dims:], row_major(grid)[-num_dims:]
    for dim, (length, stride) in enumerate(zip(shard.box.size, shard.strides, strict=True)):
        steps = stride // of_codes[dim] if length > 1 else 1
        # Rows may be in another order, if each has scales of its own.
        if length > 1 and (stride % of_codes[dim] or steps < 1 or (steps > 1 and spec.group[dim] > 1)):
            raise WeightsError(f"vLLM has {name} in another order than that of its scales.")
        strides.append(steps * of_grid[dim] if groups.size[dim] > 1 else 0)
    place = sum(i * stride for i, stride in zip(at, row_major(grid), strict=True))
    return BoxCopy(groups, Strided(place, tuple(strides)))


def _index(offset: int, shape: Sequence[int]) -> list[int]:
    """Return the index of the element at `offset` of a row-major parameter."""
    return [offset // stride % length for stride, length in zip(row_major(shape), shape, strict=True)]

"""Adoption of quantised weights in one worker: received in checkpoint format, packed for vLLM's kernels.

vLLM packs codes and scales after loading (transposed, permuted, folded) as the kernel of the device needs them. So a
version cannot be copied into the live parameters. Instead, each layer in turn temporarily gets the parameters that it
was created with; they are filled, vLLM packs them as after loading, and the result is copied into the memory that
kernels and CUDA graphs use. vLLM's layerwise reload does the same for whole tensors that pass through its weight
loaders; here the worker receives its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import Attention, set_default_quant_scales
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from starling.common.errors import WeightsError
from starling.rollout.engine.vllm.quantised import VLLM_FORMATS, VllmFormat, recipe_of
from starling.weightsync.layouts.fused import layout_of_parameters
from starling.weightsync.layouts.parameters import Table
from starling.weightsync.plan.layout import Layout, item_bytes
from starling.weightsync.quantise.layouts import received_layout
from starling.weightsync.tensors.modules import detect_place, plain_name
from starling.weightsync.vllm.layers import layer_to_fill

UNUSED = ("input_scale", "w13_input_scale", "w2_input_scale")
"""Parameters for static activation scales from a checkpoint; vLLM drops them if there are none."""


def packed_layout(model: torch.nn.Module, replica: str, table: Table, format_name: str) -> Layout:
    """Return the layout of what a worker with quantised weights receives.

    Args:
        model: the worker's part of the model, built by vLLM for this format.
        replica: name of the replica in the layout.
        table: the worker's parameters as if nothing were quantised.
        format_name: `weights.quantise`.

    Raises:
        WeightsError: the format does not fit the model's tensors.
    """
    place = detect_place(model.parameters())
    plain = layout_of_parameters(replica, table.tensors, [table.parameters], [place])
    return received_layout(plain, recipe_of(format_name))


class Packer:
    """Copies received quantised weights into the layers of one worker."""

    def __init__(self, model: torch.nn.Module, layout: Layout, rank: int, format_name: str, config: VllmConfig) -> None:
        """Find the parameters of each storage of the layout.

        Args:
            model: as for `packed_layout`, loaded.
            layout: the layout of all workers.
            rank: this worker's rank in it.
            format_name: `weights.quantise`.
            config: the engine's configuration.

        Raises:
            WeightsError: vLLM's parameters differ from those of the layout.
        """
        self._config = config
        held = layout.ranks[rank].shards
        self._dtypes = {shard.storage: getattr(torch, layout.tensors[shard.tensor].dtype) for shard in held}
        sizes = _sizes(layout, rank)
        live = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self._direct: dict[str, torch.Tensor] = {}
        self._layers: list[tuple[torch.nn.Module, dict[str, str]]] = []
        quantised = _quantised_layers(model)
        places = dict(_places(quantised, sizes, VLLM_FORMATS[format_name]))
        layers: dict[str, dict[str, str]] = {}
        for storage, size in sizes.items():
            if storage in places:
                path, own, expected = places[storage]
                layers.setdefault(path, {})[storage] = own
            elif (direct := live.get(plain_name(storage))) is not None:
                self._direct[storage], expected = direct, direct.nbytes
            else:
                raise WeightsError(f"vLLM has no parameter for {storage}, which the model's table lists.")
            if size > expected or (storage in places and size != expected):
                raise WeightsError(
                    f"{storage} has {size} bytes by the model's table, and {expected} in vLLM; check that vLLM "
                    "quantises the same layers."
                )
        self.layer_bytes = max((sum(map(sizes.__getitem__, names)) for names in layers.values()), default=0)
        """Bytes of the largest layer as received: the least extra memory that packing needs."""
        for path, storages in layers.items():
            layer = quantised[path]
            _check_filled(path, layer, storages)
            self._layers.append((layer, storages))
        # Random initialisation also draws the scales of the KV cache, which a quantised checkpoint might contain.
        for module in model.modules():
            if isinstance(module, Attention):
                set_default_quant_scales(module)

    def layers_to_fill(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield tensors to fill, by storage: first those that are not packed, then layer after layer.

        A layer is packed when the next one is requested.
        """
        yield self._direct
        for layer, storages in self._layers:
            for filled in layer_to_fill(layer, self._config):
                for name, parameter in filled.named_parameters(recurse=False):
                    if name in UNUSED:
                        parameter.data.fill_(float("nan"))  # as created: nothing was loaded
                yield {name: filled.get_parameter(own).data.view(self._dtypes[name]) for name, own in storages.items()}


def _quantised_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers with quantised weights, by name."""
    found: dict[str, torch.nn.Module] = {}
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), QuantizeMethodBase):
            continue
        made, _ = get_layerwise_info(module).restore_metadata
        if any(name.endswith(("weight_scale", "weight_scale_inv")) for name in made):
            found[path] = module
    return found


def _places(
    layers: Mapping[str, torch.nn.Module], sizes: Mapping[str, int], vllm_format: VllmFormat
) -> Iterator[tuple[str, tuple[str, str, int]]]:
    """Yield layer, parameter and size in bytes for each storage of a quantised layer."""
    made: dict[str, tuple[str, str, int]] = {}
    for path, layer in layers.items():
        tensors = dict(get_layerwise_info(layer).restore_metadata[0])
        if layer._parameters.get("bias") is not None:
            tensors["bias"] = layer.bias
        for own, tensor in tensors.items():
            made[plain_name(f"{path}.{own}")] = path, own, tensor.nbytes
    for storage in sizes:
        place = made.get(plain_name(vllm_format.parameter(storage)))
        if place is not None:
            yield storage, place


def _sizes(layout: Layout, rank: int) -> dict[str, int]:
    """Return the bytes that a rank receives into each storage."""
    sizes: dict[str, int] = {}
    for shard in layout.ranks[rank].shards:
        spec = layout.tensors[shard.tensor]
        sizes[shard.storage] = sizes.get(shard.storage, 0) + shard.box.volume * item_bytes(spec)
    return sizes


def _check_filled(path: str, layer: torch.nn.Module, storages: Mapping[str, str]) -> None:
    made = {*get_layerwise_info(layer).restore_metadata[0]} - {*UNUSED}
    if missing := made - {*storages.values()}:
        raise WeightsError(f"Layer {path} in vLLM has {', '.join(sorted(missing))}, which no version contains.")

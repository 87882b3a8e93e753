"""Adapters in one of vLLM's workers: a version as it arrives, and the slot that vLLM computes with.

What is pulled, and attested, are the adapters as they are trained: in float32, and whole in each worker, as they are
small. vLLM's own manager makes of them what its layers need (the rank's slices, fused projections, the scale within the
second factor, its element type) and copies that into the slot, between two tokens. Requests name the slot, and never
another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from starling.rollout.engine.vllm.adapters import NUMBER, WHOLE, layer_of
from starling.weightsync.plan.layout import Layout
from starling.weightsync.tensors.adapters import ADAPTER

_PREFIX = "base_model.model."
"""What peft's files put before the names of a model's parameters."""


class AdapterSlot:
    """The adapters of one worker."""

    def __init__(self, model: Any, layout: Layout, config: Mapping[str, Any]) -> None:
        """Fill the slot with adapters that add nothing.

        Args:
            model: vLLM's, made ready for adapters.
            layout: which tensors make up a version.
            config: as `adapters.as_peft` makes it.
        """
        self._model, self._manager = model, model.lora_manager
        self._config = PEFTHelper.from_dict(dict(config))
        self._config.validate_legal(self._manager.lora_config)
        self.tensors = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._manager.device)
            for spec in layout.tensors
        }
        """A version, by the names that it has in training."""
        self._fill()

    def missing(self) -> list[str]:
        """Return the layers that have adapters in training, and none in this worker."""
        here = set(self._manager.modules).union(*self._manager.packed_modules.values())
        layers = {layer_of(name): name for name, _ in self._adapters()}
        return [layer for layer, name in layers.items() if self._named(name) not in here]

    def place(self) -> bool:
        """Have vLLM compute with what `tensors` hold now. Returns whether weights of the model itself changed."""
        self._fill()
        # vLLM takes of each what this worker has, and passes over what others have.
        whole = [
            (name.replace(f".{WHOLE}.{ADAPTER}", ""), tensor)
            for name, tensor in self.tensors.items()
            if f".{WHOLE}." in name
        ]
        if whole:
            self._model.load_weights(whole)
        return bool(whole)

    def _fill(self) -> None:
        """Have the manager make the slot anew.

        It scales the second factor where it is, and keeps the rest: both are copies.
        """
        config, manager = self._config, self._manager
        adapters = LoRAModel.from_lora_tensors(
            NUMBER,
            {_as_peft(name): tensor.clone() for name, tensor in self._adapters()},
            config,
            device=str(manager.device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=self._mapper(),
        )
        manager.remove_adapter(NUMBER)
        manager.add_adapter(adapters)
        manager.activate_adapter(NUMBER)

    def _adapters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.tensors.items() if f".{WHOLE}." not in name)

    def _named(self, name: str) -> str:
        """Return what vLLM calls the layer of the tensor `name`."""
        layer: str
        layer, _ = parse_fine_tuned_lora_name(_as_peft(name), self._mapper())
        return layer

    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()


def _as_peft(name: str) -> str:
    """Return the name that the tensor `name` has in peft's files."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")

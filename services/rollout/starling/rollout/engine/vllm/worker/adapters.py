"""Adapters in one vLLM worker: the pulled version, and the adapter slot that vLLM computes with.

Adapters are pulled and verified as they are trained: in float32, and whole in each worker, as they are small. vLLM's
adapter manager converts them for its layers (slices of the rank, fused projections, the scale folded into the second
factor, the element type) and copies them into the slot, between two tokens. All requests use this one slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from starling.rollout.engine.vllm.adapters import ADAPTER_ID, FULLY_TRAINED, layer_of
from starling.weightsync.plan.layout import Layout
from starling.weightsync.tensors.adapters import ADAPTER

_PREFIX = "base_model.model."
"""Prefix of parameter names in peft's files."""


class AdapterSlot:
    """The adapters of one worker."""

    def __init__(self, model: Any, layout: Layout, config: Mapping[str, Any]) -> None:
        """Fill the slot with zeros, which change no output.

        Args:
            model: vLLM's model, with adapters enabled.
            layout: the tensors of a version.
            config: from `adapters.as_peft`.
        """
        self._model, self._manager = model, model.lora_manager
        self._config = PEFTHelper.from_dict(dict(config))
        self._config.validate_legal(self._manager.lora_config)
        self.tensors = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._manager.device)
            for spec in layout.tensors
        }
        """The tensors of a version, by their names in training."""
        self._fill()

    def missing(self) -> list[str]:
        """Return the layers that have adapters in training, but not in this worker."""
        here = set(self._manager.modules).union(*self._manager.packed_modules.values())
        layers = {layer_of(name): name for name, _ in self._adapters()}
        return [layer for layer, name in layers.items() if self._named(name) not in here]

    def apply(self) -> bool:
        """Make vLLM compute with the current `tensors`. Return whether weights of the model itself changed."""
        self._fill()
        # vLLM loads this worker's slice of each tensor, and skips tensors of other workers.
        fully_trained = [
            (name.replace(f".{FULLY_TRAINED}.{ADAPTER}", ""), tensor)
            for name, tensor in self.tensors.items()
            if f".{FULLY_TRAINED}." in name
        ]
        if fully_trained:
            self._model.load_weights(fully_trained)
        return bool(fully_trained)

    def _fill(self) -> None:
        """Replace the adapters in the slot.

        The manager scales the second factor in place and keeps the tensors that it gets, so it gets copies.
        """
        config, manager = self._config, self._manager
        adapters = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {_as_peft(name): tensor.clone() for name, tensor in self._adapters()},
            config,
            device=str(manager.device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=self._mapper(),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapters)
        manager.activate_adapter(ADAPTER_ID)

    def _adapters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in self.tensors.items() if f".{FULLY_TRAINED}." not in name)

    def _named(self, name: str) -> str:
        """Return vLLM's name for the layer of the tensor `name`."""
        layer: str
        layer, _ = parse_fine_tuned_lora_name(_as_peft(name), self._mapper())
        return layer

    def _mapper(self) -> Any:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        return None if mapper is None else mapper.get_rename_mapper()


def _as_peft(name: str) -> str:
    """Return the name that the tensor `name` has in peft's files."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".")

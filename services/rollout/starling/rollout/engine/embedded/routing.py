"""Recording of the experts that the routers of the embedded engine's model choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from starling.algo.experts import find_experts, num_experts
from starling.algo.routing import Experts, expert_dtype
from starling.common.wire.messages import ModelExperts


class ExpertRecorder:
    """The choices of a model's routers in its forward passes, read where they arrive at the experts."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Observe the experts of `model`."""
        layers = find_experts(model)
        self._num_experts = max((num_experts(one) for one in layers.values()), default=0)
        self._chosen: list[list[torch.Tensor]] = [[] for _ in layers]
        self._is_recording = False
        for number, experts in enumerate(layers.values()):
            experts.register_forward_pre_hook(self._hook(number), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes of the context, for `take` afterwards."""
        self._is_recording = True
        try:
            yield
        except BaseException:  # whatever it is: the choices of an unfinished pass are not those of the next one
            self._clear()
            raise
        finally:
            self._is_recording = False

    def take(self) -> Experts:
        """Return the experts of the computed tokens, in their order, on the host: [tokens, layers, chosen]."""
        columns = [torch.cat(chosen) if len(chosen) > 1 else chosen[0] for chosen in self._chosen]
        self._clear()
        found = torch.stack(columns, dim=1).to(torch.int32).cpu().numpy()
        return found.astype(expert_dtype(self._num_experts))

    def sizes(self) -> ModelExperts | None:
        """Return the sizes of the model, from what was recorded; None if it has no experts."""
        if not self._chosen:
            return None
        _, num_layers, num_chosen = self.take().shape
        return ModelExperts(num_layers=num_layers, num_experts=self._num_experts, num_chosen=num_chosen)

    def _clear(self) -> None:
        for chosen in self._chosen:
            chosen.clear()

    def _hook(self, number: int) -> Any:
        def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_recording:
                self._chosen[number].append(args[1] if len(args) > 1 else kwargs["top_k_index"])

        return record

"""The experts that vLLM's workers record, joined over the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from starling.algo.routing import Experts, expert_dtype
from starling.common.wire.messages import ModelExperts


@dataclass(frozen=True)
class ExpertStages:
    """How the layers with experts are shared by the stages; a stage's workers with tensor parallelism choose alike."""

    num_layers: tuple[int, ...]
    """Of each stage."""
    sizes: ModelExperts
    """Of the whole model."""

    @classmethod
    def of(cls, answers: Iterable[tuple[int, int, int] | None]) -> ExpertStages:
        """Return what the workers answered, in rank order; see `ExpertRecorder.sizes`."""
        stages = [answer for answer in answers if answer is not None]
        num_layers = tuple(num for num, _, _ in stages)
        _, num_experts, num_chosen = stages[0]
        sizes = ModelExperts(num_layers=sum(num_layers), num_experts=num_experts, num_chosen=num_chosen)
        return cls(num_layers, sizes)

    def nothing(self) -> Experts:
        """Return the experts of no token."""
        dtype = expert_dtype(self.sizes.num_experts)
        return np.zeros((0, self.sizes.num_layers, self.sizes.num_chosen), dtype)

    def join(self, answers: Iterable[bytes | None]) -> Experts:
        """Return the experts of a request's tokens from those of each stage; see `ExpertRecorder.take`."""
        parts = [answer for answer in answers if answer is not None]
        dtype = expert_dtype(self.sizes.num_experts)
        arrays = [
            np.frombuffer(part, dtype).reshape(-1, num_layers, self.sizes.num_chosen)
            for part, num_layers in zip(parts, self.num_layers, strict=True)
            if num_layers
        ]
        num_tokens = min(map(len, arrays))  # a later stage may not have computed the last token yet
        return np.concatenate([array[:num_tokens] for array in arrays], axis=1)

"""From per-token metrics of microbatches to the metrics of a step, read from the device once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Measured:
    """Sums and maxima of named per-token values over all microbatches of a step.

    They stay on the device until `read`: reading each would make it wait each time.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Take in values of one microbatch, [N] each: a mean will be told of each, a maximum if its name ends so.

        Args:
            metrics: by name; ``_max`` at the end of a name means that its greatest value is wanted.
        """
        for name, values in metrics.items():
            detached = values.detach()
            if name.endswith("_max"):
                self._maxima.setdefault(name, []).append(detached.amax())
            else:
                self._sums.setdefault(name, []).append(detached.sum())
                self._counts[name] = self._counts.get(name, 0) + detached.numel()

    def add_sum(self, name: str, value: Tensor) -> None:
        """Take in a scalar that is told as the sum over microbatches."""
        self._sums.setdefault(name, []).append(value.detach())

    def read(self) -> dict[str, float]:
        """Return the metrics; what no token can tell is left out."""
        names = [*self._sums, *self._maxima]
        if not names:
            return {}
        parts = [torch.stack(values).sum() for values in self._sums.values()]
        parts += [torch.stack(values).amax() for values in self._maxima.values()]
        told = dict(zip(names, torch.stack([part.float() for part in parts]).tolist(), strict=True))
        return {name: value / self._counts.get(name, 1) for name, value in told.items()}

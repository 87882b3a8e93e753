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
        self._counts: dict[str, list[Tensor]] = {}

    def add(self, metrics: Mapping[str, Tensor], *, where: Tensor | None = None) -> None:
        """Take in values of one microbatch, [N] each: a mean will be told of each, a maximum if its name ends so.

        Args:
            metrics: by name; ``_max`` at the end of a name means that its greatest value is wanted.
            where: float [N], 1 for tokens that count and 0 for the others; by default all count.
        """
        for name, values in metrics.items():
            detached = values.detach()
            if name.endswith("_max"):
                seen = detached if where is None else detached.masked_fill(where == 0, float("-inf"))
                self._maxima.setdefault(name, []).append(seen.amax())
            else:
                counted = detached if where is None else detached * where
                count = torch.ones_like(detached) if where is None else where
                self._sums.setdefault(name, []).append(counted.sum())
                self._counts.setdefault(name, []).append(count.sum())

    def add_sum(self, name: str, value: Tensor) -> None:
        """Take in a scalar that is told as the sum over microbatches."""
        self._sums.setdefault(name, []).append(value.detach())

    def read(self) -> dict[str, float]:
        """Return the metrics; what no token can tell is left out."""
        names = [*self._sums, *self._maxima, *(f"{name}/count" for name in self._counts)]
        if not names:
            return {}
        parts = [torch.stack(values).sum() for values in self._sums.values()]
        parts += [torch.stack(values).amax() for values in self._maxima.values()]
        parts += [torch.stack(values).sum() for values in self._counts.values()]
        told = dict(zip(names, torch.stack([part.float() for part in parts]).tolist(), strict=True))
        counts = {name: told.pop(f"{name}/count") for name in self._counts}
        means = {name: told[name] / count for name, count in counts.items() if count}
        rest = {name: value for name, value in told.items() if name not in counts and value != float("-inf")}
        return means | rest

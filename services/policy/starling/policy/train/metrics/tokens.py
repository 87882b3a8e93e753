"""Metrics over the trained tokens of a step: sums and maxima, mismatch with the rollout, staleness, sample size.

Legend: T are the step's trained tokens; log-probabilities are in nats, the trainer's under the weights at the start of
the step. `docs/reference/metrics.md` lists every metric.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.floating[Any]]
Ages = npt.NDArray[np.integer[Any]]

OLDEST_BIN: Final = 16
"""Older tokens are counted in this bin, which bounds the number of metrics."""


class TokenMetrics:
    """Sums and maxima of named per-token values over all microbatches of a step.

    They stay on the device until `read`: reading each of them would wait for the device each time.
    """

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        """Start empty.

        Args:
            gather: returns the argument of each rank that computes a share of the microbatches; None for a single one.
        """
        self._gather = gather
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add values of one microbatch, [N] each, to be reduced to a mean.

        Args:
            metrics: by name; a name that ends in ``_max`` is reduced to its maximum instead.
        """
        for name, values in metrics.items():
            detached = values.detach()
            if name.endswith("_max"):
                self._maxima.setdefault(name, []).append(detached.amax())
            else:
                self._sums.setdefault(name, []).append(detached.sum())
                self._counts[name] = self._counts.get(name, 0) + detached.numel()

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a scalar that is summed over microbatches."""
        self._sums.setdefault(name, []).append(value.detach())

    def read(self) -> dict[str, float]:
        """Return the metrics; those without any token are left out."""
        reduced, counts = self._reduced(), self._counts
        if self._gather is not None:
            parts = self._gather([reduced, counts, list(self._maxima)])
            maxima = {name for *_, names in parts for name in names}
            reduced = {
                name: (max if name in maxima else sum)(part[name] for part, *_ in parts if name in part)
                for name in dict.fromkeys(name for part, *_ in parts for name in part)
            }
            counts = {name: sum(of.get(name, 0) for _, of, _ in parts) for _, some, _ in parts for name in some}
        return {name: value / counts.get(name, 1) for name, value in reduced.items()}

    def _reduced(self) -> dict[str, float]:
        """Return the sums and maxima of this rank's microbatches."""
        names = [*self._sums, *self._maxima]
        if not names:
            return {}
        parts = [torch.stack(values).sum() for values in self._sums.values()]
        parts += [torch.stack(values).amax() for values in self._maxima.values()]
        return dict(zip(names, torch.stack([part.float() for part in parts]).tolist(), strict=True))


def mismatch(trainer: Array, rollout: Array, fresh: Array) -> dict[str, float]:
    """Compare two computations of the same weights' log-probabilities.

    For tokens of a `fresh` completion both are of the same weights: any difference comes from kernels, dtypes, or the
    sampling distribution. k1 and k3 estimate the divergence of the trainer's distribution from the rollout's
    (http://joschu.net/blog/kl-approx.html), k1 without bias, k3 with less variance and never below 0.

    Args:
        trainer: log-probabilities of the trained tokens by the trainer, [T].
        rollout: those reported by the rollout, [T].
        fresh: 1 for tokens of completions sampled entirely by the weights at the start of the step, else 0; [T].

    Returns:
        ``mismatch_mean`` and ``mismatch_max`` of the absolute differences, ``mismatch_k1``, ``mismatch_kl`` (k3);
        nothing if no token is fresh.
    """
    chosen = np.asarray(fresh, np.float64) > 0
    if not chosen.any():
        return {}
    ratio = np.asarray(trainer, np.float64)[chosen] - np.asarray(rollout, np.float64)[chosen]
    with np.errstate(over="ignore"):  # the divergence may be infinite
        k3 = np.expm1(ratio) - ratio
    return {
        "mismatch_mean": float(np.abs(ratio).mean()),
        "mismatch_max": float(np.abs(ratio).max()),
        "mismatch_k1": float(-ratio.mean()),
        "mismatch_kl": float(k3.mean()),
    }


def staleness_shares(ages: Ages) -> dict[str, float]:
    """Return the share of the trained tokens of each age.

    Args:
        ages: versions that each token is behind the weights at the start of the step, [T], 0 or more.

    Returns:
        ``staleness/0``, ``staleness/1``, ... up to the greatest age, or to ``staleness/16``, which includes all older.
    """
    if not len(ages):
        return {}
    counts = np.bincount(np.minimum(ages, OLDEST_BIN))
    return {f"staleness/{age}": float(count) / len(ages) for age, count in enumerate(counts)}


def effective_sample_size(trainer: Array, rollout: Array, lengths: Sequence[int]) -> dict[str, float]:
    """Return the effective sample size after importance weighting: (sum w)^2 / (N sum w^2) (Kong, 1992).

    1 if all weights are equal, 1 / N if a single one dominates.

    Args:
        trainer: log-probabilities under the weights that are trained, [T].
        rollout: log-probabilities at sampling, [T].
        lengths: trained tokens of each completion, in order; their sum is T.

    Returns:
        ``ess_token`` of the weight of each token, ``ess_sequence`` of the product over each completion. Nothing
        without tokens.
    """
    if not len(trainer):
        return {}
    ratio = np.asarray(trainer, np.float64) - np.asarray(rollout, np.float64)
    whole = np.array([length for length in lengths if length])
    starts = np.cumsum(whole) - whole
    return {"ess_token": _effective_share(ratio), "ess_sequence": _effective_share(np.add.reduceat(ratio, starts))}


def _effective_share(log_weights: Array) -> float:
    """Return the effective share of weights that are given by their logarithms; only their ratios matter."""
    if not np.isfinite(log_weights).all():
        return math.nan
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))

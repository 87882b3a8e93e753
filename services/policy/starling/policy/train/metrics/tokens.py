"""What a step says of itself besides its loss: metrics that tell a broken run from a slow one.

Pure functions of what the step has in hand anyway. T are the step's trained tokens; log-probabilities are nats, those
of the trainer under the weights with which the step began. `docs/reference/metrics.md` lists every metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.floating[Any]]
Ages = npt.NDArray[np.integer[Any]]

OLDEST_BIN: Final = 16
"""Tokens that are older are counted with those of this age, so that a step has not ever more metrics."""
SAMPLED_PER_TENSOR: Final = 1024


def mismatch(trainer: Array, rollout: Array, fresh: Array) -> dict[str, float]:
    """Compare two computations of the same weights' log-probabilities.

    For tokens of a `fresh` completion both are of the same weights: any difference is one of kernels, dtypes, or of
    what was sampled from. k1 and k3 estimate the divergence of the trainer's distribution from the rollout's
    (http://joschu.net/blog/kl-approx.html), k1 without bias, k3 with less variance and never below 0.

    Args:
        trainer: log-probabilities of the trained tokens by the trainer, [T].
        rollout: those told by the rollout, [T].
        fresh: 1 for tokens whose whole completion was sampled by the weights that the step began with, else 0; [T].

    Returns:
        ``mismatch_mean`` and ``mismatch_max`` of the absolute differences, ``mismatch_k1``, ``mismatch_kl`` (k3);
        nothing where no token is fresh.
    """
    chosen = np.asarray(fresh, np.float64) > 0
    if not chosen.any():
        return {}
    ratio = np.asarray(trainer, np.float64)[chosen] - np.asarray(rollout, np.float64)[chosen]
    with np.errstate(over="ignore"):  # an infinite divergence is one
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
        ages: versions that each token is behind the weights that the step began with, [T], 0 or more.

    Returns:
        ``staleness/0``, ``staleness/1``, ... up to the greatest age, or to ``staleness/16`` with all that are older.
    """
    if not len(ages):
        return {}
    counts = np.bincount(np.minimum(ages, OLDEST_BIN))
    return {f"staleness/{age}": float(count) / len(ages) for age, count in enumerate(counts)}


def effective_sample_size(trainer: Array, rollout: Array, lengths: Sequence[int]) -> dict[str, float]:
    """Return how much of the sample is left after importance weighting: (sum w)^2 / (N sum w^2) (Kong, 1992).

    1 where all weights are equal, 1 / N where one of them is all there is.

    Args:
        trainer: log-probabilities under the weights that are trained, [T].
        rollout: those under which the tokens were sampled, [T].
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
    return {"ess_token": _share_left(ratio), "ess_sequence": _share_left(np.add.reduceat(ratio, starts))}


def throughput(num_tokens: float, seconds: float) -> dict[str, float]:
    """Return ``tokens_per_s``: completion tokens of the step, over the seconds that it trained."""
    return {"tokens_per_s": num_tokens / seconds} if seconds > 0.0 else {}


class WeightProbe:
    """A sample of the weights, read before and after a step to see how far it moved them.

    A whole copy would cost as much memory as the weights. Of each tensor the same evenly spaced elements are read, at
    most `SAMPLED_PER_TENSOR`; sums over a tensor are those over its sample, scaled. Small tensors are read whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Watch `tensors`, those of them that are floating-point, which are changed in place."""
        self._views: dict[torch.device, list[Tensor]] = {}
        scales: dict[torch.device, list[float]] = {}
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.numel():
                flat = tensor.detach().view(-1)  # a copy would never change
                # An odd stride, so that a sample of a matrix whose rows are a power of two is not one column of it.
                view = flat[:: -(-flat.numel() // SAMPLED_PER_TENSOR) | 1]
                self._views.setdefault(tensor.device, []).append(view)
                scales.setdefault(tensor.device, []).append(flat.numel() / view.numel())
        self._scales = {
            device: torch.cat([torch.full((len(v),), s) for v, s in zip(views, scales[device], strict=True)]).to(device)
            for device, views in self._views.items()
        }

    def read(self) -> dict[torch.device, Tensor]:
        """Return a copy of the sample, by the device that it is on."""
        return {device: torch.cat(views) for device, views in self._views.items()}

    def change(self, before: Mapping[torch.device, Tensor]) -> dict[str, float]:
        """Compare with `before`, which `read` returned.

        Returns:
            ``update_norm``: Euclidean norm of the change over that of the weights before; ``weights_changed_share``:
            share of the sampled weights that are not bitwise as before. In bfloat16 an update that is smaller than
            half a unit in the last place leaves a weight as it is, so a share near 0 means that little is learnt.
        """
        if not before:
            return {}
        after = self.read()
        sums = torch.stack([_sums(old, after[on], self._scales[on]).cpu() for on, old in before.items()]).sum(dim=0)
        moved, size, num_changed = sums.tolist()
        return {
            "update_norm": math.sqrt(moved / size) if size > 0.0 else float(moved > 0.0),
            "weights_changed_share": num_changed / sum(len(old) for old in before.values()),
        }


def _share_left(log_weights: Array) -> float:
    """Return the effective share of weights that are given by their logarithms; only their ratios matter."""
    if not np.isfinite(log_weights).all():
        return math.nan
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def _sums(old: Tensor, new: Tensor, scale: Tensor) -> Tensor:
    """Return the squared norm of the change, that of `old`, both with each element's `scale`, and how many changed."""
    before = old.float()
    moved, size = (new.float() - before).square() * scale, before.square() * scale
    # Sums in float64: of a few thousand tensors' samples float32 would lose the small ones.
    return torch.stack([part.sum(dtype=torch.float64) for part in (moved, size, new != old)])


# JOINED from starling.policy.train.measure: From per-token metrics of microbatches to the metrics of a step,
# read from the device once.


class TokenMetrics:
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

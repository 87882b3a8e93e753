"""Metrics of a step that do not depend on its kind: time, throughput, change of the weights, alarms."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from starling.common.wire.messages import Alarm
from starling.policy.core.alarms import Alarms
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.metrics.clock import StepClock
from starling.policy.train.metrics.flops import peak_of, utilisation

FLOPS: Final = "model_flops"
"""Metric of a trainer that holds its step's model FLOPs (`starling.policy.train.metrics.flops`)."""
SAMPLED_PER_TENSOR: Final = 1024


class StepMetrics:
    """Adds time, throughput and change of the weights to the metrics of each step, and evaluates the alarms."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        clock: StepClock,
        device: torch.device,
        settings: PolicySettings,
        sum_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare.

        Args:
            tensors: the weights, which steps change in place; on a mesh, those that this rank owns.
            clock: measures the phases of a step, which `end` completes.
            device: of the steps.
            settings: the peak of one device, the number of ranks, and the bounds of the alarms.
            sum_ranks: see `WeightProbe`.
        """
        self._probe, self._clock = WeightProbe(tensors, sum_ranks), clock
        peak = peak_of(device, settings.peak_tflops)
        self._peak = None if peak is None else peak * settings.parallel.num_ranks
        self._alarms = Alarms(settings.alarms.rules(), settings.alarms.fail_on)
        self._before: dict[torch.device, Tensor] = {}
        self._began, self._num_replicas = 0.0, 1

    def begin(self, num_replicas: int = 1) -> None:
        """Start a step whose data is available, and which `num_replicas` policies make together."""
        self._num_replicas = num_replicas
        self._before = self._probe.read()
        self._began = time.perf_counter()

    def end(self, step: int, trained: Mapping[str, float]) -> tuple[dict[str, float], tuple[Alarm, ...]]:
        """Complete step `step`, whose trainer returned the metrics `trained`. Returns all metrics and active alarms.

        Added are ``train_s`` (seconds since `begin`), ``tokens_per_s``, ``update_norm``, ``weights_changed_share``,
        ``time/...``, and with the trainer's ``model_flops`` also ``tflops`` and, where the peak is known, ``mfu``.
        """
        metrics = {**trained, **self._probe.change(self._before)}
        seconds = metrics["train_s"] = time.perf_counter() - self._began  # the probe has waited for the device
        metrics |= throughput(metrics["num_tokens"], seconds)
        if FLOPS in metrics:
            peak = None if self._peak is None else self._peak * self._num_replicas
            metrics |= utilisation(metrics[FLOPS], seconds, peak)
        metrics |= self._clock.take()
        return metrics, self._alarms.after(step, metrics)


def throughput(num_tokens: float, seconds: float) -> dict[str, float]:
    """Return ``tokens_per_s``: completion tokens of the step over its training time."""
    return {"tokens_per_s": num_tokens / seconds} if seconds > 0.0 else {}


class WeightProbe:
    """A sample of the weights, read before and after a step to measure how far it moved them.

    A full copy would cost as much memory as the weights. Of each tensor the same evenly spaced elements are read, at
    most `SAMPLED_PER_TENSOR`; sums over a tensor are those over its sample, scaled. Small tensors are read whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor], sum_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        """Sample the floating-point ones of `tensors`, which are changed in place.

        Args:
            tensors: the weights.
            sum_ranks: returns the sum of a tensor over the ranks that own parts of the weights; None for a single one.
        """
        self._sum_ranks = sum_ranks
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
        """Return a copy of the sample, by device."""
        return {device: torch.cat(views) for device, views in self._views.items()}

    def change(self, before: Mapping[torch.device, Tensor]) -> dict[str, float]:
        """Compare with `before`, which `read` returned.

        Returns:
            ``update_norm``: Euclidean norm of the change over that of the weights before; ``weights_changed_share``:
            share of the sampled weights that changed by at least one bit. In bfloat16 an update smaller than half a
            unit in the last place leaves a weight unchanged, so a share near 0 means that little is learnt.
        """
        after = self.read()
        parts = [_sums(old, after[on], self._scales[on]).cpu() for on, old in before.items()]
        sums = torch.stack([torch.zeros(4, dtype=torch.float64), *parts]).sum(dim=0)
        moved, size, num_changed, num_sampled = (sums if self._sum_ranks is None else self._sum_ranks(sums)).tolist()
        if not num_sampled:
            return {}
        return {
            "update_norm": math.sqrt(moved / size) if size > 0.0 else float(moved > 0.0),
            "weights_changed_share": num_changed / num_sampled,
        }


def _sums(old: Tensor, new: Tensor, scale: Tensor) -> Tensor:
    """Return the squared norms of the change and of `old`, weighted by `scale`, and the numbers of changed and of all
    elements."""
    before = old.float()
    moved, size = (new.float() - before).square() * scale, before.square() * scale
    # Sums in float64: over a few thousand tensors' samples float32 would lose the small ones.
    return torch.stack([part.sum(dtype=torch.float64) for part in (moved, size, new != old, torch.ones_like(scale))])

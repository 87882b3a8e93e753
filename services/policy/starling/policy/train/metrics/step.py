"""What is told of every step besides what its trainer says of it: time, speed, how far the weights moved, alarms."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from starling.common.wire.messages import Alarm
from starling.policy.core.alarms import Alarms
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.metrics.clock import StepClock
from starling.policy.train.metrics.flops import peak_of, utilisation
from starling.policy.train.metrics.tokens import WeightProbe, throughput

FLOPS = "model_flops"
"""What a trainer calls its step's model FLOPs (`starling.policy.train.metrics.flops`)."""


class StepMetrics:
    """Watches the steps of one trainer, whatever kind they are of."""

    def __init__(
        self, tensors: Mapping[str, Tensor], clock: StepClock, device: torch.device, settings: PolicySettings
    ) -> None:
        """Watch.

        Args:
            tensors: the weights, which steps change in place.
            clock: tells where the time went; its step ends with `end`.
            device: computes the steps.
            settings: the peak of the device, and the bounds of the alarms.
        """
        self._probe, self._clock = WeightProbe(tensors), clock
        self._peak = peak_of(device, settings.peak_tflops)
        self._alarms = Alarms(settings.alarms.rules(), settings.alarms.fail_on)
        self._before: dict[torch.device, Tensor] = {}
        self._began = 0.0

    def begin(self) -> None:
        """A step begins: what it needs is there."""
        self._before = self._probe.read()
        self._began = time.perf_counter()

    def end(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], tuple[Alarm, ...]]:
        """Step `step` is made, and `metrics` is what its trainer says. Returns all metrics, and the alarms that are on.

        Added are ``train_s`` (seconds since `begin`), ``tokens_per_s``, ``update_norm``, ``weights_changed_share``,
        ``time/...``, and with ``model_flops`` of the trainer's ``tflops`` and, where the peak is known, ``mfu``.
        """
        told = {**metrics, **self._probe.change(self._before)}
        seconds = told["train_s"] = time.perf_counter() - self._began  # the probe has waited for the device
        told |= throughput(told["num_tokens"], seconds)
        if FLOPS in told:
            told |= utilisation(told[FLOPS], seconds, self._peak)
        told |= self._clock.take()
        return told, self._alarms.after(step, told)

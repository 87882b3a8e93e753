"""Step metrics of a real trainer: time, change of the weights, alarms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from starling.policy.core.phases import PHASES
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.metrics.clock import StepClock
from starling.policy.train.metrics.step import StepMetrics
from starling.policy.train.model.load import version_tensors
from starling.policy.train.rl import RlTrainer

CPU = torch.device("cpu")


def test_step_metrics_report_time_and_change(tiny: Callable[..., Any], make_groups: Callable[..., Any]) -> None:
    """The weights moved by less than their norm; the phases sum to 1; no alarm is active."""
    model = tiny()
    settings = PolicySettings(peak_tflops=2.0)
    trainer = RlTrainer(model, settings, total_steps=4)
    watch = StepMetrics(version_tensors(model), StepClock(), CPU, settings)
    watch.begin()
    metrics, alarms = watch.end(1, {**trainer.step(make_groups([(3, (4, 2))]), step=1), "model_flops": 1e9})
    assert 0.0 < metrics["update_norm"] < 0.1
    assert metrics["weights_changed_share"] > 0.5
    assert math.isclose(math.fsum(metrics[f"time/{phase}_share"] for phase in PHASES), 1.0, rel_tol=1e-12)
    assert 0.0 < metrics["train_s"] <= metrics["time/step_s"]
    assert math.isclose(metrics["tokens_per_s"] * metrics["train_s"], 6.0)
    assert math.isclose(metrics["mfu"] * 2.0, metrics["tflops"])
    assert [alarm.name for alarm in alarms] in ([], ["mismatch"])  # the groups' log-probabilities are made up


def test_unchanged_weights_raise_alarm_until_changed(tiny: Callable[..., Any]) -> None:
    """After the configured number of steps, and fatal if configured; a CPU has no MFU."""
    model = tiny()
    settings = PolicySettings.model_validate({"alarms": {"still_steps": 2, "fail_on": ["weights_still"]}})
    watch = StepMetrics(version_tensors(model), StepClock(), CPU, settings)
    names = []
    for step in range(1, 5):
        watch.begin()
        if step == 4:
            next(model.parameters()).data.add_(1.0)
        metrics, alarms = watch.end(step, {"num_tokens": 1.0, "model_flops": 1.0})
        names.append([(alarm.name, alarm.since, alarm.fatal) for alarm in alarms])
        assert "mfu" not in metrics
    assert names == [[], [("weights_still", 2, True)], [("weights_still", 2, True)], []]

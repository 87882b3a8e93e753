"""`docs/reference/metrics.md` lists every metric of a step, and every alarm with its bound."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from starling.policy.core.phases import PHASES
from starling.policy.settings.alarms import AlarmName, AlarmSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import SftExample
from starling.policy.train.metrics.clock import StepClock
from starling.policy.train.metrics.step import FLOPS, StepMetrics
from starling.policy.train.metrics.tokens import effective_sample_size, mismatch, staleness_shares
from starling.policy.train.model.load import version_tensors
from starling.policy.train.rl import RlTrainer
from starling.policy.train.sft import SftTrainer

PAGE = (Path(__file__).parents[4] / "docs/reference/metrics.md").read_text()
LISTED = {
    name for cell in re.findall(r"^\| (`[^|]*`) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", cell)
}


def is_listed(name: str) -> bool:
    """Return whether the page lists `name`, or its pattern."""
    if name.startswith("time/"):
        phase = re.sub(r"_(s|share)$", "", name.removeprefix("time/"))
        return f"`{name}`" in PAGE or (phase in PHASES and phase in LISTED)
    return name in LISTED or re.sub(r"/.*", "", name) in {re.sub(r"/<.*", "", form) for form in LISTED if "/<" in form}


def test_metrics_page_lists_every_metric(tiny: Callable[..., Any], make_groups: Callable[..., Any]) -> None:
    """Those of reinforcement, of supervision, and of the controller."""
    model, settings = tiny(), PolicySettings.model_validate({"peak_tflops": 1, "algorithm": {"kl_coefficient": 0.1}})
    watch = StepMetrics(version_tensors(model), StepClock(), torch.device("cpu"), settings)
    watch.begin()
    reinforced = RlTrainer(model, settings, total_steps=1).step(make_groups([(3, (4, 2))]), step=1)
    measured = {
        **mismatch(np.zeros(2), np.zeros(2), np.ones(2)),
        **effective_sample_size(np.zeros(2), np.zeros(2), [2]),
        **staleness_shares(np.arange(3)),
    }
    reported, _ = watch.end(1, {**reinforced, **measured, FLOPS: 1.0})
    example = SftExample(np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32))
    supervised = SftTrainer(model, settings, total_steps=1).step([example])
    names = {*reported, *supervised, "score/x", "reward_min", "reward_max", "completion_tokens_mean", "num_discarded"}
    names |= {"num_env_errors", "turns_mean", "env/x"}
    assert sorted(name for name in names if not is_listed(name)) == []
    assert not is_listed("no_such_metric")


def test_metrics_page_lists_every_alarm_with_its_bound() -> None:
    """The bounds are the defaults."""
    rows = dict(
        re.findall(r"^\| `(\w+)` \| (`(?:skipped|mismatch|weights|zero|entropy|ess|clip|stale)[^|]*) \|", PAGE, re.M)
    )
    rules = {rule.name: rule for rule in AlarmSettings().rules()}
    assert set(rows) == set(get_args(AlarmName)) == set(rules)
    for name, row in rows.items():
        rule = rules[name]
        assert f"`{rule.metric}`" in row
        assert rule.bound == 0.0 or f" {rule.bound:g}" in row
        assert rule.num_steps == 1 or f"{rule.num_steps} steps" in row

"""Alarms of a step: problems that a policy reports or the controller finds, noted when they begin and are over.

Policies report with each step all alarms that are on. The controller notes the difference, so that nothing is noted
twice when a result arrives twice or a process restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from starling.common.wire.messages import Alarm
from starling.controller.core.state import ControllerState
from starling.controller.core.training.reward_hacking import PREFIX, EvaluatedSteps
from starling.controller.core.training.step import ActiveStep

Alarms = dict[str, Alarm]
"""The alarms that are on, by name."""


def alarms_after(step: ActiveStep, evaluated: EvaluatedSteps, before: Alarms) -> Alarms:
    """Return the alarms that are on after a step that was made.

    A step without a report, because the policy that made it is gone, changes nothing of those that policies report.
    """
    reported = step.alarms if step.metrics else before
    return {
        **{name: alarm for name, alarm in reported.items() if not name.startswith(PREFIX)},
        **evaluated.alarms(step.number, before),
    }


def to_fields(alarms: Alarms) -> dict[str, Any]:
    """Return the alarms as fields of a step's record and of its line in metrics.jsonl."""
    return {"alarms": [msgspec.to_builtins(alarm) for alarm in alarms.values()]} if alarms else {}


def from_fields(metrics: Mapping[str, Any]) -> Alarms:
    """Return the alarms of a step's record."""
    alarms = msgspec.convert(metrics.get("alarms", ()), tuple[Alarm, ...])
    return {alarm.name: alarm for alarm in alarms}


def report(state: ControllerState, step: int, before: Alarms) -> None:
    """Note the alarms that `step` turned on or off; fail the run for an alarm that the recipe fails it for."""
    now_on = state.training.alarms
    for name, alarm in now_on.items():
        if name not in before:
            state.outbox.note("alarm", step=step, name=name, value=alarm.value, bound=alarm.bound, text=alarm.text)
        if alarm.fatal:
            state.lifecycle.fail(f"policy.alarms.fail_on names an alarm that is on: {alarm}", state.now)
    for name in before:
        if name not in now_on:
            state.outbox.note("alarm_over", step=step, name=name)

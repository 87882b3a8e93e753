"""What a policy says is wrong with a step: told once when it begins and once when it is over.

Policies say with each step which alarms are on. The controller tells what is new of that, so that nothing is told twice
because an answer came twice, or because somebody was started again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from starling.common.wire.messages import Alarm
from starling.controller.core.state import ControllerState
from starling.controller.core.training.step import ActiveStep

Alarms = dict[str, Alarm]
"""By name, those that are on."""


def alarms_after(step: ActiveStep, before: Alarms) -> Alarms:
    """Return the alarms that are on after a step that was made.

    A step of which nobody told anything, since whoever made it is gone, is no evidence.
    """
    return step.alarms if step.metrics else before


def told(alarms: Alarms) -> dict[str, Any]:
    """Return what a step's line and its record say of the alarms."""
    return {"alarms": [msgspec.to_builtins(alarm) for alarm in alarms.values()]} if alarms else {}


def as_told(metrics: Mapping[str, Any]) -> Alarms:
    """Return the alarms of a step's record."""
    alarms = msgspec.convert(metrics.get("alarms", ()), tuple[Alarm, ...])
    return {alarm.name: alarm for alarm in alarms}


def tell(state: ControllerState, step: int, before: Alarms) -> None:
    """Note which alarms `step` turned on or off; end the run for one that the recipe ends it for."""
    for name, alarm in state.alarms.items():
        if name not in before:
            state.note("alarm", step=step, name=name, value=alarm.value, bound=alarm.bound, text=alarm.text)
        if alarm.fatal:
            state.ending.fail(f"policy.alarms.fail_on names an alarm that is on: {alarm}", state.now)
    for name in before:
        if name not in state.alarms:
            state.note("alarm_over", step=step, name=name)

"""What a policy says is wrong with its steps: told once, kept over a restart, and the end of the run if so wished."""

from __future__ import annotations

import math
from typing import Any

from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, StepCommitted


def alarm(name: str, since: int = 1, *, value: float = 0.7, fatal: bool = False) -> wire.Alarm:
    """Return an alarm that is on."""
    return wire.Alarm(name=name, value=value, bound=0.5, text="do something", since=since, fatal=fatal)


def script_of(num_steps: int) -> Script:
    """Return a run that has begun and makes only supervised steps, one after the other."""
    script = Script(num_supervised_steps=num_steps, num_steps=0, num_held_out=0)
    script.joins("policy-0")
    return script


def trains(script: Script, step: int, *alarms: wire.Alarm) -> list[str]:
    """Make a step with these alarms on; return what is told of alarms."""
    trained = wire.StepTrained(lease=f"train:{step}:0", step=step, metrics={"loss": 1.0}, alarms=alarms)
    return [line for line in script.hears("policy-0", trained) if "alarm" in line]


def notes(script: Script) -> dict[str, dict[str, Any]]:
    """Return what the last event noted, by kind."""
    return {command.kind: command.fields for command in script.commands if isinstance(command, Note)}


def test_alarm_is_noted_when_it_begins_and_ends() -> None:
    """And every step's line has those that are on."""
    script = script_of(5)
    assert trains(script, 1) == []
    assert "alarms" not in notes(script)["step"]
    assert trains(script, 2, alarm("clip", 2)) == ["(alarm 2)"]
    told = notes(script)
    assert told["alarm"] == {"step": 2, "name": "clip", "value": 0.7, "bound": 0.5, "text": "do something"}
    assert [one["name"] for one in told["step"]["alarms"]] == ["clip"]
    assert trains(script, 3, alarm("clip", 2), alarm("entropy", 3)) == ["(alarm 3)"]
    assert trains(script, 4, alarm("entropy", 3)) == ["(alarm_over 4)"]
    assert notes(script)["alarm_over"] == {"step": 4, "name": "clip"}


def test_step_without_a_report_keeps_alarms() -> None:
    """The policy died after it had made the step, which only its heartbeat told: the alarm stays on."""
    script = script_of(4)
    trains(script, 1, alarm("clip"))
    script.beats("policy-0", version=2)
    assert script.state.version == 2
    assert list(script.state.training.alarms) == ["clip"]
    assert trains(script, 3) == ["(alarm_over 3)"]


def test_restarted_controller_restores_alarms() -> None:
    """So it does not tell them again; also where a value is no number."""
    script = script_of(4)
    trains(script, 1, alarm("not_finite", value=math.nan))
    past = [JournalEntry(write.record) for write in script.journal]
    again = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=past, incarnation=2)
    assert list(again.state.training.alarms) == ["not_finite"]
    assert math.isnan(again.state.training.alarms["not_finite"].value)
    assert str(again.state.training.alarms["not_finite"]) == str(script.state.training.alarms["not_finite"])
    older = [JournalEntry(StepCommitted(step=1, metrics={"loss": 1.0}))]  # of a step without alarms
    assert Controller(script.plan, Stream("train"), Stream("sft"), [], journal=older).state.training.alarms == {}


def test_fatal_alarm_fails_the_run() -> None:
    """With its sentence as the reason; the step itself is committed."""
    script = script_of(4)
    script.hears(
        "policy-0",
        wire.StepTrained(lease="train:1:0", step=1, metrics={"loss": 1.0}, alarms=(alarm("clip", fatal=True),)),
    )
    reason = (
        "policy.alarms.fail_on names an alarm that is on: clip: 0.7 against a bound of 0.5 since step 1: do something"
    )
    assert f"policy-0 <- drain: {reason}" in script.sent_lines()
    assert script.state.version == 1
    assert script.leaves("policy-0")[-1] == f"failed: {reason}"

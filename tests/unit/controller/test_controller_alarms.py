"""Alarms of the policy: noted once, restored after a restart, and fatal for the run if configured."""

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
    """Return a started run of supervised steps only."""
    script = Script(num_supervised_steps=num_steps, num_steps=0, num_held_out=0)
    script.joins("policy-0")
    return script


def train(script: Script, step: int, *alarms: wire.Alarm) -> list[str]:
    """Train a step with these active alarms; return the notes about alarms."""
    trained = wire.StepTrained(lease=f"train:{step}:0", step=step, metrics={"loss": 1.0}, alarms=alarms)
    return [line for line in script.receive("policy-0", trained) if "alarm" in line]


def notes(script: Script) -> dict[str, dict[str, Any]]:
    """Return the last event's notes by kind."""
    return {command.kind: command.fields for command in script.commands if isinstance(command, Note)}


def test_alarm_is_noted_when_it_begins_and_ends() -> None:
    """Every step's metrics list the active alarms."""
    script = script_of(5)
    assert train(script, 1) == []
    assert "alarms" not in notes(script)["step"]
    assert train(script, 2, alarm("clip", 2)) == ["(alarm 2)"]
    notes_by_kind = notes(script)
    assert notes_by_kind["alarm"] == {"step": 2, "name": "clip", "value": 0.7, "bound": 0.5, "text": "do something"}
    assert [one["name"] for one in notes_by_kind["step"]["alarms"]] == ["clip"]
    assert train(script, 3, alarm("clip", 2), alarm("entropy", 3)) == ["(alarm 3)"]
    assert train(script, 4, alarm("entropy", 3)) == ["(alarm_over 4)"]
    assert notes(script)["alarm_over"] == {"step": 4, "name": "clip"}


def test_step_without_a_report_keeps_alarms() -> None:
    """A step known only from the heartbeat of a policy that died leaves the alarm active."""
    script = script_of(4)
    train(script, 1, alarm("clip"))
    script.heartbeats("policy-0", version=2)
    assert script.state.version == 2
    assert list(script.state.training.alarms) == ["clip"]
    assert train(script, 3) == ["(alarm_over 3)"]


def test_restarted_controller_restores_alarms() -> None:
    """They are not noted again, also when a value is NaN."""
    script = script_of(4)
    train(script, 1, alarm("not_finite", value=math.nan))
    journaled = [JournalEntry(write.record) for write in script.journal]
    again = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=journaled, incarnation=2)
    assert list(again.state.training.alarms) == ["not_finite"]
    assert math.isnan(again.state.training.alarms["not_finite"].value)
    assert str(again.state.training.alarms["not_finite"]) == str(script.state.training.alarms["not_finite"])
    older = [JournalEntry(StepCommitted(step=1, metrics={"loss": 1.0}))]  # of a step without alarms
    assert Controller(script.plan, Stream("train"), Stream("sft"), [], journal=older).state.training.alarms == {}


def test_fatal_alarm_fails_the_run() -> None:
    """The reason is the alarm's sentence; the step itself is committed."""
    script = script_of(4)
    script.receive(
        "policy-0",
        wire.StepTrained(lease="train:1:0", step=1, metrics={"loss": 1.0}, alarms=(alarm("clip", fatal=True),)),
    )
    reason = (
        "policy.alarms.fail_on names an alarm that is on: clip: 0.7 against a bound of 0.5 since step 1: do something"
    )
    assert f"policy-0 <- drain: {reason}" in script.sent_lines()
    assert script.state.version == 1
    assert script.leaves("policy-0")[-1] == f"failed: {reason}"

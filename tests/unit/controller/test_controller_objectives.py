"""Steps that learn from examples: what they teach goes with each of them."""

from __future__ import annotations

from typing import Any

import pytest
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.records import StepCommitted


@pytest.mark.parametrize(("objective", "told"), [("sft", ""), ("dpo", "dpo"), ("reward_model", "reward_model")])
def test_a_step_says_what_its_examples_teach(objective: Any, told: str) -> None:
    script = Script(num_supervised_steps=1, num_steps=0, objective=objective)
    script.joins("policy-0")
    (command,) = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert (command.objective, command.groups) == (told, ())
    assert [example.id for example in command.examples] == ["sft0"]
    assert script.state.phase == objective
    script.trains(1)
    [committed] = [write.record for write in script.journal if isinstance(write.record, StepCommitted)]
    assert committed.metrics["phase"] == objective


def test_a_policy_that_returns_is_dealt_its_steps_with_their_objective() -> None:
    script = Script(num_supervised_steps=2, num_steps=0, objective="dpo")
    script.joins("policy-0")
    script.trains(1)
    script.joins("policy-0", epoch=2)
    (again,) = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert (again.step, again.replayed, again.objective) == (1, True, "dpo")

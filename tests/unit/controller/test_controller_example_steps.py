"""Steps on examples: each carries its objective."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.kinds import DPO, REWARD_MODEL, SFT, RunKind
from starling.common.wire import messages as wire
from starling.controller.core.explain import run_phase
from starling.controller.core.records import StepCommitted


@pytest.mark.parametrize(("kind", "expected"), [(SFT, ""), (DPO, "dpo"), (REWARD_MODEL, "reward_model")])
def test_step_of_examples_carries_its_objective(kind: RunKind, expected: str) -> None:
    script = Script(num_supervised_steps=1, num_steps=0, kind=kind)
    script.joins("policy-0")
    (command,) = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert (command.objective, command.groups) == (expected, ())
    assert [example.id for example in command.examples] == ["sft0"]
    assert run_phase(script.state) == kind.name
    script.trains(1)
    [committed] = [write.record for write in script.journal if isinstance(write.record, StepCommitted)]
    assert committed.metrics["phase"] == kind.name


def test_replayed_example_steps_carry_their_objective() -> None:
    script = Script(num_supervised_steps=2, num_steps=0, kind=DPO)
    script.joins("policy-0")
    script.trains(1)
    script.joins("policy-0", incarnation=2)
    (again,) = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert (again.step, again.replayed, again.objective) == (1, True, "dpo")

"""Runs that start from a saved state of another run, and the commands to save states."""

from __future__ import annotations

import pytest
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.explain import status, waits
from starling.controller.core.groups.admission import required_version
from starling.controller.core.groups.group import GroupState


def run_from_state(version: int, prompt: int, **changes: int) -> Script:
    """Return a run whose policy has joined with a state of `version`."""
    script = Script(begin_version=version, begin_prompt=prompt, **changes)
    script.joins("policy-0", version=version)
    script.joins("rollout-0")
    script.joins("reward-0")
    return script


def commands_of(script: Script, kind: type) -> list[wire.Down]:
    """Return the commands of this kind that the last event sent to the policy."""
    return [send.message for send in script.sent if isinstance(send.message, kind)]


def test_continued_run_begins_with_the_next_step_and_prompt() -> None:
    script = run_from_state(3, 7, num_steps=5, prompts_per_step=2, max_staleness=0)
    script.publishes(3)
    script.adopts("rollout-0", 3)
    assert script.state.version == 3
    assert "rollout-0 <- generate:t7:0 train7 >= v3" in script.log
    assert "rollout-0 <- generate:t8:0 train8 >= v3" in script.log
    for ordinal in (7, 8):
        script.generates("rollout-0", f"generate:t{ordinal}:0", version=3)
        script.scores(f"score:t{ordinal}:0")
    assert "policy-0 <- train:4:0 train7 train8" in script.log
    (step,) = commands_of(script, wire.TrainStep)
    assert isinstance(step, wire.TrainStep)
    assert (step.ordinal, step.next_prompt) == (4, 9)
    script.trains(4)
    assert script.state.version == 4


def test_continued_run_makes_the_remaining_steps() -> None:
    script = run_from_state(3, 7, num_steps=5, prompts_per_step=2, max_staleness=3)
    assert script.state.buffer.num_free_slots() == 0
    assert script.state.buffer.num_admitted == 7 + 2 * 2, "of two steps"


def test_supervised_steps_are_continued() -> None:
    script = run_from_state(2, 0, num_supervised_steps=4, num_steps=1, prompts_per_step=1)
    script.heartbeats("policy-0", version=2)
    assert any(line.startswith("policy-0 <- train:3:0 sft") for line in script.log), script.log


def test_policy_older_than_the_saved_state_is_evicted() -> None:
    script = Script(begin_version=3, begin_prompt=7, num_steps=5)
    lines = script.joins("policy-0", version=0)
    assert "policy-0 is at version 0, and the journal keeps only the steps after version 3" in lines[-1]


def test_first_step_waits_for_all_policies() -> None:
    script = run_from_state(3, 7, num_steps=5, num_rollouts=2)
    assert not script.state.has_begun


@pytest.mark.parametrize("discards", [False, True])
def test_next_prompt_follows_the_last_trained_one(discards: bool) -> None:
    script = Script(num_steps=2, prompts_per_step=1, max_staleness=0, max_tries=0)
    script.start_run()
    if discards:
        script.fails("rollout-0", "generate:t0:0", "no", fatal=True)
    script.generate_and_score(int(discards))
    steps = [s.message for s in script.sent if isinstance(s.message, wire.TrainStep)]
    assert [step.next_prompt for step in steps] == [1 + discards]


def test_save_command_carries_the_latest_metrics() -> None:
    script = Script(num_steps=3, save_every=1, prompts_per_step=1)
    script.start_run()
    script.generate_and_score(0)
    trained = wire.StepTrained(lease="train:1:0", step=1, metrics={"loss": 0.5, "num_tokens": 7})
    script.receive("policy-0", trained)
    (save,) = commands_of(script, wire.SaveCheckpoint)
    assert isinstance(save, wire.SaveCheckpoint)
    assert save.state
    assert save.metrics["loss"] == 0.5
    assert save.metrics["num_tokens"] == 7.0
    assert save.metrics["reward_mean"] == 0.5
    assert "phase" not in save.metrics, "NaN metrics are not sent"


def test_only_the_end_waits_for_a_save() -> None:
    script = Script(num_steps=3, save_every=1, prompts_per_step=1)
    script.start_run()
    script.generate_and_score(0)
    script.trains(1)
    assert "policy-0 <- save:1:0" in script.log
    assert not any("to save" in wait["what"] for wait in waits(script.state))
    script.request_stop()
    assert any("to save" in wait["what"] for wait in waits(script.state))


def test_initial_version_is_not_evaluated_again() -> None:
    script = run_from_state(3, 6, num_steps=6, prompts_per_step=2, max_staleness=0, evaluate_every=2)
    script.publishes(3)
    script.adopts("rollout-0", 3)
    assert script.state.evaluations.current is None, "version 3 is off the interval"
    script.generate_and_score(6, 7, version=3)
    script.trains(4)
    script.publishes(4)
    assert script.state.evaluations.current is not None
    assert script.state.evaluations.current.version == 4
    again = run_from_state(4, 8, num_steps=6, prompts_per_step=2, evaluate_every=2)
    again.publishes(4)
    assert again.state.evaluations.current is None, "the run that made version 4 has evaluated it"


def test_no_group_may_have_tokens_from_before_the_run() -> None:
    script = run_from_state(3, 6, num_steps=9, prompts_per_step=1, max_staleness=2)
    script.publishes(3)
    assert [required_version(script.state, group) for group in script.state.buffer.within(GroupState.WAITING)] == [
        3
    ] * 3


def test_only_groups_of_this_run_are_counted() -> None:
    script = run_from_state(3, 7, num_steps=5, prompts_per_step=2, max_staleness=0)
    assert status(script.state)[1]["num_trained"] == 0

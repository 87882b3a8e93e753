"""Commands that are larger than a message: their groups fail, or the run does, and no replica is blamed."""

from __future__ import annotations

import pytest
from transcript import SMALL, Script

from starling.controller.core.events import NotSent


def not_sent(script: Script, peer: str, lease: str) -> list[str]:
    """Feed the event for a command of `lease`. Returns the commands that follow."""
    return script._step(NotSent(script.now, peer, script.aliases.long(lease), "it is too large"))


def test_prompt_that_no_message_holds_is_tried_again_and_then_discarded() -> None:
    script = Script(SMALL, max_tries=1)
    script.start_run("rollout-0")
    again = not_sent(script, "rollout-0", "generate:t0:0")
    assert again == ["(waiting train0)", "rollout-0 <- generate:t0:1 train0 >= v0"]
    assert "(discarded train0)" in not_sent(script, "rollout-0", "generate:t0:1")
    assert script.controller.state.replicas.membership.conduct["rollout-0"].num_spoiled == 0


def test_completions_that_no_message_holds_are_generated_again() -> None:
    script = Script(SMALL, max_tries=2)
    script.start_run("rollout-0")
    script.generates("rollout-0", "generate:t0:0")
    assert "(waiting train0)" in not_sent(script, "reward-0", "score:t0:0")
    assert "rollout-0" in script.controller.state.replicas.membership.members


@pytest.mark.parametrize("supervised", [False, True])
def test_step_that_no_message_holds_fails_the_run_with_a_sentence(supervised: bool) -> None:
    script = Script(SMALL, num_supervised_steps=1 if supervised else 0)
    script.start_run("rollout-0")
    if not supervised:
        script.generate_and_score(0, 1)
    commands = not_sent(script, "policy-0", "train:1:0")
    assert "policy-0 <- drain: policy-0 could not be sent train 1: it is too large" in commands


def test_not_sent_after_the_end_of_its_lease_changes_nothing() -> None:
    script = Script(SMALL, max_tries=2)
    script.start_run("rollout-0")
    script.generates("rollout-0", "generate:t0:0")
    assert not_sent(script, "rollout-0", "generate:t0:0") == []
    assert not_sent(script, "reward-0", "generate:t1:0") == []
    assert not_sent(script, "rollout-0", "") == []

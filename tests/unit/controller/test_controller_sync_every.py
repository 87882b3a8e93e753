"""Publications every few steps: `rl.sync_every`."""

from __future__ import annotations

from typing import Any

import pytest
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.settings import RlSettings


def running(**settings: Any) -> Script:
    """Return a run of six steps of one group, with a rollout that holds version 0."""
    script = Script(**{"num_steps": 6, "prompts_per_step": 1, "max_staleness": 2, "evaluate_at_end": False, **settings})
    script.joins("rollout-0", slots=8)
    script.joins("policy-0")
    script.joins("reward-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    return script


def publications(script: Script) -> list[int]:
    """Return the versions that the policy was asked to publish."""
    sent = [send.message for send in script.commands_sent.values() if isinstance(send.message, wire.PublishWeights)]
    return [message.version for message in sent]


def take_steps(script: Script, *steps: int) -> None:
    """Make steps, and publish and adopt what is due after each."""
    for step in steps:
        script.generate_and_score(step - 1, version=script.state.weights.version)
        script.trains(step)
        if publications(script)[-1] == step:
            script.publishes(step)
            script.adopts("rollout-0", step)


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (3, [0, 3, 6])])
def test_every_so_many_steps_a_version_is_published(every: int, expected: list[int]) -> None:
    script = running(sync_every=every)
    take_steps(script, 1, 2, 3, 4, 5, 6)
    assert publications(script) == expected


def test_last_version_is_published_whenever_it_comes() -> None:
    script = running(sync_every=3, num_steps=4)
    take_steps(script, 1, 2, 3, 4)
    assert publications(script) == [0, 3, 4]


def test_steps_between_publications_wait_for_none() -> None:
    """The groups of all of them exist from the beginning."""
    script = running(sync_every=3)
    for group in range(3):
        script.generate_and_score(group)
    for step in (1, 2):
        script.trains(step)
        assert script.state.replicas.leases.has("train"), f"step {step + 1} begins at once"
    assert publications(script) == [0]


def test_rollout_that_joins_when_nobody_offers_the_last_version_gets_the_newest() -> None:
    script = running(sync_every=3)
    take_steps(script, 1)
    script.disconnect("rollout-0")
    script.disconnect("policy-0")
    script.joins("policy-0", version=1, incarnation=2)
    assert publications(script) == [0]
    script.joins("rollout-1", slots=8)
    assert publications(script) == [0, 1]


def test_more_steps_than_groups_may_be_old_are_refused() -> None:
    with pytest.raises(ValueError, match="lower sync_every to 2, or raise max_staleness"):
        RlSettings(sync_every=3, max_staleness=1)

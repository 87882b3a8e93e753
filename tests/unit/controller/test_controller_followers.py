"""Rollouts without slots, which follow a run to serve its weights: they adopt every version, and get no work."""

from __future__ import annotations

from transcript import Script

from starling.common.wire import messages as wire


def sent_to(script: Script, name: str, kind: type) -> list[wire.Down]:
    return [
        send.message for send in script.commands_sent.values() if send.peer == name and isinstance(send.message, kind)
    ]


def test_follower_adopts_each_version_and_gets_no_group() -> None:
    script = Script(num_steps=2, prompts_per_step=1, max_staleness=1)
    script.joins("rollout-9", slots=0)
    script.start_run("rollout-0", slots=8)
    script.adopts("rollout-9", 0, script.attempt_of("rollout-9", "adopt:0"))
    script.generate_and_score(0)
    script.trains(1)
    script.publishes(1)
    for name in ("rollout-0", "rollout-9"):
        script.adopts(name, 1, script.attempt_of(name, "adopt:1"))
    assert script.state.replicas.membership.members["rollout-9"].version == 1
    assert sent_to(script, "rollout-0", wire.GenerateGroup)
    assert not sent_to(script, "rollout-9", wire.GenerateGroup)


def test_follower_is_none_of_the_rollouts_that_a_run_needs() -> None:
    script = Script(evaluate_at_start=True)
    script.joins("policy-0")
    script.joins("reward-0")
    script.joins("rollout-9", slots=0)
    script.publishes(0)
    script.adopts("rollout-9", 0)
    assert script.controller.waiting_for == "needs 1 rollout replica, has 0"
    assert script.state.evaluations.current is None or not script.state.evaluations.current.pinned


def test_evaluation_is_pinned_to_no_follower() -> None:
    script = Script(evaluate_at_start=True)
    script.joins("rollout-9", slots=0)
    script.start_run("rollout-0")
    evaluation = script.state.evaluations.current
    assert evaluation is not None
    assert evaluation.pinned == {"rollout-0"}


def test_rollout_beside_a_follower_is_the_last_one() -> None:
    """An answer that cannot be used is no reason to evict the only rollout that works."""
    script = Script()
    script.joins("rollout-9", slots=0)
    script.start_run("rollout-0")
    membership = script.state.replicas.membership
    assert not membership.has_another(membership.members["rollout-0"])
    assert membership.has_another(membership.members["rollout-9"])
    script.leaves("rollout-0")
    assert "rollout" in script.controller.waiting_for


def test_follower_of_a_run_whose_rollouts_share_devices_is_refused() -> None:
    script = Script(colocate=True)
    [line] = script.joins("rollout-9", slots=0)[-1:]
    assert "rollout-9 has no slots and only follows the run, but rollouts of this run use their devices in turn" in line
    assert "rollout-9" not in script.state.replicas.membership.members


def test_reward_without_slots_is_refused() -> None:
    lines = Script().joins("reward-0", slots=0)
    assert any("reward-0 offers 0 slots; it needs at least 1" in line for line in lines)

"""Failed groups, lost replicas, and messages that are late, repeated or lost."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.explain import run_phase
from starling.sim.replicas.weights import encoded_layout, encoded_offer, layout_of
from starling.weightsync.plan.layout import encode

TWO_ROLLOUTS = ("rollout-0", "rollout-1")


def started(**changes: int) -> Script:
    script = Script(**changes)
    script.start_run()
    return script


# --- groups that fail ----------------------------------------------------------------------------------------------


def test_group_whose_scorer_fails_is_generated_again_and_then_discarded() -> None:
    script = started(max_tries=1)
    script.generates("rollout-0", "generate:t0:0")
    assert script.scores("score:t0:0", 1.0, None) == [
        "reward-0 <- release score:t0:0",
        "(waiting train0)",
        "rollout-0 <- generate:t0:1 train0 >= v0",
    ]
    script.generates("rollout-0", "generate:t0:1")
    assert script.scores("score:t0:1", None, None) == [
        "reward-0 <- release score:t0:1",
        "(discarded train0)",
        "rollout-0 <- generate:t2:0 train2 >= v0",
    ], "an unused prompt takes its place"
    # The discarded prompt is in no step, and no reward of 0 took its place.
    script.generate_and_score(1)
    assert script.generate_and_score(2)[-1] == "policy-0 <- train:1:0 train1 train2"


@pytest.mark.parametrize("max_tries", [0, 1, 3])
def test_group_is_tried_max_tries_times(max_tries: int) -> None:
    script = started(max_tries=max_tries)
    for attempt in range(max_tries):
        assert "(waiting train0)" in script.fails("rollout-0", f"generate:t0:{attempt}")
    assert "(discarded train0)" in script.fails("rollout-0", f"generate:t0:{max_tries}")


def test_group_with_a_fatal_failure_is_discarded_at_once() -> None:
    script = started()
    lines = script.fails("rollout-0", "generate:t0:0", "the prompt is too long", fatal=True)
    assert lines[1:] == [
        "(failed rollout-0)",
        "(discarded train0)",
        "rollout-0 <- generate:t2:0 train2 >= v0",
    ]


def test_discarded_group_at_the_tail_is_replaced() -> None:
    script = started(num_steps=1)
    assert script.state.buffer.num_admitted == 2
    script.generate_and_score(0)
    assert script.fails("rollout-0", "generate:t1:0", fatal=True)[-1] == "rollout-0 <- generate:t2:0 train2 >= v0"
    assert script.generate_and_score(2)[-1] == "policy-0 <- train:1:0 train0 train2"


@pytest.mark.parametrize("num", [0, 1, 3])
def test_group_of_the_wrong_size_is_generated_again(num: int) -> None:
    script = started()
    lines = script.generates("rollout-0", "generate:t0:0", num=num)
    assert lines[1:] == ["(waiting train0)", "(invalid rollout-0)", "rollout-0 <- generate:t0:1 train0 >= v0"]


def test_group_with_too_old_a_token_is_generated_again() -> None:
    script = Script(num_supervised_steps=1)
    script.joins("policy-0")
    script.trains(1)
    for name in ("rollout-0", "reward-0"):
        script.joins(name)
    script.publishes(1)
    script.adopts("rollout-0", 1)
    lines = script.generates("rollout-0", "generate:t0:0", version=0)
    assert lines[1:] == ["(waiting train0)", "rollout-0 <- generate:t0:1 train0 >= v1"]


def test_rewards_of_another_number_are_no_rewards() -> None:
    script = started()
    script.generates("rollout-0", "generate:t0:0")
    assert "(waiting train0)" in script.scores("score:t0:0", 1.0)


def test_run_fails_with_the_reason_when_every_group_is_discarded() -> None:
    script = started(max_tries=0)
    for n in range(5):
        assert script.fails("rollout-0", f"generate:t{n}:0")[-1].startswith("rollout-0 <- generate")
    script.fails("rollout-0", "generate:t5:0")
    reason = "the last 6 groups were all discarded; the last one, prompt train5: no luck"
    assert f"policy-0 <- drain: {reason}" in script.advance_time(0.25)
    for name in ("policy-0", "reward-0", "rollout-0"):
        lines = script.leaves(name)
    assert lines[-1] == f"failed: {reason}"


def test_good_group_resets_the_count_of_discards() -> None:
    script = started(max_tries=0)
    for n in range(5):
        script.fails("rollout-0", f"generate:t{n}:0")
    script.generate_and_score(5)
    for n in range(6, 11):
        script.fails("rollout-0", f"generate:t{n}:0")
    assert run_phase(script.state) == "rl"


# --- lost replicas -------------------------------------------------------------------------------------------------


def two_rollouts() -> Script:
    script = Script()
    script.start_run(*TWO_ROLLOUTS)
    held = script.state.replicas.leases.of("rollout-0", "generate")
    assert sorted(map(script.aliases.short, held)) == ["generate:t0:0", "generate:t1:0"]
    return script


def test_groups_of_a_disconnected_rollout_are_requeued() -> None:
    assert two_rollouts().disconnect("rollout-0") == [
        "(left rollout-0)",
        "rollout-1 <- generate:t0:1 train0 >= v0",
        "rollout-1 <- generate:t1:1 train1 >= v0",
    ]


def test_groups_of_a_silent_rollout_are_requeued() -> None:
    script = two_rollouts()
    script.now += script.plan.lease_s
    for name in ("policy-0", "reward-0"):
        script.heartbeats(name)
    script.heartbeats("rollout-1", version=0)
    assert script.advance_time(0.0) == [], "the lease has not expired yet"
    assert script.advance_time(0.01) == [
        "(left rollout-0)",
        "rollout-1 <- generate:t0:1 train0 >= v0",
        "rollout-1 <- generate:t1:1 train1 >= v0",
    ]


def test_lost_reward_replica_costs_no_completions() -> None:
    script = started()
    script.joins("reward-1")
    script.generates("rollout-0", "generate:t0:0")
    holder = next(name for name in ("reward-0", "reward-1") if script.state.replicas.leases.of(name, "score"))
    other = {"reward-0": "reward-1", "reward-1": "reward-0"}[holder]
    assert script.disconnect(holder) == [f"(left {holder})", f"{other} <- score:t0:1"]
    assert script.state.buffer.get(0).tries == 0  # type: ignore[union-attr]


def test_late_result_of_a_redispatched_group_is_ignored() -> None:
    script = two_rollouts()
    script.disconnect("rollout-0")
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- introduce"], (
        "the rollout is no member any longer"
    )
    script.joins("rollout-0")
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- release generate:t0:0"]
    assert script.generates("rollout-0", "generate:t0:1") == ["rollout-0 <- release generate:t0:1"], (
        "the group is leased to another rollout"
    )
    assert script.generates("rollout-1", "generate:t0:1")[1:] == ["reward-0 <- score:t0:0"]
    assert script.generates("rollout-1", "generate:t0:1") == ["rollout-1 <- release generate:t0:1"], (
        "the result is stored once"
    )


def test_restarted_rollout_holds_no_version_and_no_group() -> None:
    script = two_rollouts()
    assert script.joins("rollout-0", incarnation=2) == [
        "(left rollout-0)",
        "(joined rollout-0)",
        "rollout-0 <- welcome",
        "rollout-0 <- adopt:0:2",
        "rollout-1 <- generate:t0:1 train0 >= v0",
        "rollout-1 <- generate:t1:1 train1 >= v0",
    ]


def test_message_of_an_older_incarnation_is_ignored() -> None:
    script = two_rollouts()
    script.joins("rollout-0", incarnation=2)
    assert script.joins("rollout-0", incarnation=1) == []
    assert script.heartbeats("rollout-0", incarnation=1) == []
    assert script.generates("rollout-0", "generate:t0:0") == []
    assert script.receive("rollout-0", wire.Leave(reason="late")) == []
    assert script.state.replicas.membership.members["rollout-0"].incarnation == 2


def test_replica_with_an_older_incarnation_joins_after_its_successor_left() -> None:
    script = two_rollouts()
    assert script.joins("rollout-0", incarnation=0) == []
    script.disconnect("rollout-0")
    assert "(joined rollout-0)" in script.joins("rollout-0", incarnation=0)


def test_repeated_hello_changes_nothing() -> None:
    script = two_rollouts()
    assert script.joins("rollout-0") == ["rollout-0 <- welcome"]
    assert script.state.replicas.membership.members["rollout-0"].version == 0
    assert len(script.state.replicas.leases.of("rollout-0", "generate")) == 2


def test_unknown_replica_is_asked_for_a_hello() -> None:
    script = started()
    assert script.heartbeats("rollout-7") == ["rollout-7 <- introduce"]
    assert script.receive("rollout-7", wire.Leave(reason="bye")) == [], "no hello is requested from a leaving replica"


def test_run_fails_when_a_role_stays_empty() -> None:
    script = started()
    script.disconnect("rollout-0")
    assert script.controller.waiting_for == "needs 1 rollout replica, has 0"
    script.advance_time(0.0)
    for _ in range(12):
        script.now += 10.0
        script.heartbeats("policy-0")
        script.heartbeats("reward-0")
        assert script.advance_time(0.0) == []
    assert script.advance_time(0.01)[-1] == (
        "reward-0 <- drain: the run needs 1 rollout replica, has 0, for 120 s; "
        "start what is missing or lower the number in the recipe"
    )


# --- late, repeated and lost messages ------------------------------------------------------------------------------


def test_lost_command_is_sent_again() -> None:
    script = started()
    lost = script.plan.heartbeat_s * 2
    script.now += lost - 0.01
    assert script.heartbeats("rollout-0", "generate:t0:0", version=0) == ["rollout-0 <- welcome"], (
        "the command may be on its way"
    )
    script.now += 0.01
    assert script.heartbeats("rollout-0", "generate:t0:0", version=0) == [
        "rollout-0 <- welcome",
        "rollout-0 <- generate:t1:0 train1 >= v0",
    ]
    assert script.heartbeats("rollout-0", "generate:t0:0", version=0) == ["rollout-0 <- welcome"], (
        "and its deadline starts again"
    )


@pytest.mark.parametrize("name", ["policy-0", "reward-0"])
def test_every_role_gets_its_lost_command_again(name: str) -> None:
    script = started()
    script.generate_and_score(0)
    script.generates("rollout-0", "generate:t1:0")
    if name == "policy-0":
        script.scores("score:t1:0")
    (command,) = [
        send for send in script.sent if send.peer == name and not isinstance(send.message, wire.ReleaseLeases)
    ]
    script.now += 2 * script.plan.heartbeat_s
    script.heartbeats(name)
    assert script.sent[1:] == [command], "the same command, with its buffers"


def test_heartbeat_with_an_unknown_lease_releases_it() -> None:
    script = started()
    assert script.heartbeats("rollout-0", "generate:t0:0", "generate:t1:0", "generate:t9:9", version=0) == [
        "rollout-0 <- welcome",
        "rollout-0 <- release generate:t9:9",
    ]


def test_repeated_result_is_released_each_time() -> None:
    script = started()
    for _ in range(3):
        assert script.generates("rollout-0", "generate:t0:0")[0] == "rollout-0 <- release generate:t0:0"
    assert script.state.buffer.num_live == 2


@pytest.mark.parametrize("lease", ["", ":", "nonsense", "generate:x", "generate:t0:99", "a:b:c:d"])
def test_lease_that_was_never_granted_is_released(lease: str) -> None:
    script = started()
    assert script.fails("rollout-0", lease) == [f"rollout-0 <- release {lease}"]


def test_older_heartbeat_at_worst_makes_a_rollout_adopt_again() -> None:
    script = started()
    assert script.heartbeats("rollout-0", "generate:t0:0", "generate:t1:0", version=-1) == [
        "rollout-0 <- release generate:t0:0 generate:t1:0",
        "rollout-0 <- welcome",
        "rollout-0 <- release generate:t0:0 generate:t1:0",
        "rollout-0 <- adopt:0:1",
    ]
    assert script.adopts("rollout-0", 0, 1)[2:] == [
        "rollout-0 <- generate:t0:1 train0 >= v0",
        "rollout-0 <- generate:t1:1 train1 >= v0",
    ]


# --- weights that differ from the publication ----------------------------------------------------------------------


def test_failed_pull_is_retried_after_a_backoff() -> None:
    script = Script()
    for name in ("policy-0", "rollout-0", "reward-0"):
        script.joins(name)
    script.publishes(0)
    assert script.fails("rollout-0", "adopt:0:0") == ["rollout-0 <- release adopt:0:0", "(failed rollout-0)"]
    assert script.advance_time(0.9) == []
    assert script.advance_time(0.1) == ["rollout-0 <- adopt:0:1"]


def test_rollout_with_a_wrong_root_gets_no_work_before_it_adopts_again() -> None:
    script = Script()
    script.joins("policy-0")
    for name in (*TWO_ROLLOUTS, "reward-0"):
        script.joins(name)
    script.publishes(0)
    assert script.adopts("rollout-0", 0, 0, root="other") == [
        "rollout-0 <- release adopt:0:0",
        "(adopted rollout-0)",
    ]
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "adopted"]
    assert note.fields["attested"] is False
    assert script.adopts("rollout-1", 0, 1)[-1] == "rollout-1 <- generate:t1:0 train1 >= v0"
    assert script.advance_time(1.0) == ["rollout-0 <- adopt:0:2"]


def test_torn_rollout_gives_its_groups_back() -> None:
    script = two_rollouts()
    lines = script.heartbeats("rollout-0", "generate:t0:0", "generate:t1:0", version=-1)
    assert lines[0] == "rollout-0 <- release generate:t0:0 generate:t1:0"
    assert lines[-2:] == ["rollout-1 <- generate:t0:1 train0 >= v0", "rollout-1 <- generate:t1:1 train1 >= v0"]
    assert script.state.buffer.get(0).tries == 0, "the group has not failed"  # type: ignore[union-attr]


def test_invalid_offer_fails_the_run() -> None:
    script = Script()
    script.joins("policy-0")
    lines = script.receive("policy-0", wire.WeightsPublished(lease="publish:0:0", version=0, publish_s=0.0), b"garbage")
    assert "the offer of version 0 by policy-0 is not usable: These 7 bytes are not a Offer" in lines[-1]
    assert script.state.lifecycle.failure


def test_offer_of_another_version_fails_the_run() -> None:
    script = Script()
    script.joins("policy-0")
    published = wire.WeightsPublished(lease="publish:0:0", version=0, publish_s=0.0)
    lines = script.receive("policy-0", published, encoded_offer(5))
    assert lines[-1].endswith("An offer of version 5 came in the publication of version 0.")


# --- refusals ------------------------------------------------------------------------------------------------------

HELLO = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("reward-0", {}, "reward-0 is not the name of a rollout; it must be rollout-<number>"),
        ("rollout", {}, "rollout is not the name of a rollout; it must be rollout-<number>"),
        ("rollout-1", {"num_slots": -1}, "rollout-1 offers -1 slots; it needs at least 0"),
        ("rollout-1", {"has_layout": False}, "rollout-1 did not send the layout of its weights"),
        ("reward-1", {"role": "reward", "num_slots": -1}, "reward-1 offers -1 slots; it needs at least 1"),
        (
            "policy-1",
            {"role": "policy"},
            "this run has its policy already, policy-0, and policy-1 cannot share steps with it; "
            "start one policy replica, or all of them with policy.parallel.elastic = true",
        ),
        (
            "controller-1",
            {"role": "controller"},
            "a controller does not join a run; a replica is a policy, a rollout, a reward or a teacher",
        ),
    ],
)
def test_refusal_has_its_reason(name: str, changes: dict[str, object], reason: str) -> None:
    script = started()
    lines = script.receive(name, msgspec.structs.replace(HELLO, **changes), encoded_layout(name))
    assert lines == [f"(refused {name})", f"{name} <- refused: {reason}"]
    assert name not in script.state.replicas.membership.members or name == "reward-0"


def test_policy_of_another_version_is_refused() -> None:
    script = Script()
    assert script.joins("policy-0", version=7)[1:] == [
        "policy-0 <- refused: this run is at version 0 and the policy offers version 7; "
        "start the policy in the folder of this run"
    ]


def test_layout_of_absurd_size_is_refused_and_the_run_goes_on() -> None:
    """A plan to it would be computed in 64 bits, and overflow."""
    script, extent = started(), 1 << 63
    layout = layout_of("rollout-1")
    [spec, *tensors], [held, *ranks] = layout.tensors, layout.ranks
    [shard, *shards] = held.shards
    spec = replace(spec, shape=(extent, *spec.shape[1:]))
    shard = replace(shard, box=replace(shard.box, size=(extent, *shard.box.size[1:])))
    layout = replace(layout, tensors=(spec, *tensors), ranks=(replace(held, shards=(shard, *shards)), *ranks))
    lines = script.receive("rollout-1", HELLO, encode(layout))
    assert lines[0] == "(refused rollout-1)"
    assert "9223372036854775808" in lines[1]
    script.joins("rollout-1", incarnation=2)
    assert "rollout-1" in script.state.replicas.membership.members


@pytest.mark.parametrize("data", [b"garbage", b"\x81\xa1x" + b"\x91" * 200_000 + b"\xc0"], ids=["text", "deep"])
def test_invalid_layout_is_refused(data: bytes) -> None:
    lines = Script().receive("rollout-0", HELLO, data)
    assert lines[1].startswith(f"rollout-0 <- refused: These {len(data)} bytes are not a Layout")


def test_rollout_of_another_model_is_evicted() -> None:
    script = started()
    lines = script.receive("rollout-1", HELLO, encoded_layout("rollout-1", (5,)))
    assert lines[:2] == ["(joined rollout-1)", "rollout-1 <- welcome"]
    assert lines[2:] == [
        "(left rollout-1)",
        "(refused rollout-1)",
        "rollout-1 <- refused: There is no plan from policy-0 to rollout-1. "
        "Tensor w is float32 (5,) in rollout-1 but float32 (4,) in policy-0.",
    ]
    assert "rollout-1" not in script.state.replicas.membership.members
    assert script.generate_and_score(0, 1)[-1] == "policy-0 <- train:1:0 train0 train1"

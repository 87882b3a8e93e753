"""A whole run, event by event: the controller's commands, their order, and the conditions of each stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.explain import run_phase
from starling.controller.core.groups.digest import digest_of_prompts
from starling.controller.core.machine import advance
from starling.controller.core.records import StepFrozen
from starling.sim.replicas.weights import encoded_layout, layout_of, offer_of
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.offers.tickets import allowance, offer_for, reading_cost
from starling.weightsync.plan.layout import Box, decode_layout, encode
from starling.weightsync.plan.planner import decode_plan, make_plan

Step = tuple[Callable[[Script], list[str]], list[str], str]

CHECKPOINT = wire.CheckpointSaved(lease="checkpoint:2:0", step=2, path="/p")

WHOLE_RUN: list[Step] = [
    (
        lambda s: s.joins("policy-0"),
        ["(joined policy-0)", "policy-0 <- welcome", "policy-0 <- publish:0:0"],
        "needs 1 rollout replica, has 0",
    ),
    (
        lambda s: s.joins("rollout-0"),
        ["(joined rollout-0)", "rollout-0 <- welcome"],
        "needs 1 reward replica, has 0",
    ),
    (
        lambda s: s.joins("reward-0"),
        ["(joined reward-0)", "reward-0 <- welcome"],
        "the policy to publish version 0",
    ),
    (
        lambda s: s.publishes(0),
        ["policy-0 <- release publish:0:0", "(published )", "rollout-0 <- adopt:0:0"],
        "rollout-0 to adopt version 0",
    ),
    (
        lambda s: s.adopts("rollout-0", 0),
        [
            "rollout-0 <- release adopt:0:0",
            "(adopted rollout-0)",
            "rollout-0 <- generate:t0:0 train0 >= v0",
            "rollout-0 <- generate:t1:0 train1 >= v0",
        ],
        "the groups of step 1: 2 being generated, 0 being scored, 0 scored of 2",
    ),
    (
        lambda s: s.generates("rollout-0", "generate:t1:0"),
        ["rollout-0 <- release generate:t1:0", "reward-0 <- score:t1:0"],
        "the groups of step 1: 1 being generated, 1 being scored, 0 scored of 2",
    ),
    (
        lambda s: s.scores("score:t1:0"),
        ["reward-0 <- release score:t1:0"],
        "the groups of step 1: 1 being generated, 0 being scored, 1 scored of 2",
    ),
    (
        lambda s: s.generate_and_score(0),
        ["reward-0 <- release score:t0:0", "policy-0 <- train:1:0 train0 train1"],
        "the policy to train step 1",
    ),
    (
        lambda s: s.trains(1),
        ["policy-0 <- release train:1:0", "(step 1)", "(trained 1)", "policy-0 <- publish:1:0"],
        "the policy to publish version 1",
    ),
    (
        lambda s: s.publishes(1),
        ["policy-0 <- release publish:1:0", "(published 1)", "rollout-0 <- adopt:1:0"],
        "rollout-0 to adopt version 1",
    ),
    (
        lambda s: s.adopts("rollout-0", 1),
        [
            "rollout-0 <- release adopt:1:0",
            "(adopted rollout-0)",
            "rollout-0 <- generate:t2:0 train2 >= v1",
            "rollout-0 <- generate:t3:0 train3 >= v1",
        ],
        "the groups of step 2: 2 being generated, 0 being scored, 0 scored of 2",
    ),
    (
        lambda s: s.generate_and_score(2, 3, version=1),
        ["reward-0 <- release score:t3:0", "policy-0 <- train:2:0 train2 train3"],
        "the policy to train step 2",
    ),
    (
        lambda s: s.trains(2),
        ["policy-0 <- release train:2:0", "(step 2)", "(trained 2)", "policy-0 <- publish:2:0"],
        "the policy to publish version 2",
    ),
    (
        lambda s: s.publishes(2),
        [
            "policy-0 <- release publish:2:0",
            "(published 2)",
            "rollout-0 <- adopt:2:0",
            "policy-0 <- checkpoint:2:0",
        ],
        "checkpointing: policy-0, reward-0, rollout-0",
    ),
    (
        lambda s: s.receive("policy-0", CHECKPOINT),
        [
            "policy-0 <- release checkpoint:2:0",
            "(checkpoint 2)",
            "policy-0 <- drain: the run is complete",
            "reward-0 <- drain: the run is complete",
            "rollout-0 <- drain: the run is complete",
        ],
        "draining: policy-0, reward-0, rollout-0",
    ),
    (lambda s: s.leaves("policy-0"), ["(left policy-0)"], "draining: reward-0, rollout-0"),
    (lambda s: s.leaves("rollout-0"), ["(left rollout-0)"], "draining: reward-0"),
    (lambda s: s.leaves("reward-0"), ["(left reward-0)", "done: the run is complete"], "over: no replica"),
]


def test_whole_run() -> None:
    script = Script()
    assert script.controller.waiting_for == "needs the policy, which has not joined"
    for event, lines, waiting_for in WHOLE_RUN:
        assert event(script) == lines
        assert script.controller.waiting_for == waiting_for
    assert script.advance_time(100.0) == []


@pytest.mark.parametrize("num_events", range(1, len(WHOLE_RUN) + 1))
def test_derivations_are_idempotent(num_events: int) -> None:
    script = Script()
    for event, _, _ in WHOLE_RUN[:num_events]:
        event(script)
    script.state.out = []
    advance(script.state)
    assert script.state.out == []


def test_reinforcement_learning_starts_when_all_initial_replicas_have_joined() -> None:
    script = Script(num_rollouts=2)
    script.start_run("rollout-0")
    assert script.controller.waiting_for == "needs 2 rollout replicas, has 1"
    assert "generate" not in " ".join(script.log)
    script.joins("rollout-1")
    assert script.adopts("rollout-1", 0, 1) == [
        "rollout-1 <- release adopt:0:1",
        "(adopted rollout-1)",
    ], "both groups went to the rollout that was ready when the last replica joined"
    assert script.log.count("rollout-0 <- generate:t0:0 train0 >= v0") == 1


def test_started_run_needs_one_replica_of_each_role() -> None:
    script = Script(num_rollouts=2)
    script.start_run("rollout-0", "rollout-1")
    script.generate_and_score(0, 1)
    script.disconnect("rollout-1")
    script.trains(1)
    assert script.publishes(1)[2:] == ["rollout-0 <- adopt:1:0"]
    assert script.adopts("rollout-0", 1)[2:] == [
        "rollout-0 <- generate:t2:0 train2 >= v1",
        "rollout-0 <- generate:t3:0 train3 >= v1",
    ]


def test_supervised_steps_come_first_and_need_the_policy_alone() -> None:
    script = Script(num_supervised_steps=2, examples_per_step=2)
    assert script.joins("policy-0")[-1] == "policy-0 <- train:1:0 sft0 sft1"
    (command,) = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert (command.num_steps, command.ordinal, command.groups) == (2, 1, ())
    assert script.controller.waiting_for == "the policy to train step 1"
    assert script.trains(1) == ["policy-0 <- release train:1:0", "(step 1)", "policy-0 <- train:2:0 sft2 sft3"]
    assert script.trains(2) == ["policy-0 <- release train:2:0", "(step 2)", "policy-0 <- publish:2:0"]
    assert run_phase(script.state) == "rl"


def test_supervised_run_ends_with_its_checkpoint() -> None:
    script = Script(num_supervised_steps=1, num_steps=0)
    script.joins("policy-0")
    assert script.trains(1) == ["policy-0 <- release train:1:0", "(step 1)", "policy-0 <- checkpoint:1:0"]


def test_commands_of_a_step_are_complete() -> None:
    script = Script(num_supervised_steps=0, seed=3)
    script.start_run()
    first, second = [send.message for send in script.sent if isinstance(send.message, wire.GenerateGroup)]
    assert (first.purpose, first.num_completions, first.min_version) == ("train", 2, 0)
    assert first.sampling.seed != second.sampling.seed
    script.generates("rollout-0", "generate:t0:0")
    (score,) = [send.message for send in script.sent if isinstance(send.message, wire.ScoreGroup)]
    assert score.completions == (wire.CompletionText(text="y", status=wire.Status.OK, num_tokens=1),) * 2
    script.scores("score:t0:0", 1.0, 0.25)
    script.generate_and_score(1)
    (send,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    train = send.message
    assert isinstance(train, wire.TrainStep)
    assert [t.reward for t in train.groups[0].trajectories] == [1.0, 0.25]
    assert (train.num_steps, train.ordinal, train.temperature) == (2, 1, 1.0)
    assert [len(b) for b in send.buffers] == [t.nbytes for group in train.groups for t in group.tensors]


def test_seed_of_a_group_depends_only_on_its_tries() -> None:
    def seeds(*, fail: bool) -> list[int]:
        script = Script()
        script.start_run()
        if fail:
            script.fails("rollout-0", "generate:t0:0")
        else:
            script.disconnect("rollout-0")
            script.joins("rollout-0")
            script.heartbeats("rollout-0", "adopt:0:1")
            script.adopts("rollout-0", 0, 1)
        again = [s.message for s in script.sent if isinstance(s.message, wire.GenerateGroup)]
        return [m.sampling.seed for m in again if m.prompt.id == "train0"]

    script = Script()
    script.start_run()
    (original,) = [
        s.message.sampling.seed
        for s in script.sent
        if isinstance(s.message, wire.GenerateGroup) and s.message.prompt.id == "train0"
    ]
    assert seeds(fail=False) == [original]
    assert seeds(fail=True) != [original]


def test_adoption_carries_an_offer_with_a_ticket_and_a_plan_between_the_two_layouts() -> None:
    script = Script()
    script.joins("policy-0")
    script.joins("rollout-0")
    script.publishes(0)
    (adopt,) = [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    layouts = [decode_layout(encoded_layout(name)) for name in ("policy-0", "rollout-0")]
    plan = make_plan(*layouts)
    assert decode_plan(adopt.buffers[1]) == plan
    cost = reading_cost(plan.total_bytes, plan.num_boxes)
    most = allowance(cost, reading_cost(plan.distinct_bytes, plan.num_distinct_boxes))
    assert plan.num_boxes == sum(len(bucket.transfers) for bucket in plan.buckets)
    assert decode_offer(adopt.buffers[0]) == offer_for(offer_of(0), "rollout-0", adopt.message.lease, most, 1)


def test_rollout_with_a_new_layout_gets_a_new_plan() -> None:
    script = Script()
    script.joins("policy-0")
    script.joins("rollout-0")
    script.publishes(0)
    whole = layout_of("rollout-0")
    (rank,) = whole.ranks
    halves = tuple(
        replace(rank.shards[0], box=Box(offset=(begin,), size=(2,)), offset_bytes=4 * begin) for begin in (0, 2)
    )
    split = replace(whole, ranks=(replace(rank, shards=halves),))
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=2, has_layout=True)
    script.receive("rollout-0", hello, encode(split), incarnation=2)
    (adopt,) = [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    assert decode_plan(adopt.buffers[1]) == make_plan(layout_of("policy-0"), split)


def test_rollouts_generate_while_the_next_version_is_pulled() -> None:
    script = Script(max_staleness=1, num_steps=4)
    script.start_run(slots=4)
    script.generate_and_score(0, 1)
    script.trains(1)
    lines = script.publishes(1)
    assert lines[2:] == ["rollout-0 <- adopt:1:0"]
    assert script.state.replicas.leases.of("rollout-0", "generate"), "the groups of step 2 are still being generated"
    assert script.generates("rollout-0", "generate:t2:0")[1] == "reward-0 <- score:t2:0"


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_admission_is_by_slots(max_staleness: int) -> None:
    script = Script(max_staleness=max_staleness, num_steps=9)
    script.start_run(slots=100)
    live = (max_staleness + 1) * 2
    assert script.state.buffer.num_live == live
    assert len(script.state.replicas.leases.of("rollout-0", "generate")) == live
    script.generate_and_score(0, 1)
    script.trains(1)
    assert script.state.buffer.num_live == live, "a step frees its slots by its publication, not by its training"
    script.publishes(1)
    assert script.state.buffer.num_live == live
    assert script.state.buffer.num_admitted == live + 2


def test_no_more_prompts_are_admitted_than_the_steps_need() -> None:
    script = Script(max_staleness=5, num_steps=2)
    script.start_run(slots=100)
    assert script.state.buffer.num_admitted == 4


def test_required_version_follows_from_rank() -> None:
    script = Script(max_staleness=1, num_steps=9)
    script.start_run(slots=1)
    script.generate_and_score(0, 1)
    assert script.trains(1)[-1] == "policy-0 <- publish:1:0"
    assert script.publishes(1)[-1] == "rollout-0 <- adopt:1:0"
    # Ranks 0 and 1 (t2, t3) are of step 2 and may be sampled by version 0; ranks 2 and 3 belong to step 3.
    assert script.generates("rollout-0", "generate:t2:0")[1] == "rollout-0 <- generate:t3:0 train3 >= v0"
    assert script.generates("rollout-0", "generate:t3:0")[1:] == ["reward-0 <- score:t3:0"], "version 0 is too old"
    assert script.adopts("rollout-0", 1)[-1] == "rollout-0 <- generate:t4:0 train4 >= v1"


def test_groups_go_to_the_rollout_that_finishes_them_first() -> None:
    script = Script(prompts_per_step=4)
    script.joins("policy-0")
    script.joins("rollout-0", slots=2)
    script.joins("rollout-1", slots=4)
    script.publishes(0)
    script.adopts("rollout-0", 0, 0)
    script.adopts("rollout-1", 0, 1)
    assert script.joins("reward-0")[2:] == [
        "rollout-1 <- generate:t0:0 train0 >= v0",
        "rollout-0 <- generate:t1:0 train1 >= v0",
        "rollout-1 <- generate:t2:0 train2 >= v0",
        "rollout-1 <- generate:t3:0 train3 >= v0",
    ]


def test_rollout_never_has_more_groups_than_slots() -> None:
    script = Script(prompts_per_step=4)
    script.start_run(slots=2)
    assert len(script.state.replicas.leases.of("rollout-0", "generate")) == 2
    assert script.generates("rollout-0", "generate:t0:0")[1:] == [
        "rollout-0 <- generate:t2:0 train2 >= v0",
        "reward-0 <- score:t0:0",
    ]


def test_reward_replica_never_has_more_groups_than_slots() -> None:
    script = Script(prompts_per_step=4)
    script.joins("reward-0", slots=1)
    script.joins("policy-0")
    script.joins("rollout-0", slots=4)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    assert script.generates("rollout-0", "generate:t1:0")[-1] == "reward-0 <- score:t1:0"
    assert script.generates("rollout-0", "generate:t0:0") == ["rollout-0 <- release generate:t0:0"]
    assert script.scores("score:t1:0")[-1] == "reward-0 <- score:t0:0"


def test_steps_are_frozen_in_the_order_of_admission() -> None:
    script = Script(max_staleness=1)
    script.start_run(slots=4)
    script.generate_and_score(3, 2, 1)
    assert not script.state.replicas.leases.has("train"), "group 0 is not scored, and no later group takes its place"
    assert script.generate_and_score(0)[-1] == "policy-0 <- train:1:0 train0 train1"
    assert script.trains(1)[-1] == "policy-0 <- train:2:0 train2 train3"


def overlapping() -> Script:
    """Return an asynchronous run that trains step 2 while version 1 is being published."""
    script = Script(max_staleness=1, num_steps=4)
    script.start_run(slots=4)
    script.generate_and_score(0, 1, 2, 3)
    assert script.trains(1)[-2:] == ["policy-0 <- publish:1:0", "policy-0 <- train:2:0 train2 train3"]
    return script


def test_next_step_is_trained_while_a_version_is_digested() -> None:
    script = overlapping()
    (send,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert send.message.published == 1, "not before the snapshot of version 1, whichever command arrives first"
    assert script.controller.waiting_for == "the policy to train step 2"
    assert script.state.buffer.num_live == 4, "the slots of step 1 are not free before version 1 is published"
    assert script.publishes(1)[1:] == ["(published 1)", "rollout-0 <- adopt:1:0"]
    assert script.state.buffer.num_live == 4
    assert script.state.buffer.num_admitted == 6
    assert script.trains(2)[-1] == "policy-0 <- publish:2:0"


def test_at_most_one_version_is_unpublished_during_a_step() -> None:
    script = overlapping()
    lines = script.trains(2)
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "trained"]
    assert note.fields["prompts"] == ["train2", "train3"]
    assert lines == ["policy-0 <- release train:2:0", "(step 2)", "(trained 2)"]
    assert script.controller.waiting_for == "the policy to publish version 1"
    assert script.publishes(1)[1:] == ["(published 1)", "policy-0 <- publish:2:0", "rollout-0 <- adopt:1:0"]
    assert script.controller.waiting_for == "the policy to publish version 2"
    script.adopts("rollout-0", 1)
    script.generate_and_score(4, 5, version=1)
    assert script.state.replicas.leases.has("train"), "version 2 is being published, so step 3 may be trained"


def test_stop_waits_for_a_publication_in_progress() -> None:
    script = overlapping()
    assert script.request_stop() == []
    assert script.trains(2)[1:] == ["(step 2)", "(trained 2)"]
    assert script.publishes(1)[1:] == ["(published 1)", "policy-0 <- publish:2:0", "rollout-0 <- adopt:1:0"]
    assert script.publishes(2)[-1] == "policy-0 <- checkpoint:2:0"


def test_step_metrics_have_rewards_and_staleness() -> None:
    script = Script(max_staleness=1)
    script.start_run(slots=4)
    script.generate_and_score(0, 1, 2, 3)
    script.trains(1)
    script.publishes(1)
    script.trains(2)
    notes = [c for c in script.commands if getattr(c, "kind", "") == "step"]
    assert notes[0].fields["staleness_max"] == 1
    assert notes[0].fields["reward_mean"] == 0.5
    assert notes[0].fields["phase"] == "rl"


def test_frozen_step_has_the_digest_of_its_prompts() -> None:
    """By which a resumed run sees that its data has changed."""
    script = Script()
    script.start_run()
    script.generate_and_score(0, 1)
    [record] = [write.record for write in script.journal if isinstance(write.record, StepFrozen)]
    assert record.digest
    assert record.digest == digest_of_prompts(group.prompt for group in script.state.buffer.frozen_groups(1))

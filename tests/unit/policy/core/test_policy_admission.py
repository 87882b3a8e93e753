"""Admission of commands by the policy's version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.wire.messages import AdoptWeights, Prompt, PublishWeights, SaveCheckpoint, TrainGroup, TrainStep
from starling.policy.core.admission import PolicyCommand, PolicyState

EXAMPLES = (Prompt(id="sft/0"),)
GROUPS = (TrainGroup(prompt_id="train/0", trajectories=(), tensors=()),)


def train(step: int, groups: tuple[TrainGroup, ...] = GROUPS, examples: tuple[Prompt, ...] = ()) -> TrainStep:
    return TrainStep(lease="train:1:0", step=step, groups=groups, examples=examples)


def publish(version: int) -> PublishWeights:
    return PublishWeights(lease="publish:1:0", version=version)


def save(step: int) -> SaveCheckpoint:
    return SaveCheckpoint(lease="checkpoint:1:0", step=step)


@pytest.mark.parametrize(
    "command",
    [train(4), train(4, (), EXAMPLES), publish(3), save(3)],
    ids=["reinforce", "supervise", "publish", "save"],
)
def test_admission_accepts_commands_that_fit(command: PolicyCommand) -> None:
    assert PolicyState(version=3, published=2).objection(command) is None


@pytest.mark.parametrize(
    ("command", "objection"),
    [
        (train(3), "step 3 needs version 2, and this policy holds version 3"),
        (train(5), "step 5 needs version 4, and this policy holds version 3"),
        (train(4, ()), "step 4 must have groups or examples, but not both"),
        (train(4, GROUPS, EXAMPLES), "step 4 must have groups or examples, but not both"),
        (publish(1), "version 1 cannot be published: this policy holds version 3"),
        (publish(4), "version 4 cannot be published: this policy holds version 3"),
        (save(2), "step 2 cannot be saved: this policy holds version 3"),
        (save(4), "step 4 cannot be saved: this policy holds version 3"),
        (
            TrainStep(lease="train:4:0", step=4, groups=GROUPS, peers=("a:1", "b:1")),
            "step 4 is of 2 policies together, and this one trains alone: set policy.parallel.elastic = true",
        ),
        (
            AdoptWeights(lease="adopt:7:0", version=7, source="policy-1", peer="a:1"),
            "version 7 cannot be adopted: this policy makes its versions alone, and adopts none from others",
        ),
    ],
)
def test_admission_refuses_commands_that_do_not_fit(command: PolicyCommand, objection: str) -> None:
    assert PolicyState(version=3, published=2).objection(command) == objection


def test_admission_published_version_can_be_requested_again() -> None:
    progress = PolicyState(version=3)
    assert progress.objection(publish(3)) is None
    progress.published = 3
    assert progress.objection(publish(3)) is None
    progress.version = 4
    assert progress.objection(publish(3)) is None
    assert progress.objection(publish(4)) is None


def test_admission_restarted_policy_can_publish_its_version() -> None:
    progress = PolicyState(version=7)
    assert progress.objection(publish(7)) is None
    assert progress.objection(publish(6)) == "version 6 cannot be published: this policy holds version 7"
    step = TrainStep(lease="train:8:0", step=8, groups=GROUPS, published=7)
    assert progress.must_wait(step), "the snapshot was lost with the previous process"


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS, published=3), True),
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS, published=2), False),
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS), False),
        (TrainStep(lease="train:5:0", step=5, groups=GROUPS, published=4), False),
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS, published=3, replayed=True), False),
        (publish(3), False),
        (save(3), False),
    ],
    ids=["not yet", "already", "of no publication", "never fits", "made again", "publish", "save"],
)
def test_admission_step_waits_for_snapshot(command: PolicyCommand, waits: bool) -> None:
    progress = PolicyState(version=3, published=2)
    assert progress.must_wait(command) is waits
    progress.published = 3
    assert not progress.must_wait(command)


def test_admission_initial_weights_can_be_published_not_retrained() -> None:
    assert PolicyState().objection(publish(0)) is None
    assert PolicyState().objection(train(1)) is None
    assert PolicyState().objection(train(0)) == "step 0 needs version -1, and this policy holds version 0"


def held(step: int = 4, lease: str = "train:4:0") -> TrainStep:
    return TrainStep(lease=lease, step=step, groups=GROUPS, published=step - 1)


def test_admission_held_step_is_released_after_publication() -> None:
    progress = PolicyState(version=3, published=2)
    progress.hold(held(), (b"groups",))
    assert progress.take_ready() == []
    progress.published = 3
    assert progress.take_ready() == [(held(), (b"groups",))]
    assert progress.take_ready() == []


def test_admission_held_step_expires_with_reason() -> None:
    progress = PolicyState(version=3, published=2, hold_s=60.0)
    progress.hold(held(), ())
    (wait,) = progress.waits(100.0)
    assert (wait.since_s, wait.seconds_left, wait.on) == (0.0, 60.0, "controller")
    assert wait.what == "the command to publish version 3, before step 4"
    assert progress.expire(100.0) == [], "the wait counts from here"
    (wait,) = progress.waits(130.0)
    assert (wait.since_s, wait.seconds_left) == (30.0, 30.0)
    assert progress.expire(159.0) == []
    ((lease, reason),) = progress.expire(160.0)
    assert lease == "train:4:0"
    assert reason.startswith("step 4 waited 60 s for the publication of version 3, whose snapshot must be taken before")
    assert progress.waits(160.0) == ()
    progress.published = 3
    assert progress.take_ready() == [], "the step was returned"


def test_admission_held_steps_have_separate_deadlines() -> None:
    progress = PolicyState(version=3, published=2, hold_s=60.0)
    progress.hold(held(), ())
    progress.expire(0.0)
    progress.hold(held(lease="train:4:1"), ())
    progress.expire(30.0)
    assert [lease for lease, _ in progress.expire(60.0)] == ["train:4:0"]
    progress.give_up(("train:4:1", "unknown"))
    assert progress.waits(60.0) == ()
    assert progress.expire(1000.0) == []


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hold"), st.integers(1, 5)),
            st.tuples(st.just("publish"), st.just(0)),
            st.tuples(st.just("train"), st.just(0)),
            st.tuples(st.just("give up"), st.integers(0, 20)),
            st.tuples(st.just("pass"), st.integers(0, 40)),
        ),
        max_size=40,
    )
)
def test_admission_every_step_is_released_once(events: list[tuple[str, int]]) -> None:
    progress, now, num_held = PolicyState(hold_s=60.0), 0.0, 0
    since: dict[str, float] = {}
    for kind, number in events:
        match kind:
            case "hold":
                step = held(number, f"train:{number}:1.{num_held}")
                if progress.must_wait(step):
                    progress.hold(step, ())
                    since[step.lease] = now
                    num_held += 1
            case "publish":
                progress.published = progress.version
            case "train":
                progress.version += 1
            case "give up":
                leases = tuple(sorted(since))[number : number + 1]
                progress.give_up(leases)
                for lease in leases:
                    del since[lease]
            case "pass":
                now += number
        for step, _ in progress.take_ready():
            assert since.pop(step.lease) <= now
            assert not progress.must_wait(step)
        for lease, _ in progress.expire(now):
            assert now - since.pop(lease) >= 60.0
        waits = progress.waits(now)
        assert len(waits) == len(since)
        assert all(0.0 < wait.seconds_left <= 60.0 for wait in waits)
    progress.expire(now)
    assert len(progress.expire(now + 60.0)) == len(since)
    assert progress.waits(now + 60.0) == ()

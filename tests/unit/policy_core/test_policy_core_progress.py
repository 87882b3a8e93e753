"""Which commands fit the version that the policy holds."""

from __future__ import annotations

import pytest

from starling.common.wire.messages import Prompt, PublishWeights, SaveCheckpoint, TrainGroup, TrainStep
from starling.policy.core.progress import Progress

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
def test_what_fits_is_not_objected_to(command: TrainStep | PublishWeights | SaveCheckpoint) -> None:
    assert Progress(version=3, published=2).objection(command) is None


@pytest.mark.parametrize(
    ("command", "objection"),
    [
        (train(3), "step 3 needs version 2, and this policy holds version 3"),
        (train(5), "step 5 needs version 4, and this policy holds version 3"),
        (train(4, ()), "step 4 must have groups or examples, and not both"),
        (train(4, GROUPS, EXAMPLES), "step 4 must have groups or examples, and not both"),
        (publish(2), "version 2 cannot be published: this policy holds version 3"),
        (publish(4), "version 4 cannot be published: this policy holds version 3"),
        (save(2), "step 2 cannot be saved: this policy holds version 3"),
        (save(4), "step 4 cannot be saved: this policy holds version 3"),
    ],
)
def test_what_does_not_fit_is_objected_to(command: TrainStep | PublishWeights | SaveCheckpoint, objection: str) -> None:
    assert Progress(version=3, published=2).objection(command) == objection


def test_a_version_is_published_once() -> None:
    progress = Progress(version=3)
    assert progress.objection(publish(3)) is None
    progress.published = 3
    assert progress.objection(publish(3)) == "version 3 is published already"


@pytest.mark.parametrize(
    ("command", "waits"),
    [
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS, published=3), True),
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS, published=2), False),
        (TrainStep(lease="train:4:0", step=4, groups=GROUPS), False),
        (TrainStep(lease="train:5:0", step=5, groups=GROUPS, published=4), False),
        (publish(3), False),
        (save(3), False),
    ],
    ids=["not yet", "already", "of no publication", "never fits", "publish", "save"],
)
def test_a_step_waits_for_the_snapshot_of_what_it_changes(
    command: TrainStep | PublishWeights | SaveCheckpoint, waits: bool
) -> None:
    progress = Progress(version=3, published=2)
    assert progress.must_wait(command) is waits
    progress.published = 3
    assert not progress.must_wait(command)


def test_the_initial_weights_may_be_published_but_not_trained_again() -> None:
    assert Progress().objection(publish(0)) is None
    assert Progress().objection(train(1)) is None
    assert Progress().objection(train(0)) == "step 0 needs version -1, and this policy holds version 0"

"""Checks of the guarantees: a valid history passes, and each kind of violation is detected."""

from __future__ import annotations

import re

import numpy as np
import pytest
from guarantees import contradictions, expected_digests, other_batches, read_history, violations

from starling.common.wire.messages import Status, TrajectoryMeta
from starling.controller.core import records as rec
from starling.controller.core.records import JournalEntry
from starling.policy.train.data.digest import batch_digest
from starling.policy.train.data.groups import ScoredGroup

OPENED = rec.GroupsOpened(first=0, num=4)
GENERATED = [rec.CompletionsStored(key=f"t{i}", trajectories=(), tensors=()) for i in range(4)]
SCORED = [rec.RewardsStored(key=f"t{i}", rewards=()) for i in range(4)]
FROZEN = [rec.StepFrozen(step=s, ordinals=(2 * s - 4, 2 * s - 3), prompts=(f"a{s}", f"b{s}")) for s in (2, 3)]
COMMITTED = [rec.StepCommitted(step=step) for step in (1, 2, 3)]
EVALUATED = [
    rec.EvaluationOpened(number=0, version=3, cause="end", num_completions=1, first=0),
    rec.EvaluationClosed(number=0, summary={}),
]
GOOD: list[rec.Record] = [
    rec.ControllerStarted(incarnation=1),
    COMMITTED[0],  # supervised
    OPENED,
    *GENERATED[:2],
    *SCORED[:2],
    FROZEN[0],
    rec.ControllerStarted(incarnation=2),
    COMMITTED[1],
    *GENERATED[2:],
    rec.GroupRequeued(key="t3", tries=1),
    GENERATED[3],
    *SCORED[2:],
    FROZEN[1],
    COMMITTED[2],
    *EVALUATED,
    rec.RunEnded(ok=True, reason="the run is complete"),
]
LINES = [
    {"kind": "step", "step": 1},
    {"kind": "step", "step": 2},
    {"kind": "trained", "step": 2, "prompts": ["a2", "b2"]},
    {"kind": "trained", "step": 3, "prompts": ["a3", "b3"]},
]
"""One line of step 3 is missing, because the controller was killed."""


def without(*left_out: rec.Record) -> list[rec.Record]:
    return [record for record in GOOD if record not in left_out]


def after(place: rec.Record, *more: rec.Record) -> list[rec.Record]:
    index = GOOD.index(place) + 1
    return [*GOOD[:index], *more, *GOOD[index:]]


BAD: dict[str, tuple[list[rec.Record], str]] = {
    "opened twice": (after(OPENED, rec.GroupsOpened(first=3, num=2)), r"opened once each and in order: \[3\]"),
    "a position left out": (after(OPENED, rec.GroupsOpened(first=5, num=1)), "opened once each and in order"),
    "trained twice": (
        after(COMMITTED[2], rec.StepFrozen(step=4, ordinals=(0,), prompts=("c",)), rec.StepCommitted(step=4)),
        r"groups \[0\] are in two steps",
    ),
    "the prompt again": (
        after(OPENED, rec.StepFrozen(step=9, ordinals=(), prompts=("a2",))),
        r"prompts \['a2'\] are in two steps",
    ),
    "frozen twice": (after(FROZEN[0], rec.StepFrozen(step=2, ordinals=(), prompts=())), r"steps \[2\] were frozen"),
    "never opened": (without(OPENED), r"groups \[0, 1, 2, 3\] were frozen and never opened"),
    "dropped and trained": (after(OPENED, rec.GroupDiscarded(key="t1", prompt="", reason="")), "frozen and dropped"),
    "generated again": (after(SCORED[1], GENERATED[1]), r"groups \['t1'\] were generated again"),
    "not scored": (without(SCORED[3]), r"groups \['t3'\] were frozen without rewards"),
    "thrown away, and frozen": (after(SCORED[3], rec.GroupRequeued(key="t3", tries=2)), "frozen without rewards"),
    "not frozen": (without(FROZEN[1]), r"steps \[3\] were committed and not frozen before"),
    "committed twice": (after(COMMITTED[1], COMMITTED[1]), "committed once each and in order"),
    "a step left out": (without(COMMITTED[1]), "committed once each and in order"),
    "an incarnation again": (after(COMMITTED[1], rec.ControllerStarted(incarnation=2)), "counted one by one"),
    "evaluated twice": (after(EVALUATED[1], EVALUATED[1]), r"evaluations \[0\] were opened or finished twice"),
    "lost": (after(OPENED, rec.GroupsOpened(first=4, num=1)), r"positions \[4\] were neither trained nor dropped"),
    "frozen in vain": (without(COMMITTED[2]), r"steps \[3\] were frozen and never committed"),
    "evaluation open": (without(EVALUATED[1]), r"evaluations \[0\] were opened and never closed"),
    "no end": (without(GOOD[-1]), "the end of the run is not in the journal"),
}


def test_valid_history_satisfies_every_guarantee() -> None:
    history = read_history(GOOD, num_supervised_steps=1)
    assert violations(history, complete=True) == []
    assert (history.lost, history.trained_twice, history.trained) == ([], [], [0, 1, 2, 3])
    assert contradictions(history, LINES) == []


@pytest.mark.parametrize("name", BAD)
def test_violated_guarantee_is_reported(name: str) -> None:
    records, expected = BAD[name]
    found = violations(read_history(records, num_supervised_steps=1), complete=True)
    assert any(re.search(expected, sentence) for sentence in found), found


def test_open_prompts_are_not_lost_before_the_end() -> None:
    history = read_history(GOOD[:11], num_supervised_steps=1)
    assert violations(history, complete=False, num_slots=2) == []
    assert violations(history, complete=False, num_slots=1) == ["positions [2] were passed over"]
    assert len(violations(history, complete=True)) == 2


def test_metrics_that_contradict_the_journal_are_reported() -> None:
    history = read_history(GOOD, num_supervised_steps=1)
    for lines, expected in (
        ([*LINES, LINES[0]], "step: the metrics tell of steps [1] twice"),
        ([*LINES, {"kind": "step", "step": 4}], "step: the metrics tell of steps [4], which were never committed"),
        ([LINES[0], *LINES[2:]], "step: steps [2, 3] are not in the metrics"),
        ([*LINES[:2], {**LINES[2], "prompts": ["a2", "a3"]}, LINES[3]], "step 2 trained ['a2', 'a3']"),
    ):
        assert any(found.startswith(expected) for found in contradictions(history, lines)), expected


ARRAYS = (
    np.array([1, 2], np.int32),
    np.array([3, 4, 5], np.int32),
    np.array([-0.5, -1.0, -2.0], np.float32),
    np.array([1, 1, 2], np.int32),
)


def step_of(*rewards: float) -> list[JournalEntry]:
    """Return the records of step 2, of one group with two completions."""
    trajectories = tuple(
        TrajectoryMeta(status=Status.OK, num_tokens=num, text="x", oldest_version=1, newest_version=2) for num in (1, 2)
    )
    stored = rec.CompletionsStored(key="t0", trajectories=trajectories, tensors=())
    frozen = rec.StepFrozen(step=2, ordinals=(0,), prompts=("p",))
    return [
        JournalEntry(stored, tuple(array.tobytes() for array in ARRAYS)),
        JournalEntry(rec.RewardsStored(key="t0", rewards=rewards)),
        JournalEntry(frozen),
    ]


def line_of(step: int, digest: int, kind: str = "step") -> dict[str, object]:
    return {"kind": kind, "step": step, "phase": "rl", "batch_digest": f"{digest:016x}"}


def test_other_data_than_the_journal_says_is_reported() -> None:
    """Also when the data of a step that is made again differs."""
    prompt, tokens, logprobs, versions = ARRAYS
    group = ScoredGroup(prompt, tokens, logprobs, versions, lengths=(1, 2), rewards=(0.0, 1.0), prompt_id="p")
    advantage = 0.5 / (0.5**0.5 + 1e-4)
    trained = batch_digest([group], [[-advantage, advantage]])
    swapped = batch_digest([group], [[advantage, -advantage]])
    expected = expected_digests(step_of(0.0, 1.0))
    assert other_batches(expected, [line_of(2, trained), line_of(2, trained, "step_repeated")]) == []
    for lines in ([line_of(2, swapped)], [line_of(2, trained), line_of(2, swapped, "step_repeated")]):
        assert len(other_batches(expected, lines)) == 1
    assert len(other_batches(expected_digests(step_of(1.0, 0.0)), [line_of(2, trained)])) == 1
    assert len(other_batches(expected, [line_of(3, trained)])) == 1


def test_missing_digests_are_reported() -> None:
    lines = [{"kind": "step", "step": step, "phase": "rl"} for step in (2, 3)]
    joined = {"kind": "joined", "replica": "policy-0"}
    assert other_batches({}, [*lines, joined]) == ["the policy has not reported the digests of steps [2, 3]"]
    assert other_batches({}, [*lines, joined, joined, joined]) == []

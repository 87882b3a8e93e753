"""Counts of groups that came to nothing, by rollout and scorer, and the replica that is at fault."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.controller.core.groups.filtering import FilteredGroups
from starling.controller.core.replicas.blame import MIN_COUNTED, PairCounts

ROLLOUTS = ("rollout-0", "rollout-1", "rollout-2")
SCORERS = ("reward-0", "reward-1", "reward-2")


def counts_of(
    num: int, is_lost: Callable[[str, str], bool], seed: int, shares: tuple[int, ...] = (1, 1, 1)
) -> PairCounts:
    """Return the counts of groups that were distributed blindly; `shares`: of the rollouts."""
    counts, draws = PairCounts(), random.Random(seed)
    for _ in range(num):
        [rollout] = draws.choices(ROLLOUTS, shares)
        scorer = draws.choice(SCORERS)
        (counts.note_lost if is_lost(rollout, scorer) else counts.note_used)(rollout, scorer)
    return counts


def culprits(counts: PairCounts, *, without_best: bool = True) -> tuple[str, str]:
    """Return the rollout and the scorer at fault, each empty for none."""
    of_rollouts = counts.culprit("rollout", ROLLOUTS, len(SCORERS), without_best=without_best)
    of_scorers = counts.culprit("reward", SCORERS, len(ROLLOUTS), without_best=without_best)
    return (of_rollouts or ("", ""))[0], (of_scorers or ("", ""))[0]


@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]), st.integers(1, 3000), st.booleans())
def test_no_replica_is_at_fault_by_chance(seed: int, share: float, num: int, without_best: bool) -> None:
    draws = random.Random(seed + 1)
    counts = counts_of(num, lambda *_: draws.random() < share, seed, (8, 2, 1))
    assert culprits(counts, without_best=without_best) == ("", "")


@pytest.mark.parametrize("without_best", [False, True])
@pytest.mark.parametrize("natural", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("culprit", ["rollout-0", "reward-1"])
def test_replica_whose_groups_all_come_to_nothing_is_at_fault(
    culprit: str, seed: int, natural: float, without_best: bool
) -> None:
    draws = random.Random(seed)
    counts = counts_of(900, lambda *pair: culprit in pair or draws.random() < natural, seed)
    expected = (culprit, "") if culprit.startswith("rollout") else ("", culprit)
    assert culprits(counts, without_best=without_best) == expected


@pytest.mark.parametrize("liar", ["rollout-0", "reward-0"])
@pytest.mark.parametrize("natural", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_replica_that_keeps_all_of_its_groups_has_no_other_judged(liar: str, natural: float, seed: int) -> None:
    """However large its part of the groups is."""
    draws = random.Random(seed)
    for shares in ((1, 1, 1), (10, 1, 1)):
        counts = counts_of(1000, lambda *pair: liar not in pair and draws.random() < natural, seed, shares)
        assert culprits(counts) == ("", "")


@pytest.mark.parametrize("seed", range(5))
def test_replica_cannot_accuse_one_counterpart(seed: int) -> None:
    """A scorer fails only what one rollout has generated, or a rollout has chosen that scorer for what it spoils."""
    assert culprits(counts_of(2000, lambda *pair: pair == ("rollout-0", "reward-0"), seed)) == ("", "")


def test_two_replicas_cannot_be_told_apart() -> None:
    counts = PairCounts()
    for _ in range(500):
        counts.note_lost("rollout-0", "reward-0")
        counts.note_used("rollout-1", "reward-0")
    assert counts.culprit("rollout", ROLLOUTS[:2], 1, without_best=True) is None
    assert counts.culprit("rollout", ROLLOUTS[:2], 1, without_best=False) is not None


def test_few_groups_decide_nothing() -> None:
    counts = PairCounts()
    for _ in range(7):
        counts.note_lost("rollout-0", "reward-0")
        counts.note_used("rollout-1", "reward-0")
        counts.note_used("rollout-1", "reward-1")
    assert culprits(counts, without_best=False) == ("", "")


def test_replica_is_judged_by_what_it_did_lately() -> None:
    counts = PairCounts()
    for lost in (False, True):
        for number in range(4 * MIN_COUNTED):
            rollout = f"rollout-{number % 2}"
            note = counts.note_lost if lost and rollout == "rollout-0" else counts.note_used
            note(rollout, "reward-0")
            counts.note_lost("rollout-2", "reward-1")
        assert (counts.culprit("rollout", ROLLOUTS[:2], 1, without_best=False) is not None) is lost
    assert counts.lost.total() + counts.used.total() < MIN_COUNTED


def test_replica_that_was_judged_is_counted_anew() -> None:
    counts = counts_of(400, lambda _, scorer: scorer == "reward-1", 0)
    assert culprits(counts) == ("", "reward-1")
    counts.forget("reward-1")
    assert culprits(counts) == ("", "")
    assert not [pair for pair in (*counts.lost, *counts.used) if "reward-1" in pair]


def test_counts_are_cleared() -> None:
    counts = counts_of(400, lambda _, scorer: scorer == "reward-1", 0)
    counts.clear()
    assert vars(counts) == vars(PairCounts())


def test_runs_without_lost_groups_count_nothing() -> None:
    counts = PairCounts()
    counts.note_used("rollout-0", "reward-0")
    assert not counts.used
    assert not counts.is_due(100.0)


@given(st.lists(st.tuples(st.sampled_from(ROLLOUTS), st.sampled_from(SCORERS), st.booleans()), max_size=100))
def test_filtered_groups_are_restored_from_their_summary(groups: list[tuple[str, str, bool]]) -> None:
    filtering, again = FilteredGroups(), FilteredGroups()
    row = 0
    for rollout, scorer, is_filtered in groups:
        (filtering.note_filtered if is_filtered else filtering.note_kept)(rollout, scorer, is_first_try=True)
        row = row + 1 if is_filtered else 0
    again.restore(filtering.summary())
    assert again.summary() == filtering.summary()
    assert again.num_in_a_row == filtering.num_in_a_row == row
    assert vars(again.counts) == vars(filtering.counts)


def test_row_of_filtered_groups_counts_without_any_single_replica() -> None:
    filtering = FilteredGroups()
    for number in range(8):
        filtering.note_filtered(
            "rollout-0" if number < 6 else "rollout-1", f"reward-{number % 2}", is_first_try=number < 4
        )
    present = {"rollout": ["rollout-0", "rollout-1"], "reward": ["reward-0"]}
    assert filtering.num_of_several(present.__getitem__) == 2, "those of rollout-1"
    present["rollout"] = ["rollout-0"]
    assert filtering.num_of_several(present.__getitem__) == 4, "those of reward-0, which is alone now"

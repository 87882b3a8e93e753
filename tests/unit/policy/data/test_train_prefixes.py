"""Prefix trees: every sequence is the path to its last segment, and shared tokens are in a microbatch once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from starling.policy.train.data.groups import IntArray
from starling.policy.train.data.prefixes import MIN_SAVED_TOKENS, PrefixForest, build_trees, divide, restrict


@st.composite
def token_paths(draw: st.DrawFn) -> list[IntArray]:
    """Draw sequences, most of which continue a beginning of another one."""
    paths: list[IntArray] = []
    for _ in range(draw(st.integers(1, 12))):
        kept = list[int]()
        if paths:
            other = draw(st.sampled_from(paths))
            kept = other[: draw(st.integers(0, len(other)))].tolist()
        tail = draw(st.lists(st.integers(0, 2), max_size=12))
        paths.append(np.array([*kept, *tail] or [1], dtype=np.int32))
    return paths


def tokens_of(prefixes: PrefixForest, paths: list[IntArray], sequence: int) -> list[int]:
    found = list[int]()
    for segment in prefixes.forest.path(prefixes.last_segments[sequence]):
        source, start, stop = prefixes.sources[segment]
        found += paths[source][start:stop].tolist()
    return found


@given(token_paths(), st.data())
def test_segments_of_a_sequence_are_its_tokens(paths: list[IntArray], data: st.DataObject) -> None:
    domains = data.draw(st.lists(st.sampled_from([0, 0, 1, -1]), min_size=len(paths), max_size=len(paths)))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(paths) - 1), min_size=1)))
    prefixes = restrict(build_trees(paths, domains), chosen)
    assert sorted(prefixes.last_segments) == chosen
    for sequence in chosen:
        assert tokens_of(prefixes, paths, sequence) == paths[sequence].tolist()
        path = prefixes.forest.path(prefixes.last_segments[sequence])
        assert {domains[prefixes.sources[segment][0]] for segment in path} == {domains[sequence]}


@given(token_paths())
def test_tokens_are_shared_where_that_saves_enough(paths: list[IntArray]) -> None:
    beginnings = {tuple(path[: end + 1].tolist()) for path in paths for end in range(len(path))}
    everything = restrict(build_trees(paths, [-1] * len(paths)), range(len(paths))).forest
    assert everything.num_tokens == len(beginnings)
    worthwhile = restrict(build_trees(paths, [0] * len(paths)), range(len(paths))).forest
    assert len(beginnings) <= worthwhile.num_tokens <= len(beginnings) + (MIN_SAVED_TOKENS - 1) * len(paths)
    assert len(worthwhile.lengths) <= len(everything.lengths)


@given(token_paths(), st.integers(1, 60))
def test_microbatches_hold_each_sequence_once_within_the_budget(paths: list[IntArray], budget: int) -> None:
    trees = build_trees(paths, [0] * len(paths))
    parts = divide(trees, budget)
    assert sorted(sequence for part in parts for sequence in part) == list(range(len(paths)))
    for part in parts:
        assert restrict(trees, part).forest.num_tokens <= max(budget, max(len(paths[one]) for one in part))


def test_sequences_with_a_common_beginning_come_together() -> None:
    """Two documents with three questions each: a budget of one document and its questions computes each once."""
    documents = [np.arange(100, dtype=np.int32) + 1000 * number for number in range(2)]
    questions = [np.arange(10, dtype=np.int32) + 5000 + 100 * number for number in range(3)]
    paths = [np.concatenate([document, question]) for question in questions for document in documents]
    trees = build_trees(paths, [0] * 6)
    assert sorted(map(sorted, divide(trees, 130))) == [[0, 2, 4], [1, 3, 5]]
    parts = divide(trees, 120)  # One question of each document is computed apart from the others, with its document.
    assert sum(restrict(trees, part).forest.num_tokens for part in parts) == 2 * (120 + 110)

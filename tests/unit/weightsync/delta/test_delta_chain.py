"""Chains of deltas: composing two, and applying a chain as a whole or not at all."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from delta_pieces import Piece, changed, random_piece, versions
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.delta.chain import apply_chain, compose
from starling.weightsync.delta.changes import WINDOW
from starling.weightsync.delta.codec import Encoded, apply, encode
from starling.weightsync.delta.format import BLOCK, max_encoded_bytes
from starling.weightsync.delta.parse import parse
from starling.weightsync.offers.offer import digest_of


def links(pieces: list[Piece]) -> list[Encoded]:
    """Encode each version against the one before it, with digests."""
    return [
        encode(new, base, new.itemsize, base_digest=digest_of(base.tobytes()), digest=digest_of(new.tobytes()))
        for base, new in pairwise(pieces)
    ]


@given(versions(count=4))
@examples(60)
def test_compose_equals_applying_both(pieces: list[Piece]) -> None:
    first, second, third = (encoded.data for encoded in links(pieces))
    together = compose(first, second)
    assert len(together.data) == together.metrics.encoded_bytes
    assert len(together.data) <= max_encoded_bytes(len(pieces[0]), pieces[0].itemsize)
    held = pieces[0].copy()
    apply(together.data, held, base_digest=digest_of(held.tobytes()))
    assert held.tobytes() == pieces[2].tobytes()

    left, right = compose(together.data, third), compose(first, compose(second, third).data)
    assert left.data.tobytes() == right.data.tobytes(), "the order of composing does not matter"
    held = pieces[0].copy()
    apply_chain([left.data], held)
    assert held.tobytes() == pieces[3].tobytes()
    header = parse(left.data).header
    if header.form != "dense":
        assert header.base_digest == bytes.fromhex(digest_of(pieces[0].tobytes()))
    assert header.digest == bytes.fromhex(digest_of(pieces[3].tobytes()))


@given(versions(count=4))
@examples(30)
def test_chain_equals_applying_its_deltas(pieces: list[Piece]) -> None:
    held = pieces[0].copy()
    apply_chain([encoded.data for encoded in links(pieces)], held, base_digest=digest_of(held.tobytes()))
    assert held.tobytes() == pieces[-1].tobytes()


def test_element_changed_twice_counts_once_with_the_later_value() -> None:
    base = np.zeros(3 * BLOCK, np.uint16)
    second = base.copy()
    second[[1, 2, BLOCK]] = 5
    third = second.copy()
    third[[2, 3]] = 6
    third[BLOCK] = 0
    together = compose(encode(second, base, 2).data, encode(third, second, 2).data)
    assert together.form == "delta"
    assert together.metrics.num_changed == 4, "an element that went back still counts"
    assert together.metrics.share_changed == 4 / len(base)
    apply(together.data, second)
    assert second.tobytes() == third.tobytes()


def test_compose_windows_with_changes_in_one_or_both() -> None:
    rng = np.random.default_rng(0)
    pieces = [random_piece(rng, 2 * WINDOW + 777, 1)]
    for region in (slice(100, WINDOW), slice(WINDOW - 5, WINDOW + 9 * BLOCK)):
        pieces.append(pieces[-1].copy())
        pieces[-1][region] = changed(rng, pieces[-1][region], 0.02)
    first, second = links(pieces)
    together = compose(first.data, second.data)
    apply(together.data, pieces[0])
    assert pieces[0].tobytes() == pieces[2].tobytes()


def test_composed_deltas_stay_a_delta_even_if_everything_changed() -> None:
    rng = np.random.default_rng(0)
    base = random_piece(rng, 4 * BLOCK, 2)
    pieces = [base, changed(rng, base, 0.85)]
    pieces.append(changed(rng, pieces[1], 0.85))
    first, second = links(pieces)
    assert first.form == second.form == "delta"
    out = bytearray(max_encoded_bytes(len(base), 2))
    together = compose(first.data, second.data, out=out)
    assert together.form == "delta"
    assert together.metrics.saved_bytes < 0, "without the piece there is no dense form to choose"
    apply(together.data, base)
    assert base.tobytes() == pieces[2].tobytes()


def test_dense_piece_restarts_the_chain() -> None:
    rng = np.random.default_rng(0)
    pieces = [random_piece(rng, 5000, 4)]
    for share in (0.01, 0.99, 0.01):
        pieces.append(changed(rng, pieces[-1], share))
    found = links(pieces)
    assert [encoded.form for encoded in found] == ["delta", "dense", "delta"]
    held = pieces[0].copy()
    apply_chain([encoded.data for encoded in found], held)
    assert held.tobytes() == pieces[3].tobytes()


def test_deltas_that_do_not_follow_each_other_are_refused() -> None:
    rng = np.random.default_rng(0)
    pieces = [random_piece(rng, 5000, 2)]
    for _ in range(3):
        pieces.append(changed(rng, pieces[-1], 0.01))
    first, second, third = (encoded.data for encoded in links(pieces))
    with pytest.raises(WeightsError, match="ask for the chain"):
        compose(first, third)
    held = pieces[0].copy()
    for chain in ([first, third], [second, third], [first, second[:-1]]):
        with pytest.raises(WeightsError):
            apply_chain(chain, held, base_digest=digest_of(held.tobytes()))
        assert held.tobytes() == pieces[0].tobytes(), "nothing of a broken chain is written"
    other = encode(pieces[0][:999], pieces[1][:999], 2).data
    with pytest.raises(WeightsError, match="999 elements"):
        compose(first, other)
    halves = encode(pieces[1].view(np.uint8), pieces[0].view(np.uint8), 1).data
    with pytest.raises(WeightsError, match="Elements of 2 bytes are followed by elements of 1"):
        compose(first, halves)
    buffer = np.concatenate([first, np.zeros(9999, np.uint8)])
    with pytest.raises(WeightsError, match="overlaps the input"):
        compose(buffer[: len(first)], second, out=buffer)


def test_empty_chain_changes_nothing() -> None:
    held = np.arange(10, dtype=np.uint16)
    apply_chain([], held)
    assert held.tolist() == list(range(10))


@given(st.booleans(), st.booleans())
def test_unchanged_piece_passes_digests_on(first_known: bool, second_known: bool) -> None:
    base = random_piece(np.random.default_rng(0), 5000, 2)
    new = changed(np.random.default_rng(1), base, 0.01)
    digest = digest_of(base.tobytes())
    same = encode(base, base.copy(), 2, base_digest=digest if first_known else None)
    delta = encode(new, base, 2, base_digest=digest if second_known else None)
    header = parse(compose(same.data, delta.data).data).header
    assert header.base_digest == (bytes.fromhex(digest) if first_known or second_known else None)
    back = encode(base, new, 2, digest=digest if first_known else None)
    still = encode(base, base.copy(), 2, base_digest=digest if second_known else None)
    header = parse(compose(back.data, still.data).data).header
    assert header.digest == (bytes.fromhex(digest) if first_known or second_known else None)

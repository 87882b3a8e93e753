"""Corrupted deltas: they are refused and nothing is written, or all writes stay inside the piece."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from delta_pieces import Piece, changed, patchwork, random_piece
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.delta.codec import apply, encode, scan, write
from starling.weightsync.delta.format import BLOCK, HEADER, Kind, Sections
from starling.weightsync.delta.parse import parse

GUARD = 512


def one_of_each() -> tuple[Piece, Piece, bytes, Sections]:
    """A piece with a block of each kind (the last, short one is NARROW), its successor, the delta and its sections."""
    base, new = patchwork(np.random.default_rng(0), 2, (0.001, 0.3, 0.0, 0.0, 0.02), 999)
    new[3 * BLOCK + 5 : 3 * BLOCK + 2000] ^= 1
    new[3 * BLOCK + 3000 : 3 * BLOCK + 9000] ^= 1
    new[-999:] = changed(np.random.default_rng(1), base[-999:], 0.1)
    new[-1] ^= 1
    scanned = scan(new, base, 2)
    assert scanned.directory is not None
    kinds = [Kind.WIDE, Kind.BITMAP, Kind.SAME, Kind.RUNS, Kind.NARROW, Kind.NARROW]
    assert scanned.directory.kinds.tolist() == kinds
    return base, new, write(scanned, new).data.tobytes(), scanned.directory.sections


BASE, NEW, DATA, SECTIONS = one_of_each()


def refused_or_inside(data: bytes, base: Piece) -> bool:
    """Whether applying `data` was refused; never may a byte outside the piece change, nor any where it was refused."""
    arena = np.full(base.nbytes + 2 * GUARD, 0xCD, np.uint8)
    held = arena[GUARD:-GUARD]
    held[:] = base.view(np.uint8)
    refused = False
    try:
        apply(data, held)
    except WeightsError:
        refused = True
        assert held.tobytes() == base.tobytes()
    assert (arena[:GUARD] == 0xCD).all()
    assert (arena[-GUARD:] == 0xCD).all()
    return refused


def with_number(offset: int, form: str, value: int) -> bytes:
    data = bytearray(DATA)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


def test_intact_delta_is_accepted() -> None:
    held = BASE.copy()
    apply(DATA, held)
    assert held.tobytes() == NEW.tobytes()


@given(st.integers(0, len(DATA) - 1))
@examples(100)
def test_truncated_delta_is_refused(size: int) -> None:
    assert refused_or_inside(DATA[:size], BASE)


@given(st.binary(min_size=1, max_size=20))
def test_trailing_bytes_are_refused(more: bytes) -> None:
    assert refused_or_inside(DATA + more, BASE)


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    assert refused_or_inside(data, BASE)
    assert refused_or_inside(DATA[: HEADER.size] + data, BASE)


@given(st.data())
@examples(150)
def test_changed_bytes_never_write_outside_the_piece(data: st.DataObject) -> None:
    broken = bytearray(DATA)
    section = data.draw(st.sampled_from([(0, HEADER.size), *SECTIONS[:-1]]))
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(section[0], section[0] + section[1] - 1))] = data.draw(st.integers(0, 255))
    refused_or_inside(bytes(broken), BASE)


RUN = SECTIONS.runs.offset
BREAKS: list[tuple[str, Callable[[], bytes], str]] = [
    ("magic", lambda: with_number(0, "<B", 0), "begins with"),
    ("version", lambda: with_number(4, "<B", 2), "version 2"),
    ("form", lambda: with_number(5, "<B", 3), "form 3"),
    ("form that it is not", lambda: with_number(5, "<B", 0), "changed elements in the form 'same'"),
    ("item size", lambda: with_number(6, "<B", 3), "item size 3"),
    ("flags", lambda: with_number(7, "<B", 4), "flags 4"),
    ("digest without flag", lambda: with_number(24, "<B", 1), "unknown bits"),
    ("reserved", lambda: with_number(63, "<B", 1), "unknown bits"),
    ("very many elements", lambda: with_number(8, "<Q", 2**63), "too few for 9223372036854775808 elements"),
    ("changed elements", lambda: with_number(16, "<Q", 1), "do not add up to 1"),
    ("kind", lambda: with_number(64, "<I", 5 << 24 | 1), "unknown kind"),
    ("count", lambda: with_number(64, "<I", 2 << 24 | 65537), "more changed elements than it has"),
    ("count of the last", lambda: with_number(64 + 5 * 4, "<I", 3 << 24 | 1000), "more changed elements than it has"),
    ("count of the same", lambda: with_number(64 + 2 * 4, "<I", 1), "do not add up"),
    ("no runs", lambda: with_number(SECTIONS.run_counts.offset, "<I", 0), "more runs than changed elements, or with"),
    ("many runs", lambda: with_number(SECTIONS.run_counts.offset, "<I", 65537), "more runs than changed elements"),
    ("more runs", lambda: with_number(SECTIONS.run_counts.offset, "<I", 5), "where its header describes"),
    ("run outside", lambda: with_number(RUN + 4, "<H", 65500), "ends outside its block"),
    ("run order", lambda: with_number(RUN + 4, "<H", 2), "runs that are not in order"),
    ("run length", lambda: with_number(RUN + 2, "<H", 1000), "do not add up to the count"),
    ("wide order", lambda: with_number(SECTIONS.wide.offset, "<H", 65535), "positions that are not in order"),
    ("cell", lambda: with_number(SECTIONS.cells.offset, "<B", 255), "cells that do not add up"),
    ("narrow order", lambda: with_number(SECTIONS.narrow.offset, "<B", 255), "positions that are not in order"),
    (
        "narrow outside",
        lambda: with_number(SECTIONS.narrow.offset + SECTIONS.narrow.size - 1, "<B", 231),
        "a position beyond its 328679 elements",
    ),
    ("bitmap", lambda: with_number(SECTIONS.bitmaps.offset, "<Q", 2**64 - 1), "bitmaps that do not add up"),
]


@pytest.mark.parametrize(("break_it", "says"), [rest for _, *rest in BREAKS], ids=[name for name, *_ in BREAKS])
def test_each_rule_has_an_error_sentence(break_it: Callable[[], bytes], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        parse(break_it())
    assert refused_or_inside(break_it(), BASE)


@pytest.mark.parametrize(("share", "kind"), [(0.002, Kind.WIDE), (0.4, Kind.BITMAP)])
def test_position_beyond_a_short_last_block_is_refused(share: float, kind: Kind) -> None:
    base = random_piece(np.random.default_rng(0), BLOCK + 1001, 4)
    new = changed(np.random.default_rng(1), base, share)
    new[-1] ^= 1
    scanned = scan(new, base, 4)
    assert scanned.directory is not None
    assert scanned.directory.kinds.tolist() == [kind, kind]
    data = bytearray(write(scanned, new).data)
    found = scanned.directory.sections
    if kind == Kind.WIDE:
        struct.pack_into("<H", data, found.wide.offset + found.wide.size - 2, 1001)
    else:
        # The last byte has one bit of the piece; the bit of element 1001 takes its place.
        assert data[found.bitmaps.offset + found.bitmaps.size - 1] == 1
        data[found.bitmaps.offset + found.bitmaps.size - 1] = 2
    with pytest.raises(WeightsError, match=f"a position beyond its {len(base)} elements"):
        parse(bytes(data))
    assert refused_or_inside(bytes(data), base)


@pytest.mark.parametrize("form", ["same", "dense"])
def test_forms_without_blocks(form: str) -> None:
    base = random_piece(np.random.default_rng(0), 100, 2)
    encoded = encode(base if form == "same" else base ^ 1, base.copy(), 2)
    assert encoded.form == form
    for data in (encoded.data.tobytes() + b"\0", encoded.data.tobytes()[:-1]):
        with pytest.raises(WeightsError, match=r"has .* bytes"):
            parse(data)
        assert refused_or_inside(data, base)

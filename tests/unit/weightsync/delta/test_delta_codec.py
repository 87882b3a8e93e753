"""Deltas with numpy: for any change and any block kind the base becomes the new piece, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from delta_pieces import Piece, changed, patchwork, random_piece, runs_at_block_ends, versions
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.delta.changes import WINDOW
from starling.weightsync.delta.codec import apply, encode, scan, write
from starling.weightsync.delta.format import BLOCK, HEADER, Kind, max_encoded_bytes, total_of
from starling.weightsync.offers.offer import digest_of


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(versions())
@examples(60)
def test_apply_turns_the_base_into_the_new_piece(pieces: list[Piece]) -> None:
    base, new = pieces
    encoded = encode(new, base, new.itemsize)
    held = base.copy()
    apply(encoded.data, held)
    assert held.tobytes() == new.tobytes()
    apply(encoded.data, held)
    assert held.tobytes() == new.tobytes(), "applying it again changes nothing"

    metrics = encoded.metrics
    assert metrics.encoded_bytes == len(encoded.data) <= HEADER.size + new.nbytes
    assert metrics.encoded_bytes <= max_encoded_bytes(len(new), new.itemsize)
    assert metrics.saved_bytes == new.nbytes - len(encoded.data)
    assert (encoded.form == "same") == (new.tobytes() == base.tobytes())
    if encoded.form == "delta":
        assert metrics.num_changed == np.count_nonzero(new != base)
        assert metrics.share_changed == pytest.approx(np.mean(new != base))


@given(versions())
@examples(30)
def test_scan_predicts_write_and_encode_writes_the_same(pieces: list[Piece]) -> None:
    base, new = pieces
    scanned = scan(new, base, new.itemsize)
    buffer = np.full(scanned.metrics.encoded_bytes + 5, 0xAB, np.uint8)
    written = write(scanned, new, out=buffer)
    assert written.metrics == scanned.metrics
    assert written.data.tobytes() == encode(new, base, new.itemsize).data.tobytes()
    assert buffer[len(written.data) :].tobytes() == b"\xab" * 5, "nothing is written behind the encoded piece"


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("tail", [1, 300, BLOCK - 1])
def test_piece_with_blocks_of_all_kinds(item_bytes: int, tail: int) -> None:
    base, new = patchwork(rng(tail), item_bytes, (0.001, 0.0, 0.3, 0.02, 0.0003, 0.05), tail)
    new[5 * BLOCK + 17 : 6 * BLOCK] = base[5 * BLOCK + 17 : 6 * BLOCK] ^ 1
    scanned = scan(new, base, item_bytes)
    assert scanned.directory is not None
    kinds = scanned.directory.kinds
    assert list(kinds[:6]) == [Kind.WIDE, Kind.SAME, Kind.BITMAP, Kind.NARROW, Kind.WIDE, Kind.RUNS]
    held = base.copy()
    apply(write(scanned, new).data, held)
    assert held.tobytes() == new.tobytes()


@pytest.mark.parametrize("tail", [1, 7, 300, 4099])
@pytest.mark.parametrize(("share", "kind"), [(0.002, Kind.WIDE), (0.03, Kind.NARROW), (0.4, Kind.BITMAP)])
def test_short_last_block(tail: int, share: float, kind: Kind) -> None:
    base = random_piece(rng(), BLOCK + tail, 4)
    new = changed(rng(1), base, share)
    new[-1] ^= 1
    scanned = scan(new, base, 4)
    assert scanned.directory is not None
    assert scanned.directory.kinds[0] == kind
    held = base.copy()
    apply(write(scanned, new).data, held)
    assert held.tobytes() == new.tobytes()


def test_runs_end_at_the_end_of_their_block() -> None:
    base, new = runs_at_block_ends(rng())
    scanned = scan(new, base, 2)
    assert scanned.directory is not None
    assert scanned.directory.run_counts.tolist() == [1, 2, 1, 1, 1, 1]
    held = base.copy()
    apply(write(scanned, new).data, held)
    assert held.tobytes() == new.tobytes()


def test_changes_in_some_of_several_windows() -> None:
    base = random_piece(rng(), 2 * WINDOW + 12345, 1)
    new = base.copy()
    new[WINDOW - 1 : WINDOW + 1] ^= 1
    new[WINDOW + 5 * BLOCK : WINDOW + 15 * BLOCK] ^= rng(1).integers(0, 2, 10 * BLOCK, np.uint8)
    new[-1] ^= 0x80
    encoded = encode(new, base, 1)
    assert encoded.form == "delta"
    held = base.copy()
    apply(encoded.data, held)
    assert held.tobytes() == new.tobytes()


def test_equal_numbers_with_different_bits_have_changed() -> None:
    base = np.array([0.0, 1.0, np.nan, 2.0] * 100, np.float32)
    new = base.copy()
    new[0] = -0.0
    encoded = encode(new, base, 4)
    assert encoded.metrics.num_changed == 1
    held = base.copy()
    apply(encoded.data, held)
    assert held.tobytes() == new.tobytes()
    assert encode(base, base.copy(), 4).form == "same", "a NaN is equal to itself"


def test_bytes_of_a_delta() -> None:
    base, new = np.zeros(1000, np.uint16), np.zeros(1000, np.uint16)
    new[[3, 999]] = 0x0102, 0xFFFF
    encoded = encode(new, base, 2, base_digest="11" * 16, digest="22" * 16)
    header = b"SWDL" + bytes([1, 1, 2, 3]) + (1000).to_bytes(8, "little") + (2).to_bytes(8, "little")
    header += b"\x11" * 16 + b"\x22" * 16 + bytes(8)
    directory = (2 << 24 | 2).to_bytes(4, "little") + bytes(4)
    wide = (3).to_bytes(2, "little") + (999).to_bytes(2, "little") + bytes(4)
    values = b"\x02\x01\xff\xff" + bytes(4)
    assert encoded.data.tobytes() == header + directory + wide + values


@pytest.mark.parametrize("num_elements", [0, 1, 10])
def test_pieces_too_small_for_a_delta_are_dense(num_elements: int) -> None:
    base = np.zeros(num_elements, np.uint32)
    encoded = encode(base + 1, base, 4)
    assert encoded.form == ("dense" if num_elements else "same")
    held = base.copy()
    apply(encoded.data, held)
    assert held.tolist() == [1] * num_elements


@pytest.mark.parametrize(("share", "least"), [(0.0, 10_000), (0.001, 400), (0.01, 57), (0.03, 21)])
def test_compression_of_a_bf16_delta(share: float, least: float) -> None:
    base = random_piece(rng(), 16 * BLOCK, 2)
    encoded = encode(changed(rng(1), base, share), base, 2)
    assert base.nbytes / len(encoded.data) > least


def test_changed_rows_cost_little_more_than_their_values() -> None:
    base = random_piece(rng(), 64 * BLOCK, 2).reshape(-1, 1024)
    new = base.copy()
    new[rng(1).choice(len(new), 40, replace=False)] ^= 1
    encoded = encode(new, base, 2)
    assert len(encoded.data) < 1.02 * 40 * 1024 * 2


def test_dense_when_much_changed_and_comparison_stops_early() -> None:
    base = random_piece(rng(), 4 * WINDOW, 1)
    new = changed(rng(1), base, 0.3)
    assert scan(new, base, 1).form == "delta"
    limited = scan(new, base, 1, max_share=0.05)
    assert limited.form == "dense"
    assert limited.metrics.num_compared == WINDOW
    assert limited.metrics.share_changed == pytest.approx(0.3, rel=0.01)
    held = base.copy()
    apply(write(limited, new).data, held)
    assert held.tobytes() == new.tobytes()


@pytest.mark.parametrize("shift", [0, 1, 3])
@given(seed=st.integers(0, 1000))
@examples(5)
def test_unaligned_memory(shift: int, seed: int) -> None:
    base = random_piece(rng(seed), BLOCK + 99, 4)
    new = changed(rng(seed + 1), base, 0.02)

    def moved(data: bytes) -> memoryview:
        return memoryview(bytearray(shift) + bytearray(data) + bytearray(9))[shift : shift + len(data)]

    held = moved(base.tobytes())
    out = memoryview(bytearray(base.nbytes + 100))[shift:]
    encoded = encode(moved(new.tobytes()), held, 4, out=out)
    assert encoded.form == "delta"
    apply(moved(encoded.data.tobytes()), held)
    assert held.tobytes() == new.tobytes()


def test_delta_of_another_base_is_refused() -> None:
    base = random_piece(rng(), 5000, 2)
    new = changed(rng(1), base, 0.01)
    first, second = digest_of(base.tobytes()), digest_of(new.tobytes())
    encoded = encode(new, base, 2, base_digest=first, digest=second)
    held = base.copy()
    with pytest.raises(WeightsError, match=f"of the base {first}, not of {second}"):
        apply(encoded.data, held, base_digest=second)
    assert held.tobytes() == base.tobytes()
    apply(encoded.data, held, base_digest=first)
    assert held.tobytes() == new.tobytes()
    dense = encode(new, base, 2, max_share=0, base_digest=first)
    apply(dense.data, held, base_digest=second)
    assert held.tobytes() == new.tobytes(), "a dense piece fits every base"


def test_encode_refuses_invalid_arguments() -> None:
    piece = np.zeros(1000, np.uint16)
    with pytest.raises(WeightsError, match="1000 elements, its base 999"):
        encode(piece, piece[:999], 2)
    with pytest.raises(WeightsError, match="Elements of 3 bytes"):
        encode(piece, piece, 3)
    with pytest.raises(WeightsError, match="not whole elements of 4 bytes"):
        encode(piece[:999], piece[:999], 4)
    with pytest.raises(WeightsError, match="not contiguous"):
        encode(piece[::2], piece[::2], 2)
    with pytest.raises(WeightsError, match=r"1\.5 of the piece"):
        encode(piece, piece, 2, max_share=1.5)
    with pytest.raises(WeightsError, match="32 hex digits"):
        encode(piece, piece, 2, base_digest="abc")
    with pytest.raises(WeightsError, match="takes 64 bytes"):
        encode(piece, piece.copy(), 2, out=bytearray(63))
    with pytest.raises(WeightsError, match="takes 64 bytes"):
        encode(piece, piece.copy(), 2, out=bytes(64))
    with pytest.raises(WeightsError, match="overlaps the input"):
        encode(piece, piece.copy(), 2, out=piece)
    with pytest.raises(WeightsError, match="999 elements where 1000"):
        write(scan(piece, piece.copy(), 2), piece[:999])
    with pytest.raises(WeightsError, match="-1 elements"):
        max_encoded_bytes(-1, 2)


def test_apply_refuses_invalid_arguments() -> None:
    piece = np.zeros(1000, np.uint16)
    data = encode(piece + 1, piece, 2, max_share=0).data
    with pytest.raises(WeightsError, match="1000 elements of 2 bytes and the base 999"):
        apply(data, piece[:999])
    with pytest.raises(WeightsError, match="is read-only"):
        apply(data, bytes(2000))


def test_total_of_many_pieces() -> None:
    base = random_piece(rng(), 5000, 2)
    pieces = [encode(changed(rng(1), base, share), base, 2).metrics for share in (0.0, 0.01, 1.0)]
    total = total_of(pieces)
    assert total.num_pieces == {"same": 1, "delta": 1, "dense": 1}
    assert total.dense_bytes == 3 * base.nbytes
    assert total.saved_bytes == sum(piece.saved_bytes for piece in pieces)
    assert total.share_changed == pytest.approx(1.01 / 3, abs=0.01)
    assert total_of([]).share_changed == 0

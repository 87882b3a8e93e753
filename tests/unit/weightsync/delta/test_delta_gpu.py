"""Deltas with torch: the same bytes as with numpy, and the same result; on a GPU too, if there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from delta_pieces import Piece, changed, patchwork, random_piece, runs_at_block_ends, versions
from hypothesis import given
from property_tests import examples

from starling.common.errors import WeightsError
from starling.weightsync.delta.codec import apply, encode
from starling.weightsync.delta.format import BLOCK, Kind
from starling.weightsync.delta.parse import ParsedDelta, parse
from starling.weightsync.tensors import delta as gpu
from starling.weightsync.tensors.delta import apply_tensor, encode_tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHUNK", 2 * BLOCK)


def tensor_of(piece: Piece) -> torch.Tensor:
    return torch.frombuffer(bytearray(piece.tobytes()), dtype=TYPES[piece.itemsize]).to(DEVICE)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().view(torch.uint8).numpy())


def check(base: Piece, new: Piece) -> None:
    expected = encode(new, base, new.itemsize)
    encoded = encode_tensor(tensor_of(new), tensor_of(base))
    assert bytes_of(encoded.data) == expected.data.tobytes()
    assert encoded.metrics.num_changed == np.count_nonzero(new != base)
    assert encoded.metrics.encoded_bytes == expected.metrics.encoded_bytes
    assert encoded.form == expected.form
    for data in (encoded.data, expected.data, expected.data.tobytes()):
        held = tensor_of(base)
        apply_tensor(data, held)
        assert bytes_of(held) == new.tobytes()


@given(versions())
@examples(40)
def test_bytes_equal_those_of_numpy(pieces: list[Piece]) -> None:
    check(*pieces)


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_tensor_with_blocks_of_all_kinds(item_bytes: int) -> None:
    base, new = patchwork(np.random.default_rng(0), item_bytes, (0.001, 0.02, 0.3, 0.0, 0.05, 0.2), 999)
    new[3 * BLOCK + 17 : 3 * BLOCK + 5000] ^= 1
    new[2 * BLOCK - 200 : 2 * BLOCK] ^= 1
    parsed = parse(encode(new, base, item_bytes).data)
    assert isinstance(parsed, ParsedDelta)
    assert set(parsed.directory.kinds.tolist()) == set(Kind)
    check(base, new)


def test_runs_end_at_the_end_of_their_block() -> None:
    check(*runs_at_block_ends(np.random.default_rng(0)))


def test_shapes_and_buffers() -> None:
    base = tensor_of(random_piece(np.random.default_rng(0), 64 * 100, 2)).view(64, 100)
    new = base.clone()
    new[3, 4], new[60, 99] = torch.nan, -0.0
    out = torch.full((20_000,), 7, dtype=torch.uint8, device=DEVICE)
    encoded = encode_tensor(new, base, out=out, base_digest="11" * 16, digest="22" * 16)
    assert encoded.form == "delta"
    assert encoded.data.data_ptr() == out.data_ptr()
    assert (out[len(encoded.data) :] == 7).all()
    # The bytes may begin anywhere.
    shifted = torch.cat((out[:3], encoded.data))[3:]
    held = base.clone()
    apply_tensor(shifted, held, base_digest="11" * 16)
    assert bytes_of(held) == bytes_of(new)
    scalar = torch.tensor(1.0)
    apply_tensor(encode_tensor(torch.tensor(2.0), torch.tensor(1.0)).data, scalar)
    assert scalar == 2.0


def test_invalid_arguments_are_refused() -> None:
    base = tensor_of(random_piece(np.random.default_rng(0), 6000, 2))
    new = base.clone()
    new.view(torch.int16)[5] ^= 1
    for other in (base[:-1], base.view(torch.float16), base.view(60, 100)):
        with pytest.raises(WeightsError, match="they must be alike"):
            encode_tensor(new, other)
    with pytest.raises(WeightsError, match="strides"):
        encode_tensor(new.view(60, 100).T, base.view(60, 100).T)
    with pytest.raises(WeightsError, match="1, 2, 4 or 8 bytes"):
        encode_tensor(torch.zeros(4, dtype=torch.complex128), torch.zeros(4, dtype=torch.complex128))
    for out in (torch.empty(3, dtype=torch.uint8), torch.empty(90_000), torch.empty(200, dtype=torch.uint8)[::2]):
        with pytest.raises(WeightsError, match="contiguous bytes"):
            encode_tensor(new, base, out=out.to(DEVICE))
    for mine in (new, base):
        with pytest.raises(WeightsError, match="overlaps the input"):
            encode_tensor(new, base, out=mine.view(torch.uint8))
    encoded = encode_tensor(new, base, base_digest="11" * 16)
    held = base.clone()
    with pytest.raises(WeightsError, match="ask for the chain"):
        apply_tensor(encoded.data, held, base_digest="22" * 16)
    with pytest.raises(WeightsError, match="elements of 2 bytes, the base is"):
        apply_tensor(encoded.data, held.view(torch.int32))
    with pytest.raises(WeightsError, match="6000 elements"):
        apply_tensor(encoded.data, held[:-1])
    with pytest.raises(WeightsError, match="where its header describes"):
        apply_tensor(encoded.data[:-1], held)
    assert bytes_of(held) == bytes_of(base)


def test_numpy_applies_deltas_of_torch() -> None:
    rng = np.random.default_rng(0)
    base = random_piece(rng, 5 * BLOCK + 3, 1)
    new = changed(rng, base, 0.04)
    apply(bytes_of(encode_tensor(tensor_of(new), tensor_of(base)).data), base)
    assert base.tobytes() == new.tobytes()

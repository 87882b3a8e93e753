"""Places of tensors in a buffer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from starling.reward.score.workers.places import ALIGNMENT, offsets_of, padded


@given(st.lists(st.lists(st.binary(max_size=3 * ALIGNMENT), max_size=3), max_size=6))
def test_padded_tensors_lie_where_their_offsets_say(tensors: list[list[bytes]]) -> None:
    contents = [b"".join(parts) for parts in tensors]
    offsets, end = offsets_of(map(len, contents))
    buffer = b"".join(padded(tensors))
    for offset, content in zip(offsets, contents, strict=True):
        assert offset % ALIGNMENT == 0
        assert buffer[offset : offset + len(content)] == content
    assert len(buffer) == end
    assert end <= sum(map(len, contents)) + ALIGNMENT * len(tensors)


def test_offsets_of_no_tensor_are_none() -> None:
    assert offsets_of([]) == ([], 0)

"""The write-ahead log of a journal that was compacted, cut at every byte, in parts."""

from __future__ import annotations

import pytest
from cut_checks import NUM_PARTS, check
from file_kinds import LARGE


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_compacted_log_cut_at_every_byte_is_read_or_refused(part: int) -> None:
    check(LARGE["compacted log"], every=True, part=part, num_parts=NUM_PARTS)

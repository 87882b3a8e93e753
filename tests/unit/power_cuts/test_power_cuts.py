"""Every file that a run writes, cut anywhere: it is read up to the cut, or one sentence says why not."""

from __future__ import annotations

import pytest
from cut_checks import check
from file_kinds import KINDS, FileKind


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cut_file_is_read_or_refused_in_one_sentence(kind: FileKind) -> None:
    check(kind, every=False)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.large], ids=lambda kind: kind.name)
def test_file_cut_at_every_byte_is_read_or_refused(kind: FileKind) -> None:
    """Large files are cut in tests of their own, which run in parallel: test_cut_*.py."""
    check(kind, every=True)

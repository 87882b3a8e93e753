"""How tests of the weight plane copy and digest small buckets."""

from __future__ import annotations

import zlib

import pytest

from starling.weightsync.memory import jobs


@pytest.fixture(autouse=True)
def threads_of_jobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tests use threads for small buckets, too, as for large ones: the half that its name is in."""
    if zlib.crc32(request.node.nodeid.encode()) % 2:
        monkeypatch.setattr(jobs, "AT_ONCE_ARRAYS", -1)

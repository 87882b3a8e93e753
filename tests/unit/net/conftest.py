"""Keys of a run, and a hub that is closed after its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_harness import NAMES, HubHarness

from starling.common.net.keyring import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "keys"
    make_keys(folder, NAMES)
    return folder


@pytest.fixture
def harness(keys: Path) -> Iterator[HubHarness]:
    harness = HubHarness(keys)
    yield harness
    harness.hub.close(0.0)

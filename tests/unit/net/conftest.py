"""A run's keys, and a desk that is closed after its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_harness import NAMES, Desk

from starling.common.net.keyring import make_keys


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "keys"
    make_keys(folder, NAMES)
    return folder


@pytest.fixture
def desk(keys: Path) -> Iterator[Desk]:
    desk = Desk(keys)
    yield desk
    desk.hub.close(0.0)

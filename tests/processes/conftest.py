"""A fake hub for each test, and a model folder for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub
from replica_processes import SMALL

from starling.cli.model.scratch import ScratchSettings, make_model_folder


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder without weights."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model_folder(ScratchSettings(config=SMALL, alphabet="abcdefgh>", max_length=64), folder)
    return folder

"""A desk, and a model that is small enough to load in no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replica_desk import Desk

from starling.cli.model.scratch import ScratchSettings, make_model_folder

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder without weights."""
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model_folder(ScratchSettings(config=SMALL, alphabet="abcdefgh>", max_length=64), folder)
    return folder

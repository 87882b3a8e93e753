"""One engine for all tests here: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from api_lone import LoneEngine, lone_engine, make_model

READ = ("--rollout.api.read-timeout-s", "2")


@pytest.fixture(scope="session")
def api_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def lone(api_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoneEngine]:
    with lone_engine(api_model, tmp_path_factory.mktemp("run"), "--rollout.api.max-requests", "64", *READ) as lone:
        yield lone

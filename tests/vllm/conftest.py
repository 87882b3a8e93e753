"""Fixtures of all tests with vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import warm


@pytest.fixture(scope="session", autouse=True)
def _warm_processes() -> Iterator[None]:
    with warm.warm_processes():
        yield


@pytest.fixture
def cold_processes() -> Iterator[None]:
    """Engines that start as in production."""
    with warm.cold_processes():
        yield

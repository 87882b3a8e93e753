"""Scenarios are compared with what their files say, or written anew."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write into the scenarios what happens now")

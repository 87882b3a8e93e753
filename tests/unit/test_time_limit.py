"""A test that hangs fails by its name, so that the suite goes on and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANGS = """
import threading
def test_hangs():
    threading.Event().wait()
def test_follows():
    pass
"""


def test_every_test_has_a_time_limit(pytestconfig: pytest.Config) -> None:
    assert 60 <= float(pytestconfig.getini("timeout")) <= 1800
    assert pytestconfig.getini("timeout_method") == "signal"


def test_test_that_hangs_fails_by_its_name(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(pytestconfig.inipath),
        "--override-ini",
        "timeout=2",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED" in done.stdout
    assert "test_hangs - Failed: Timeout" in done.stdout
    assert "1 failed, 1 passed" in done.stdout

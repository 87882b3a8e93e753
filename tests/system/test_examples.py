"""Examples that run standalone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.campaign
@pytest.mark.system
@pytest.mark.parametrize(
    "transport", ["ucx", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("local", "tcp"))]
)
def test_example_moves_weights_between_two_processes(transport: str) -> None:
    example = EXAMPLES / "weightsync_two_processes.py"
    assert len(example.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, str(example), transport], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    versions = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert versions == ["version 0", "version 1", "version 2"]
    assert done.stdout.count(f"over {transport}") == 3

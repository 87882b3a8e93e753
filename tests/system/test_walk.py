"""Four services that talk over sockets make, to the bit, the weights that one process makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests/system/recipes/walk.toml"


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def weights(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "model.safetensors").items()}


@pytest.mark.system
def test_synchronous_training_equals_the_walk_to_the_bit(tmp_path: Path) -> None:
    run("examples/walk.py", str(RECIPE), str(tmp_path / "walk"))
    run("-m", "starling.cli.main", "run", str(RECIPE), "--run.folder", str(tmp_path / "runs"))
    walked = weights(tmp_path / "walk/checkpoint")
    distributed = weights(tmp_path / "runs/walk/attempt-1/checkpoints/step-6")
    assert walked == distributed
    run("examples/walk.py", str(RECIPE), str(tmp_path / "other"), "--rl.num-steps", "5")
    assert weights(tmp_path / "other/checkpoint") != distributed, "weights that never change would prove nothing"


def test_the_walk_is_short_enough_to_read() -> None:
    assert len((ROOT / "examples/walk.py").read_text().splitlines()) < 100

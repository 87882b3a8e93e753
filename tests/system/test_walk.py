"""Four services connected by sockets train bitwise the same weights as the loop in one process."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
import torch
from forked_command import ForkedCommand
from safetensors.torch import load_file
from system_runs import MARK

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests/system/recipes/walk.toml"


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def run_forked(folder: Path, *command: str) -> None:
    """Run the same as a fork that has its imports already, with its output in `folder`."""
    mark = uuid.uuid4().hex
    out, errors = folder / f"{mark}.out", folder / f"{mark}.errors"
    out.touch()
    errors.touch()
    variables = {**os.environ, MARK: mark, "SPT_NOENV": "1"}
    process = ForkedCommand(command, ROOT, variables, MARK, out, errors)
    assert process.wait(120) == 0, out.read_text()[-3000:] + errors.read_text()[-3000:]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the weights that the walk trains with the recipe."""
    folder = tmp_path_factory.mktemp("walk")
    run("examples/walk.py", str(RECIPE), str(folder))
    return weights(folder / "checkpoint")


def weights(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.system
def test_synchronous_run_equals_the_walk_bitwise(tmp_path: Path, walked: dict[str, bytes]) -> None:
    run(
        *("-m", "starling.cli.main", "run", str(RECIPE), "--run.folder", str(tmp_path / "runs")),
        *("--weights.digests", "sampled"),
    )
    distributed = weights(tmp_path / "runs/walk/attempt-1/checkpoints/step-6")
    assert walked == distributed
    run_forked(tmp_path, "examples/walk.py", str(RECIPE), str(tmp_path / "other"), "--rl.num-steps", "5")
    assert weights(tmp_path / "other/checkpoint") != distributed, "weights that never change would prove nothing"


@pytest.mark.system
def test_colocated_run_equals_the_walk_bitwise(tmp_path: Path, walked: dict[str, bytes]) -> None:
    run_forked(
        tmp_path,
        *("-m", "starling.cli.main", "run", str(RECIPE), "--run.folder", str(tmp_path / "runs")),
        *("--launch.colocate", "true"),
    )
    attempt = tmp_path / "runs/walk/attempt-1"
    assert walked == weights(attempt / "checkpoints/step-6")
    lines = [msgspec.json.decode(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    turns = [line["role"] for line in lines if line["kind"] == "devices_switched"]
    assert turns[:4] == ["rollout", "policy", "rollout", "policy"]


@pytest.mark.system
def test_run_with_deltas_equals_the_walk_bitwise(tmp_path: Path) -> None:
    """bf16 at a small learning rate: deltas are small because most elements keep their bits."""
    flags = ("--model.dtype", "bfloat16", "--policy.optimizer.learning-rate", "0.00005")
    run_forked(tmp_path, "examples/walk.py", str(RECIPE), str(tmp_path / "walk"), *flags)
    run_forked(
        tmp_path,
        *("-m", "starling.cli.main", "run", str(RECIPE), "--run.folder", str(tmp_path / "runs"), *flags),
        *("--policy.delta-versions", "2"),
    )
    attempt = tmp_path / "runs/walk/attempt-1"
    assert weights(tmp_path / "walk/checkpoint") == weights(attempt / "checkpoints/step-6")
    lines = [msgspec.json.decode(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    adopted = [line for line in lines if line["kind"] == "adopted"]
    assert all(line["attested"] for line in adopted)
    assert adopted[0]["sent_bytes"] == adopted[0]["size_bytes"]
    # The last version may be adopted after the end of the run, so the smallest delta is compared.
    assert min(line["sent_bytes"] for line in adopted) < adopted[0]["size_bytes"] / 2


def test_the_walk_is_short_enough_to_read() -> None:
    assert len((ROOT / "examples/walk.py").read_text().splitlines()) < 100

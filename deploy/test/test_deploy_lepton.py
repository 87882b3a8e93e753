"""The script that a worker of `starling deploy lepton` runs: a whole run with one worker, as a process of this machine.

DGX Cloud Lepton itself is not here; what the platform does is only that it starts the command with its variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from starling.cli.main import main

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "quickstart.toml"
RUN_S = 1500.0
FLAGS = (
    *("--image", "example.org/starling:1", "--resource-shape", "cpu.large", "--node-group", "group-1"),
    *("--sft.num-steps", "3", "--rl.num-steps", "3", "--rl.prompts-per-step", "2", "--rl.group-size", "4"),
    *("--evaluation.at-start=false", "--evaluation.at-end=false", "--data.size", "500", "--controller.start-s", "1200"),
)

pytestmark = pytest.mark.timeout(1800)


def command_of(capsys: pytest.CaptureFixture[str], shared: Path) -> list[str]:
    """Return the command of each worker."""
    assert main(["deploy", "lepton", str(RECIPE), *FLAGS, "--mount", f"/:{shared}:node-nfs:lustre"]) == 0
    command: list[str] = json.loads(capsys.readouterr().out)["container"]["command"]
    return command


def test_worker_runs_all_services_to_the_end_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = command_of(capsys, tmp_path / "shared")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LEPTON_JOB_NAME": "words",
        "LEPTON_JOB_WORKER_INDEX": "0",
        "INTERFACE": "lo",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    run = tmp_path / "shared/runs/quickstart/words"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    logs = {path.name for path in (run / "logs").glob("*.log")}
    assert logs >= {"controller.log", "policy-0.log", "rollout-0.log", "rollout-1.log", "reward-0.log"}


def test_shellcheck_finds_nothing_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = command_of(capsys, tmp_path)[-1]
    words = ["shellcheck", "--shell=bash", "-"]
    done = subprocess.run(words, input=script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout

"""Runs of an older Starling, resumed by this version: the format of the journal and of saved states is stable.

The archives beside this file were written at commit b971b08 by `starling run` of a tiny recipe with 3 supervised steps,
40 steps of reinforcement learning and ``controller.save_every = 6``. They hold the run's folder without logs, keys,
recordings, pictures and checkpoints.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from system_runs import attempt, checkpoints, metrics, num_steps, starling_command, trained

pytestmark = pytest.mark.system

ARCHIVES = Path(__file__).with_name("older_runs")
WRITTEN_IN = "/srv/starling"
LAST_STEP = 43
PROMPTS_PER_STEP = 4
NUM_SUPERVISED = 3


def unpack(name: str, folder: Path) -> list[dict[str, Any]]:
    """Unpack the run `name` into `folder`; return the lines of its metrics.jsonl."""
    folder.mkdir()
    with tarfile.open(ARCHIVES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    config = attempt(folder) / "config.toml"  # it has the model's absolute path
    config.write_text(config.read_text().replace(f"{WRITTEN_IN}/{name}", str(folder)))
    return [json.loads(line) for line in (attempt(folder) / "metrics.jsonl").read_text().splitlines()]


def resume(name: str, folder: Path, *, version: int, state: int) -> None:
    """Resume a run with `version` steps from the state of version `state`, and assert that it completes."""
    before = unpack(name, folder)
    assert [line["step"] for line in before if line["kind"] == "step"] == list(range(1, version + 1))
    with starling_command(folder, "run", "--resume", "runs/tiny", name="resume") as command:
        assert command.wait() == 0, command.transcript()
    assert f"state={attempt(folder) / 'states' / f'version-{state}'} version={state}" in command.output, (
        command.transcript()
    )
    lines = [json.loads(line) for line in (attempt(folder) / "metrics.jsonl").read_text().splitlines()]
    assert lines[: len(before)] == before, "metrics lines from before the resume have changed"
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, LAST_STEP + 1))
    assert [line["step"] for line in metrics(folder, "trained")] == list(range(NUM_SUPERVISED + 1, LAST_STEP + 1))
    assert num_steps(folder) == LAST_STEP
    assert len(trained(folder)) == (LAST_STEP - NUM_SUPERVISED) * PROMPTS_PER_STEP
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder) == [f"step-{LAST_STEP}"]
    assert len(metrics(folder, "evaluation")) == 1


@pytest.mark.parametrize(
    ("name", "version", "state"), [("killed", 9, 6), pytest.param("stopped", 12, 12, marks=pytest.mark.campaign)]
)
def test_run_of_older_version_resumes(name: str, version: int, state: int, tmp_path: Path) -> None:
    """The machine of one was lost, so its steps 7 to 9 are replayed; the other was stopped with Ctrl-C."""
    resume(name, tmp_path / name, version=version, state=state)

"""A run that starts from a saved state of another run: its weights, its step numbers and its position in the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from system_runs import attempt, make_workdir, run, sentence, starling_command

pytestmark = pytest.mark.system

SAVES = {"save_every": 1, "save_rest_s": 0.0}
SAVE_EACH_STEP = {"evaluation": {}, "controller": SAVES}


def prompts_of_steps(folder: Path, kind: str) -> dict[int, list[str]]:
    """Return the prompts of each step in the metrics of an attempt."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("prompts", []) for line in lines if line["kind"] == kind}


def test_run_starts_from_a_state_of_another_run(tmp_path: Path) -> None:
    with run(make_workdir(tmp_path / "one", **SAVE_EACH_STEP, rl={"num_steps": 5})) as command:
        assert command.wait() == 0, command.transcript()
    one = attempt(tmp_path / "one")
    # States are written asynchronously, so it depends on timing which versions have one.
    begun = max(
        int(path.name.removeprefix("version-")) for path in (one / "states").iterdir() if path.name < "version-8"
    )
    assert begun >= 5, "there must be a state of a reinforcement learning step"
    # Copy only the state, as to another machine.
    elsewhere = make_workdir(tmp_path / "other", **SAVE_EACH_STEP)
    shutil.copytree(one / "states" / f"version-{begun}", elsewhere / "state")
    with run(elsewhere, "--from", "state", "--rl.num-steps", "7") as command:
        assert command.wait() == 0, command.transcript()
    other = attempt(elsewhere)
    assert list(prompts_of_steps(other, "step")) == list(range(begun + 1, 11)), (
        "three supervised steps and seven of reinforcement"
    )
    before, after = prompts_of_steps(one, "trained"), prompts_of_steps(other, "trained")
    assert after[begun + 1] == before[begun + 1], "the same prompts in the same step"
    trained_before = [prompt for step in range(4, begun + 1) for prompt in before[step]]
    assert not set(trained_before) & {prompt for prompts in after.values() for prompt in prompts}
    with starling_command(
        elsewhere, "export", str(other), "out", "--model", str(other / "model"), name="export"
    ) as command:
        assert command.wait() == 0, command.transcript()
    assert (elsewhere / "out" / "model.safetensors").exists()

    for flags, words in (
        (("--from", "nowhere"), "there is no intact state in nowhere"),
        (("--from", "state", "--rl.num-steps", "2"), f"it has version {begun}, and the recipe ends with version 5"),
        (
            ("--from", "state", "--sft.num-steps", "1", "--rl.num-steps", "9"),
            "its run had 3 supervised steps before reinforcement",
        ),
    ):
        with run(elsewhere, *flags) as command:
            assert command.wait() == 2, command.transcript()
        assert words in sentence(command)

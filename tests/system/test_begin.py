"""A new run goes on where a saved state of another one ends: in its weights, its steps, and its data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from system_runs import attempt, run, sentence, started, workplace

pytestmark = pytest.mark.system

SAVES = {"save_every": 1, "save_rest_s": 0.0}
QUIET = {"evaluation": {}, "controller": SAVES}


def lines(folder: Path, kind: str) -> dict[int, list[str]]:
    """Return what metrics.jsonl of an attempt says of each step."""
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("prompts", []) for line in told if line["kind"] == kind}


def test_run_starts_from_a_state_of_another_run(tmp_path: Path) -> None:
    with run(workplace(tmp_path / "one", **QUIET, rl={"num_steps": 5})) as command:
        assert command.wait() == 0, command.story()
    one = attempt(tmp_path / "one")
    # States are written beside the steps, so it is by chance of which versions there are any.
    begun = max(
        int(path.name.removeprefix("version-")) for path in (one / "states").iterdir() if path.name < "version-8"
    )
    assert begun >= 5, "there must be a state of reinforcement"
    # Another machine has the state, and nothing else of that run.
    elsewhere = workplace(tmp_path / "other", **QUIET)
    shutil.copytree(one / "states" / f"version-{begun}", elsewhere / "state")
    with run(elsewhere, "--from", "state", "--rl.num-steps", "7") as command:
        assert command.wait() == 0, command.story()
    other = attempt(elsewhere)
    assert list(lines(other, "step")) == list(range(begun + 1, 11)), "three supervised steps and seven of reinforcement"
    before, after = lines(one, "trained"), lines(other, "trained")
    assert after[begun + 1] == before[begun + 1], "the same prompts in the same step"
    seen = [prompt for step in range(4, begun + 1) for prompt in before[step]]
    assert not set(seen) & {prompt for prompts in after.values() for prompt in prompts}
    with started(elsewhere, "export", str(other), "out", "--model", str(other / "model"), name="export") as command:
        assert command.wait() == 0, command.story()
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
            assert command.wait() == 2, command.story()
        assert words in sentence(command)

"""The reward process: its reported waits, its end while a scorer hangs, and completions that it gives up on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fake_hub import FakeHub
from replica_processes import exit_code, replica

from starling.common.wire import messages as wire

SLOW = """
import time

def reward(completion, reference, prompt_text, metadata):
    while completion == "hang":
        time.sleep(3600.0)
    return 1.0
"""
RECIPE = """
[[reward.scorers]]
name = "{path}:reward"
label = "slow"
timeout_s = 90.0
"""


def test_reward_service_reports_hanging_scorer_and_still_ends(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(path=tmp_path / "slow.py"))
    with replica(hub, "reward-0", tmp_path, "--config", str(tmp_path / "recipe.toml")) as reward:
        hub.hello("reward-0")
        texts = ("good", "hang")
        completions = tuple(wire.CompletionText(text=text, status=wire.Status.OK, num_tokens=4) for text in texts)
        lease = hub.lease("score")
        hub.send("reward-0", wire.ScoreGroup(lease=lease, prompt=wire.Prompt(id="p"), completions=completions))
        status = hub.heartbeat("reward-0", lambda status: any("completion 1" in wait.what for wait in status.waits))
        (wait,) = (wait for wait in status.waits if "completion 1" in wait.what)
        assert wait.what == f"scorer slow on completion 1 of {lease}"
        assert wait.on.startswith("worker ")
        assert 0.0 < wait.seconds_left <= 90.0
        reward.terminate()
        assert exit_code(reward) == 0


FRAGILE = """
import os
import time

def reward(completion, reference, prompt_text, metadata):
    if completion == "exit":
        os._exit(3)
    return float(len(completion))
"""


def test_completion_that_the_service_gave_up_on_is_kept_and_scored_again(hub: FakeHub, tmp_path: Path) -> None:
    scorer, recipe = tmp_path / "fragile.py", tmp_path / "recipe.toml"
    scorer.write_text(FRAGILE)
    recipe.write_text(f'[[reward.scorers]]\nname = "{scorer}:reward"\nlabel = "fragile/one"\nretries = 2\n')
    with replica(hub, "reward-0", tmp_path, "--config", str(recipe)) as reward:
        hub.hello("reward-0")
        completions = tuple(
            wire.CompletionText(text=text, status=wire.Status.OK, num_tokens=4) for text in ("good", "exit")
        )
        prompt = wire.Prompt(id="p", text="question", reference="answer", metadata={"task": "sums"})
        lease = hub.lease("score")
        hub.send("reward-0", wire.ScoreGroup(lease=lease, prompt=prompt, completions=completions))
        scored, _ = hub.answer("reward-0", lease, wire.GroupScored)
        assert scored.statuses == (wire.Status.OK, wire.Status.REWARD_ERROR)
        reward.terminate()
        assert exit_code(reward) == 0
    (file,) = (tmp_path / "quarantine").iterdir()
    assert file.name == "reward-0-000001-fragile_one.json"
    kept = json.loads(file.read_text())
    assert (kept["scorer"], kept["prompt"], kept["reference"]) == ("fragile/one", "question", "answer")
    assert (kept["metadata"], [one["text"] for one in kept["completions"]]) == ({"task": "sums"}, ["exit"])
    assert kept["problem"] == "scorer 'fragile/one' ended its worker process (exit status 3)."

    again = replayed(file, recipe)
    assert (again.returncode, again.stdout) == (1, f"{file}: {kept['problem']}\n"), again.stderr
    assert again.stderr.endswith("starling reward: 1 of 1 completion failed again\n")
    scorer.write_text(FRAGILE.replace("os._exit(3)", "pass"))
    assert replayed(file, recipe).stdout == f"{file}: 4.0\n"

    recipe.write_text(recipe.read_text().replace("fragile/one", "other"))
    refused = replayed(file, recipe)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "is of scorer 'fragile/one', and the recipe has other" in refused.stderr
    file.write_text("[]")
    assert "is no file of a quarantine" in replayed(file, recipe).stderr
    missing = replayed(tmp_path / "none.json", recipe).stderr
    assert missing.endswith(
        "none.json cannot be read (No such file or directory); give a file of <run folder>/quarantine\n"
    )


def replayed(file: Path, recipe: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starling.reward.shell.main", "replay", str(file), "--config", str(recipe)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


COMPARING = """
import os

class Rank:
    scope = "groupwise"

    def score(self, batch):
        if "exit" in batch.completions:
            os._exit(3)
        return {"score": [float(len(batch))] * len(batch)}
"""


def test_group_that_a_comparing_scorer_lost_is_kept_and_scored_again_as_one(hub: FakeHub, tmp_path: Path) -> None:
    scorer, recipe = tmp_path / "comparing.py", tmp_path / "recipe.toml"
    scorer.write_text(COMPARING)
    recipe.write_text(f'[[reward.scorers]]\nname = "{scorer}:Rank"\nlabel = "rank"\nretries = 0\n')
    with replica(hub, "reward-0", tmp_path, "--config", str(recipe)) as reward:
        hub.hello("reward-0")
        texts = ("good", "exit", "better")
        completions = tuple(wire.CompletionText(text=text, status=wire.Status.OK, num_tokens=4) for text in texts)
        lease = hub.lease("score")
        hub.send("reward-0", wire.ScoreGroup(lease=lease, prompt=wire.Prompt(id="p"), completions=completions))
        scored, _ = hub.answer("reward-0", lease, wire.GroupScored)
        assert set(scored.statuses) == {wire.Status.REWARD_ERROR}
        reward.terminate()
        assert exit_code(reward) == 0
    (file,) = (tmp_path / "quarantine").iterdir()
    assert [one["text"] for one in json.loads(file.read_text())["completions"]] == list(texts)
    failed = replayed(file, recipe)
    assert (failed.returncode, failed.stdout.count("exit status 3")) == (1, 3), failed.stderr
    assert failed.stderr.endswith("starling reward: 3 of 3 completions failed again\n")
    scorer.write_text(COMPARING.replace("os._exit(3)", "pass"))
    assert replayed(file, recipe).stdout.splitlines() == [f"{file} {number}: 3.0" for number in range(3)]

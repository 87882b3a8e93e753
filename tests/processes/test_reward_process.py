"""The reward process: its reported waits, and its end while a scorer hangs."""

from __future__ import annotations

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

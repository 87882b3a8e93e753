"""Ctrl-C at any moment: in order with a checkpoint once there is something to save, else one sentence."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
from system_runs import Command, attempt, checkpoints, metrics, num_steps, run, sentence, together, watching, workplace

pytestmark = pytest.mark.system

ENDLESS = 100_000
SLOW = """
import time

def reward(completion, reference, prompt_text, metadata, *, seconds):
    time.sleep(seconds)
    return len(set(completion))
"""
HELD = """
import os
import time

def reward(completion, reference, prompt_text, metadata):
    while not os.path.exists("policy is held"):
        time.sleep(0.05)
    return len(set(completion))
"""


def stops_in_order(command: Command, folder: Path) -> None:
    """Interrupt, and see that the last weights are saved."""
    command.interrupt()
    assert command.wait() == 0, command.story()
    assert command.errors == ""
    made = num_steps(folder)
    assert made > 0
    assert checkpoints(folder) == [f"step-{made}"], "the checkpoint is not of the last step"


def stops_empty(command: Command, folder: Path) -> None:
    """Interrupt, and see that it says that there is nothing to save."""
    command.interrupt()
    assert command.wait() == 130, command.story()
    assert "stopped before" in sentence(command)
    assert "there is nothing to save" in sentence(command)
    assert checkpoints(folder) == []


def before_the_controller_listens(folder: Path) -> None:
    with run(workplace(folder)) as command:
        command.until((attempt(folder) / "config.toml").exists, "the configuration")
        stops_empty(command, folder)


def during_imports(folder: Path) -> None:
    with run(workplace(folder)) as command:
        command.until((attempt(folder) / "logs" / "rollout-0.log").exists, "the start of a rollout")
        stops_empty(command, folder)


def during_supervised_steps(folder: Path) -> None:
    with run(workplace(folder, run={"kind": "sft"}, evaluation={}, sft={"num_steps": ENDLESS})) as command:
        command.until(lambda: num_steps(folder) >= 3, "three steps")
        stops_in_order(command, folder)


def during_reinforcement(folder: Path) -> None:
    with run(workplace(folder, rl={"num_steps": ENDLESS})) as command:
        command.until(lambda: len(metrics(folder, "trained")) >= 2, "two steps of reinforcement")
        stops_in_order(command, folder)


def during_the_last_evaluation(folder: Path) -> None:
    # 32 prompts x 64 completions x 20 ms on two workers: 20 s, which nobody waits for.
    slow = {"scorers": [{"name": "slow.py:reward", "options": {"seconds": 0.02}}]}
    changes = {"data": {"held_out": 32}, "evaluation": {"at_end": True, "num_completions": 64}}
    workplace(folder, rl={"num_steps": 1, "prompts_per_step": 2}, reward=slow, **changes)
    (folder / "slow.py").write_text(SLOW)
    with run(folder) as command:
        command.until(lambda: num_steps(folder) == 4, "the last step")
        stops_in_order(command, folder)
    assert metrics(folder, "evaluation") == []


def during_the_drain(folder: Path) -> None:
    held = {"scorers": [{"name": "held.py:reward", "timeout_s": 60.0}]}
    changes = {"controller": {"drain_s": 4.0}, "network": {"lease_s": 60.0}, "sft": {"num_steps": 0}}
    workplace(folder, rl={"num_steps": 2}, evaluation={}, reward=held, **changes)
    (folder / "held.py").write_text(HELD)
    with run(folder) as command:
        command.until_said("replica=policy-0", "replica=reward-0")
        policy, reward = command.titled("policy-0"), command.titled("reward-0")
        command.until(lambda: metrics(folder, "adopted"), "the first adoption")
        # With the policy held, everything that both steps need is scored; then the reward service is held, which has
        # no work any more. The run ends, and the drain waits for it.
        policy.suspend()
        (folder / "policy is held").touch()
        with watching(folder) as groups:
            command.until(lambda: (now := groups()) and now["scored"] + now["frozen"] == 8, "the groups of both steps")
        reward.suspend()
        policy.resume()
        command.until(lambda: metrics(folder, "checkpoint"), "the checkpoint")
        stops_in_order(command, folder)
    assert [line["replica"] for line in metrics(folder, "left") if "did not leave" in line["reason"]] == ["reward-0"]


def twice(folder: Path) -> None:
    """The first waits for a long step; the second does not."""
    slow_step = {"num_steps": 5, "examples_per_step": 200_000}
    with run(workplace(folder, run={"kind": "sft"}, evaluation={}, sft=slow_step)) as command:
        command.until_said("replica=policy-0")
        command.interrupt()
        command.until_said("stopping in order")
        command.interrupt()
        assert command.wait() == 130, command.story()
    assert sentence(command) == "killed by a second Ctrl-C; nothing was saved"


def at_a_random_moment(folder: Path) -> None:
    """Whenever it comes: saved, or nothing to save; nothing else."""
    with run(workplace(folder, rl={"num_steps": ENDLESS})) as command:
        moment_s = random.uniform(0.2, 8.0)
        print(f"Ctrl-C after {moment_s:.3f} s")  # shown when the test fails, to try that moment again
        time.sleep(moment_s)
        command.interrupt()
        code = command.wait()
    if code == 0:
        assert checkpoints(folder) == [f"step-{num_steps(folder)}"]
    else:
        assert code == 130, command.story()
        assert "nothing to save" in sentence(command) or "before anything was started" in sentence(command)
        assert num_steps(folder) == 0


def test_ctrl_c_saves_or_says_that_there_is_nothing_to_save(tmp_path: Path) -> None:
    moments = [during_reinforcement, during_imports, twice]
    together(*(partial(moment, tmp_path / moment.__name__) for moment in moments))


@pytest.mark.campaign
def test_ctrl_c_stops_in_order_at_any_moment(tmp_path: Path) -> None:
    moments = [
        during_the_last_evaluation,
        during_the_drain,
        during_supervised_steps,
        before_the_controller_listens,
        at_a_random_moment,
    ]
    together(*(partial(moment, tmp_path / moment.__name__) for moment in moments))

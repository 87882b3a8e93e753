"""Ctrl-C at any moment: an orderly stop with a checkpoint once there are weights to save, else one sentence."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from system_runs import (
    Command,
    attempt,
    checkpoints,
    group_counts,
    make_workdir,
    metrics,
    num_steps,
    run,
    run_concurrently,
    sentence,
    starling_command,
)

pytestmark = pytest.mark.system

ENDLESS = 100_000
SLOW = """
import time

def reward(completion, reference, prompt_text, metadata, *, seconds):
    time.sleep(seconds)
    return len(set(completion))
"""
WAITS_FOR_FILE = """
import os
import time

def reward(completion, reference, prompt_text, metadata):
    while not os.path.exists("policy is suspended"):
        time.sleep(0.05)
    return len(set(completion))
"""


def assert_stops_with_checkpoint(command: Command, folder: Path, *, complete: bool = False) -> None:
    """Interrupt the run, and assert that the last weights are saved, and how the run is resumed, if it can be."""
    command.interrupt()
    assert command.wait() == 0, command.transcript()
    assert command.errors == ""
    num_made = num_steps(folder)
    assert num_made > 0
    assert checkpoints(folder) == [f"step-{num_made}"], "the checkpoint is not of the last step"
    resumes = f"stopped at step {num_made} of [0-9]+; `starling run --resume runs/tiny/attempt-1` resumes it"
    assert bool(re.search(resumes, command.output)) != complete


def assert_stops_without_checkpoint(command: Command, folder: Path) -> None:
    """Interrupt the run, and assert that it reports that there is nothing to save."""
    command.interrupt()
    assert command.wait() == 130, command.transcript()
    assert "stopped before" in sentence(command)
    assert "there is nothing to save" in sentence(command)
    assert checkpoints(folder) == []


def before_the_controller_listens(folder: Path) -> None:
    with run(make_workdir(folder), fresh=True) as command:
        command.wait_until((attempt(folder) / "config.toml").exists, "the configuration")
        assert_stops_without_checkpoint(command, folder)


def during_imports(folder: Path) -> None:
    # No step can be made before the scorer is imported, however long the interrupt takes on a busy machine.
    reward = {"scorers": [{"name": "endless_import.py:reward"}], "start_timeout_s": 600.0}
    make_workdir(folder, sft={"num_steps": 0}, reward=reward)
    (folder / "endless_import.py").write_text("import time\n\ntime.sleep(3600.0)\n")
    with run(folder, fresh=True) as command:
        command.wait_until((attempt(folder) / "logs" / "rollout-0.log").exists, "the start of a rollout")
        assert_stops_without_checkpoint(command, folder)


def during_supervised_steps(folder: Path) -> None:
    workdir = make_workdir(folder, run={"kind": "sft"}, evaluation={}, sft={"num_steps": ENDLESS})
    with run(workdir, fresh=True) as command:
        command.wait_until(lambda: num_steps(folder) >= 3, "three steps")
        assert_stops_with_checkpoint(command, folder)


def during_reinforcement(folder: Path) -> None:
    with run(make_workdir(folder, rl={"num_steps": ENDLESS}), fresh=True) as command:
        command.wait_until(lambda: len(metrics(folder, "trained")) >= 2, "two steps of reinforcement")
        assert_stops_with_checkpoint(command, folder)


def during_the_last_evaluation(folder: Path) -> None:
    # 32 prompts x 64 completions x 20 ms on two workers: 20 s, for which the stop does not wait.
    slow = {"scorers": [{"name": "slow.py:reward", "options": {"seconds": 0.02}}]}
    changes = {"data": {"held_out": 32}, "evaluation": {"at_end": True, "num_completions": 64}}
    make_workdir(folder, rl={"num_steps": 1, "prompts_per_step": 2}, reward=slow, **changes)
    (folder / "slow.py").write_text(SLOW)
    with run(folder, fresh=True) as command:
        command.wait_until(lambda: num_steps(folder) == 4, "the last step")
        assert_stops_with_checkpoint(command, folder)
    assert metrics(folder, "evaluation") == []


def during_the_drain(folder: Path) -> None:
    # Without a sandbox, because the scorer looks for a file that appears in its folder.
    waits_for_file = {"scorers": [{"name": "waits_for_file.py:reward", "timeout_s": 60.0}], "sandbox": "process"}
    changes = {"controller": {"drain_s": 4.0}, "network": {"lease_s": 60.0}, "sft": {"num_steps": 0}}
    make_workdir(folder, rl={"num_steps": 2}, evaluation={}, reward=waits_for_file, **changes)
    (folder / "waits_for_file.py").write_text(WAITS_FOR_FILE)
    with run(folder, fresh=True) as command:
        command.wait_for_output("replica=policy-0", "replica=reward-0")
        policy, reward = command.process_titled("policy-0"), command.process_titled("reward-0")
        command.wait_until(lambda: metrics(folder, "adopted"), "the first adoption")
        # While the policy is suspended, the groups of both steps are scored; then the reward service, which has no work
        # left, is suspended. The run ends, and the drain waits for the reward service.
        policy.suspend()
        (folder / "policy is suspended").touch()
        with group_counts(folder) as groups:
            command.wait_until(
                lambda: (now := groups()) and now["scored"] + now["frozen"] == 8, "the groups of both steps"
            )
        reward.suspend()
        policy.resume()
        command.wait_until(lambda: metrics(folder, "checkpoint"), "the checkpoint")
        assert_stops_with_checkpoint(command, folder, complete=True)
    assert [line["replica"] for line in metrics(folder, "left") if "did not leave" in line["reason"]] == ["reward-0"]


def terminal_ctrl_c_during_imports(folder: Path) -> None:
    """The terminal's Ctrl-C reaches the process that imports for the others, too."""
    with run(make_workdir(folder), fresh=True) as command:
        command.wait_until(attempt(folder).joinpath("controller.json").exists, "the controller")
        command.signal_terminal(signal.SIGINT)
        assert command.wait() == 130, command.transcript()
        assert "there is nothing to save" in sentence(command)
        assert checkpoints(folder) == []


def terminal_closes(folder: Path) -> None:
    """The kernel, and then the shell, send SIGHUP: one ordered stop."""
    with run(make_workdir(folder, rl={"num_steps": ENDLESS}), fresh=True) as command:
        command.wait_until(lambda: num_steps(folder) > 0, "a step")
        for _ in range(2):
            command.signal_terminal(signal.SIGHUP)
        assert command.wait() == 0, command.transcript()
        assert command.errors == ""
        assert checkpoints(folder) == [f"step-{num_steps(folder)}"]


def second_ctrl_c(folder: Path) -> None:
    """The first Ctrl-C waits for a long step; the second does not."""
    slow_step = {"num_steps": 5, "examples_per_step": 150_000}
    with run(make_workdir(folder, run={"kind": "sft"}, evaluation={}, sft=slow_step)) as command:
        command.wait_for_output("replica=policy-0")
        command.interrupt()
        command.wait_for_output("stopping gracefully")
        command.interrupt()
        assert command.wait() == 130, command.transcript()
    assert sentence(command) == (
        "killed by a second Ctrl-C; nothing was saved, and `starling run --resume runs/tiny/attempt-1` resumes it"
    )


def at_a_random_moment(folder: Path, seed: int) -> None:
    """Either a checkpoint of the last step or nothing to save, whenever the terminal sends Ctrl-C."""
    moment_s = random.Random(seed).uniform(0.2, 8.0)
    with run(make_workdir(folder, rl={"num_steps": ENDLESS}), fresh=True) as command:
        print(f"Ctrl-C after {moment_s:.3f} s, seed {seed}")  # shown when the test fails
        time.sleep(moment_s)
        command.signal_terminal(signal.SIGINT)
        code = command.wait()
    if code == 0:
        assert checkpoints(folder) == [f"step-{num_steps(folder)}"]
    else:
        assert code == 130, command.transcript()
        assert "nothing to save" in sentence(command) or "before anything was started" in sentence(command)
        assert num_steps(folder) == 0


def test_ctrl_c_saves_or_says_that_there_is_nothing_to_save(tmp_path: Path) -> None:
    moments = [during_reinforcement, during_imports, second_ctrl_c, terminal_ctrl_c_during_imports, terminal_closes]
    run_concurrently(*(partial(moment, tmp_path / moment.__name__) for moment in moments))


@pytest.mark.campaign
def test_ctrl_c_stops_in_order_at_any_moment(tmp_path: Path) -> None:
    moments = [
        during_the_last_evaluation,
        during_the_drain,
        during_supervised_steps,
        before_the_controller_listens,
    ]
    run_concurrently(*(partial(moment, tmp_path / moment.__name__) for moment in moments))


@pytest.mark.campaign
def test_ctrl_c_of_a_terminal_stops_in_order_at_seeded_moments(tmp_path: Path) -> None:
    seeds = range(8)
    run_concurrently(*(partial(at_a_random_moment, tmp_path / str(seed), seed) for seed in seeds))


SLOW_SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift 2
"$@"
code=$?
{then}
"""
"""The command on this machine, whose exit arrives late, or not at all."""


@pytest.mark.parametrize("arrives", [True, False])
def test_exits_of_replicas_on_other_hosts_may_arrive_late(arrives: bool, tmp_path: Path) -> None:
    host = {"host": "127.0.0.1", "python": sys.executable, "shared": True}
    folder = make_workdir(tmp_path / "work", launch={"launcher": "ssh", "hosts": [host]}, rl={"num_steps": 1})
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SLOW_SSH.format(then="sleep 10; exit $code" if arrives else "exec sleep 600"))
    ssh.chmod(0o755)
    path = {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    with starling_command(folder, "run", "tiny.toml", name="run", environment=path) as command:
        if not arrives:
            command.wait_for_output("the run is over; waiting at most")
            command.interrupt()
        assert command.wait() == 0, command.transcript()
        assert "did not exit after the run" not in command.output
    assert checkpoints(folder) == ["step-4"]

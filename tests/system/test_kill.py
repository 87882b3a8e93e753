"""Processes that die or stand still: the run goes on where it can, and else ends with the name of the culprit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from system_runs import (
    Command,
    attempt,
    checkpoints,
    metrics,
    num_steps,
    run,
    sentence,
    together,
    trained,
    workplace,
)

pytestmark = pytest.mark.system

ENDLESS = 100_000
ONE_ROW_OF_STEPS = {"run": {"kind": "sft"}, "evaluation": {}, "sft": {"num_steps": ENDLESS}}


GIVEN_UP_AT_ONCE = {"launch": {"num_rollouts": 1, "max_restarts": 0}}


def fails_naming(command: Command, name: str, line: str, restarts: str = "") -> None:
    """See that the run fails, says who was killed, and shows what that one said last."""
    assert command.wait() == 1, command.story()
    assert sentence(command) == f"{name} was killed by SIGKILL{restarts}; its last lines:"
    shown = [text for text in command.errors.splitlines() if text.startswith("  | ")]
    assert any(line in text for text in shown), command.story()
    assert command.errors.splitlines()[-1].endswith(f"logs/{name}.log")


def the_policy(folder: Path) -> None:
    with run(workplace(folder, **ONE_ROW_OF_STEPS, **GIVEN_UP_AT_ONCE)) as command:
        command.until(lambda: num_steps(folder) >= 2, "two steps")
        command.titled("policy-0").kill()
        fails_naming(command, "policy-0", "ready")


def the_reward(folder: Path) -> None:
    with run(workplace(folder, **GIVEN_UP_AT_ONCE)) as command:
        command.until_said("replica=reward-0")
        command.titled("reward-0").kill()
        fails_naming(command, "reward-0", "ready")


def the_controller(folder: Path) -> None:
    with run(workplace(folder, **GIVEN_UP_AT_ONCE)) as command:
        command.until_said("replica=reward-0")
        command.titled("controller").kill()
        fails_naming(command, "controller", "joined")


def the_only_rollout_again_and_again(folder: Path) -> None:
    with run(workplace(folder, launch={"max_restarts": 2}, rl={"num_steps": ENDLESS})) as command:
        for restarts in range(3):
            joined = f"{restarts + 1} times of rollout-0 joining"
            command.until(lambda n=restarts: len(of(folder, "joined", "rollout-0")) > n, joined)
            command.titled("rollout-0").kill()
        fails_naming(command, "rollout-0", "ready", " after 2 restarts")


def the_supervisor(folder: Path) -> None:
    """Nobody is left to clean up, and yet nothing stays."""
    with run(workplace(folder, rl={"num_steps": ENDLESS})) as command:
        command.until(lambda: trained(folder), "a step of reinforcement")
        assert len(command.family()) >= 7, "supervisor, four services, two scoring workers"
        command.process.kill()
        assert command.wait() == -9


def one_of_two_rollouts(folder: Path) -> None:
    launch = {"num_rollouts": 2, "max_restarts": 0}
    with run(workplace(folder, launch=launch, rl={"num_steps": 15})) as command:
        command.until(lambda: len(trained(folder)) >= 8, "two steps of reinforcement")
        command.titled("rollout-1").kill()
        assert command.wait() == 0, command.story()
    assert "rollout-1 was killed by SIGKILL; the others take over its work" in command.output
    assert "rollout-1" in [line["replica"] for line in metrics(folder, "left")]
    is_whole(folder, num_steps=15)


def each_role_in_turn(folder: Path) -> None:
    """All are started again, the controller too, and what comes of it is a run like any other."""
    with run(workplace(folder, rl={"num_steps": 150})) as command:
        command.until(lambda: trained(folder), "a step of reinforcement")
        for name in ("policy-0", "controller", "rollout-0", "reward-0"):
            made, process = num_steps(folder), command.titled(name)
            process.kill()
            command.until_said(f"{name} was killed by SIGKILL; restarting it in 0.5 s (1 of 3 times)")
            command.until(lambda made=made: num_steps(folder) >= made + 5, f"five steps after the death of {name}")
            assert command.titled(name).pid != process.pid
        assert command.wait() == 0, command.story()
    assert len(metrics(folder, "evaluation")) == 1
    is_whole(folder, num_steps=150)


def is_whole(folder: Path, num_steps: int) -> None:
    """See that a run of the tiny recipe trained every prompt once, and left its checkpoint and its picture."""
    assert len(trained(folder)) == num_steps * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder) == [f"step-{num_steps + 3}"]
    assert (attempt(folder) / "reward.png").stat().st_size > 1000


def a_rollout_that_stands_still(folder: Path) -> None:
    """Longer than its lease: what it had is given to the other. It then comes back and works again."""
    network = {"lease_s": 2.0, "heartbeat_s": 0.2}
    with run(workplace(folder, launch={"num_rollouts": 2}, rl={"num_steps": ENDLESS}, network=network)) as command:
        command.until(lambda: len(trained(folder)) >= 8, "two steps of reinforcement")
        rollout = command.titled("rollout-1")
        left, joined = (len(of(folder, kind, "rollout-1")) for kind in ("left", "joined"))
        rollout.suspend()
        command.until(lambda: len(of(folder, "left", "rollout-1")) > left, "the end of its lease")
        rollout.resume()
        command.until(lambda: len(of(folder, "joined", "rollout-1")) > joined, "its return")
        version = num_steps(folder)
        command.until(
            lambda: any(line["version"] > version for line in of(folder, "adopted", "rollout-1")), "its next adoption"
        )
        command.interrupt()
        assert command.wait() == 0, command.story()
    assert "silent" in of(folder, "left", "rollout-1")[0]["reason"]
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert len(trained(folder)) == 4 * (num_steps(folder) - 3)
    assert all(line["attested"] for line in metrics(folder, "adopted"))
    assert checkpoints(folder) == [f"step-{num_steps(folder)}"]


def of(folder: Path, kind: str, replica: str) -> list[dict[str, object]]:
    """Return the lines of a kind about one replica."""
    return [line for line in metrics(folder, kind) if line["replica"] == replica]


def test_run_continues_without_one_rollout(tmp_path: Path) -> None:
    scenarios = [a_rollout_that_stands_still, one_of_two_rollouts]
    together(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios), at_once=2)


def test_killed_services_are_restarted(tmp_path: Path) -> None:
    each_role_in_turn(tmp_path)


def test_run_fails_when_restarts_are_exhausted(tmp_path: Path) -> None:
    scenarios = [the_supervisor, the_only_rollout_again_and_again, the_policy, the_reward, the_controller]
    together(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))

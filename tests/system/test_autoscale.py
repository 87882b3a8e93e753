"""Runs in which the number of rollouts follows the work (`[controller.autoscale]`), with the launcher `local`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from system_runs import Command, make_workdir, metrics, run, trained
from test_scale import answer, wait_for_rollouts, wait_for_steps

from starling.controller.core.replicas.scaling.autoscale import LEAST_STEPS

pytestmark = pytest.mark.system

ENDLESS = 100_000
FEWEST, MOST = 1, 3
RULE = {"min": FEWEST, "max": MOST, "window_s": 2.0, "cooldown_s": 2.0}


def folder_of(folder: Path, num_rollouts: int, num_passes: int) -> Path:
    """Create a working directory for an endless run whose policy makes `num_passes` over the groups of each step."""
    return make_workdir(
        folder,
        launch={"num_rollouts": num_rollouts},
        rollout={"num_slots": 1},
        controller={"autoscale": RULE, "save_every": 0},
        policy={"algorithm": {"num_passes": num_passes, "skip_zero_advantage": False}},
        evaluation={},
        sft={},
        rl={"num_steps": ENDLESS},
    )


def test_starving_policy_gets_rollouts(tmp_path: Path) -> None:
    """Rollouts with one slot each generate a group for much longer than the policy trains: it gets as many as `max`."""
    folder = folder_of(tmp_path, FEWEST, num_passes=1)
    with run(folder) as command:
        command.wait_for_output("rollout-1 is placed: 2 of its role are desired")
        wait_for_generators(command, folder, {"rollout-0", "rollout-1", "rollout-2"})
        wait_for_steps(command, folder, 2 * LEAST_STEPS)
        end(command)
    check_rule(folder, FEWEST)
    assert max(wanted(folder, FEWEST)) == MOST


def test_idle_rollouts_are_drained(tmp_path: Path) -> None:
    """The policy trains for much longer than rollouts generate: they are ended one by one, as far as `min`."""
    folder = folder_of(tmp_path, MOST, num_passes=200)
    with run(folder) as command:
        command.wait_for_output("rollout-2 was drained", "rollout-1 was drained")
        wait_for_rollouts(command, folder, 0)
        wait_for_steps(command, folder, 2 * LEAST_STEPS)
        assert answer(folder, "status")["desired"] == {"rollout": FEWEST}
        end(command)
    check_rule(folder, MOST)
    assert wanted(folder, MOST) == [3, 2, 1], "it went back and forth"


def end(command: Command) -> None:
    command.interrupt()
    assert command.wait() == 0, command.transcript()


def changes(folder: Path) -> list[dict[str, Any]]:
    """Return the changes of the number of rollouts so far."""
    return metrics(folder, "scaled")


def wanted(folder: Path, first: int) -> list[int]:
    """Return the desired numbers of rollouts, from the `first` one on."""
    return [first, *(line["num"] for line in changes(folder))]


def wait_for_generators(command: Command, folder: Path, names: set[str]) -> None:
    """Wait until just these rollouts generate groups at the same time."""

    def generating() -> set[str]:
        members = answer(folder, "status")["members"]
        return {member["name"] for member in members if member["work"].get("generate")}

    command.wait_until(lambda: generating() == names, f"groups that {sorted(names)} generate")


def check_rule(folder: Path, first: int) -> None:
    """All changes are within the bounds, at most twice as many or one less; and every prompt was trained once."""
    assert {(line["role"], line["cause"]) for line in changes(folder)} == {("rollout", "autoscale")}
    for before, after in pairwise(wanted(folder, first)):
        assert FEWEST <= after <= MOST
        assert before < after <= 2 * before or after == before - 1, wanted(folder, first)
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"

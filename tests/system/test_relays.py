"""Rollouts that pass weights on to each other: none is believed, and one that forges them is evicted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import forging_engine
import pytest
from system_runs import Command, attempt, make_workdir, metrics, num_steps, run, trained

pytestmark = pytest.mark.system

MAX_KILLS = 10


def lines_about(folder: Path, kind: str, replica: str) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, kind) if line["replica"] == replica]


def has_adopted(folder: Path, replica: str, join: int) -> bool:
    """Return whether a replica has adopted a version after it joined for the `join`-th time."""
    joins, adoptions = (lines_about(folder, kind, replica) for kind in ("joined", "adopted"))
    return len(joins) >= join and bool(adoptions) and adoptions[-1]["time"] > joins[join - 1]["time"]


def restart(command: Command, folder: Path, replica: str) -> None:
    """Kill a replica, and wait until it has joined again and adopted a version."""
    joined = len(lines_about(folder, "joined", replica))
    command.process_titled(replica).kill()
    command.wait_until(lambda: has_adopted(folder, replica, joined + 1), f"an adoption of {replica} after its start")


def test_rollout_that_forges_weights_is_evicted_and_the_run_continues(tmp_path: Path) -> None:
    folder = make_workdir(
        tmp_path,
        launch={"num_rollouts": 2, "max_restarts": 100},
        rollout={"engine": "forging_engine.py:forging_engine", "transport": "tcp"},
        policy={"transport": "tcp"},
        rl={"num_steps": 100_000, "prompts_per_step": 16, "group_size": 16},
    )
    shutil.copy(str(forging_engine.__file__), folder)
    with run(folder) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        num_stopped = 0
        for _ in range(MAX_KILLS):
            # It joins again, and pulls from the forger on its host, unless a new version is published meanwhile.
            restart(command, folder, "rollout-1")
            reasons = [line["reason"] for line in lines_about(folder, "offers_no_more", "rollout-0")]
            if any("pulled other weights" in reason for reason in reasons):
                break
            if len(reasons) > num_stopped:  # pulls from it were too slow or failed: it offers again after a start
                num_stopped = len(reasons)
                restart(command, folder, "rollout-0")
        else:
            pytest.fail(f"rollout-1 found out nothing in {MAX_KILLS} adoptions; rollout-0 offered no more: {reasons}")
        command.wait_until(lambda: lines_about(folder, "invalid", "rollout-0"), f"the eviction of the forger {reasons}")
        made, joined = num_steps(folder), len(lines_about(folder, "joined", "rollout-0"))
        command.wait_until(lambda: num_steps(folder) >= made + 3, "three more steps")
        command.wait_until(lambda: len(lines_about(folder, "joined", "rollout-0")) >= joined, "its return")
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    [invalid] = lines_about(folder, "invalid", "rollout-0")
    assert "rollout-1 pulled other weights from rollout-0 than were published" in str(invalid["reason"])
    assert [line["num"] for line in lines_about(folder, "invalid", "rollout-0")] == [1]
    assert not lines_about(folder, "invalid", "rollout-1")
    unproven = [line for line in metrics(folder, "adopted") if not line["attested"]]
    assert {line["replica"] for line in unproven} == {"rollout-1"}
    assert "Traceback" not in (attempt(folder) / "logs" / "rollout-1.log").read_text()

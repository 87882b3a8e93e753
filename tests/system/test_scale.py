"""Runs whose rollouts differ, and change in number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system_runs import Command, attempt, checkpoints, make_workdir, num_steps, run, sentence, starling_command, trained

pytestmark = pytest.mark.system

ENDLESS = 100_000


def answer(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the answer of the controller to an operator's command, as data."""
    with starling_command(folder, *arguments, "--json", name=arguments[0]) as command:
        assert command.wait() == 0, command.transcript()
    data: dict[str, Any] = json.loads(command.output)
    return data


def slots(folder: Path) -> dict[str, int]:
    """Return the slots of the rollouts that are members now."""
    members = answer(folder, "status")["members"]
    return {member["name"]: member["num_slots"] for member in members if member["role"] == "rollout"}


def test_run_is_scaled_while_it_trains(tmp_path: Path) -> None:
    """Rollouts of two pools, 2 -> 4 -> 1, and a controller that dies in between: every prompt is trained once."""
    pools = [{"count": 1, "settings": {"num_slots": 2, "exclusive": True}}, {"count": 1, "settings": {"num_slots": 3}}]
    folder = make_workdir(tmp_path, launch={}, rollout={"pools": pools}, rl={"num_steps": ENDLESS})
    with run(folder) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        assert slots(folder) == {"rollout-0": 2, "rollout-1": 3}
        refused = refusal(folder, "scale", "rollouts", "4")
        assert "there is no role 'rollouts' that can be scaled; did you mean rollout?" in refused

        assert answer(folder, "scale", "rollout", "4")["desired"] == {"rollout": 4}
        wait_for_rollouts(command, folder, 0, 1, 2, 3)
        assert slots(folder) == {"rollout-0": 2, "rollout-1": 3, "rollout-2": 3, "rollout-3": 3}
        command.process_titled("controller").kill()
        command.wait_for_output("controller was killed by SIGKILL; restarting it")
        wait_for_steps(command, folder)
        assert answer(folder, "status")["desired"] == {"rollout": 4}

        assert answer(folder, "drain", "rollout-2")["desired"] == {"rollout": 3}
        wait_for_rollouts(command, folder, 0, 1, 3)
        answer(folder, "scale", "rollout", "1")
        wait_for_rollouts(command, folder, 0)
        wait_for_steps(command, folder)
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert len(trained(folder)) == 4 * (num_steps(folder) - 3)
    assert checkpoints(folder) == [f"step-{num_steps(folder)}"]


def refusal(folder: Path, *arguments: str) -> str:
    """Return the sentence with which an operator's command is refused."""
    with starling_command(folder, *arguments, name="refused") as command:
        assert command.wait() == 1, command.transcript()
    return sentence(command)


def wait_for_steps(command: Command, folder: Path, num: int = 3) -> None:
    made = num_steps(folder)
    command.wait_until(lambda: num_steps(folder) >= made + num, f"{num} more steps")


def wait_for_rollouts(command: Command, folder: Path, *numbers: int) -> None:
    """Wait until just these rollouts are members."""
    wanted = {f"rollout-{number}" for number in numbers}

    def present() -> set[str]:
        members: set[str] = set()
        for line in joined_and_left(folder):
            members = members | {line["replica"]} if line["kind"] == "joined" else members - {line["replica"]}
        return members

    command.wait_until(lambda: present() == wanted, f"the rollouts {sorted(wanted)}")


def joined_and_left(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl about rollouts that joined and left, in order."""
    lines = [
        json.loads(text)
        for text in (attempt(folder) / "metrics.jsonl").read_text().splitlines(keepends=True)
        if text.endswith("\n")
    ]
    return [line for line in lines if line["kind"] in ("joined", "left") and line["replica"].startswith("rollout-")]

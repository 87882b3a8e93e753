"""`starling profile` of a run in progress: one merged trace of the steps of two ranks and of generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system_runs import Command, attempt, make_workdir, run, sentence, starling_command, trained

pytestmark = pytest.mark.system


def ended(folder: Path, *arguments: str, code: int = 0) -> Command:
    with starling_command(folder, *arguments, name=arguments[0]) as command:
        assert command.wait() == code, command.transcript()
    return command


def test_profile_of_a_run_is_one_trace(tmp_path: Path) -> None:
    mesh, patient = (
        {"parallel": {"dp_shard": 2}},
        {"lease_s": 120.0},
    )  # on a busy machine torch's profiler starts slowly
    folder = make_workdir(tmp_path, rl={"num_steps": 100_000}, policy=mesh, network=patient)
    with run(folder) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        targets = ("policy/0", "rollout/0", "reward/0", "controller")
        words = ("--steps", "2", "--groups", "2", "--seconds", "8", "--limit", "120", "--memory", "--ranks", "all")
        found: dict[str, Any] = json.loads(
            ended(folder, "profile", *targets, *words, "--timeout", "60", "--json").output
        )
        refused = ended(folder, "profile", "policy/7", "--timeout", "60", code=1)
        assert "policy-7 is not in the run" in sentence(refused)
        ended(folder, "stop", "--timeout", "60")
        assert command.wait() == 0, command.transcript()
    assert len(found["targets"]) == len(targets), found
    assert {one["state"] for one in found["targets"].values()} == {"ended"}, found
    place = attempt(folder) / "profiles" / found["profile"]
    trace = json.loads((place / "trace.json").read_text())
    events = trace["traceEvents"]
    for event in events:
        assert isinstance(event["ph"], str)
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int | str)
    processes = {one["args"]["name"].split()[0]: one["pid"] for one in events if one["name"] == "process_name"}
    assert processes.keys() == {"policy-0", "policy-0.rank-1", "rollout-0", "reward-0", "controller"}

    def of(name: str, phase: str) -> list[dict[str, Any]]:
        return [one for one in events if one["pid"] == processes[name] and one["ph"] == phase]

    steps = [one for one in of("policy-0", "X") if one["name"].startswith("step ")]
    assert len(steps) == 2
    other = [one["name"] for one in of("policy-0.rank-1", "X") if one["name"].startswith("step ")]
    assert other == [one["name"] for one in steps], "both ranks have recorded the same steps"
    generated = [one for one in of("rollout-0", "b") if one["name"] == "generate"]
    assert generated
    assert [one for one in of("reward-0", "b") if one["name"] == "score"]
    assert [one for one in of("controller", "X") if one["name"] == "GroupGenerated"]
    # Torch's events are on the same clock: operators of the step lie within it.
    inside = [
        one
        for one in of("policy-0", "X")
        if one["name"].startswith("aten::") and steps[0]["ts"] <= one["ts"] <= steps[0]["ts"] + steps[0]["dur"]
    ]
    assert inside

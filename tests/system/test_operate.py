"""Operator commands on a live and on an ended run, and resuming a run after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from system_runs import (
    Command,
    attempt,
    checkpoints,
    make_workdir,
    metrics,
    num_steps,
    run,
    sentence,
    starling_command,
    trained,
)

pytestmark = pytest.mark.system

ENDLESS = 100_000
RATE = "policy.optimizer.learning_rate"


def run_to_the_end(folder: Path, *arguments: str, code: int = 0) -> Command:
    """Run a command, and assert its exit code."""
    with starling_command(folder, *arguments, name=arguments[0]) as command:
        assert command.wait() == code, command.transcript()
    return command


def json_of(folder: Path, *arguments: str) -> dict[str, object]:
    """Return the command's answer as JSON data."""
    answer: dict[str, object] = json.loads(run_to_the_end(folder, *arguments, "--json").output)
    return answer


def test_operator_queries_changes_and_stops_a_run(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path, rl={"num_steps": ENDLESS})
    with run(folder) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        status = run_to_the_end(folder, "status").output
        assert all(name in status for name in ("policy-0", "rollout-0", "reward-0", "rl")), status
        assert json_of(folder, "status", "runs/tiny")["ok"] is True
        assert run_to_the_end(folder, "why", str(attempt(folder))).output.strip()

        run_to_the_end(folder, "set", RATE, "0.0003")
        refused = run_to_the_end(folder, "set", "runs/tiny", "model.path", "elsewhere", code=1)
        assert "model.path" in sentence(refused)
        num_made = num_steps(folder)
        command.wait_until(lambda: num_steps(folder) > num_made + 2, "steps with the new rate")
        assert metrics(folder, "step")[-1]["learning_rate"] == 0.0003

        run_to_the_end(folder, "evaluate", "--num-completions", "2")
        command.wait_until(lambda: metrics(folder, "evaluation"), "the evaluation")
        assert metrics(folder, "evaluation")[0]["k"] == 2

        address = json.loads((attempt(folder) / "controller.json").read_text())["address"]
        config = (attempt(folder) / "config.toml").read_text()
        run_id = next(line.partition('"')[2][:-1] for line in config.splitlines() if line.startswith("id = "))
        key = str(attempt(folder) / "keys/operator-0.json")
        run_to_the_end(folder, "stop", "--controller", address, "--run", run_id, "--key", key)
        assert command.wait() == 0, command.transcript()
    assert checkpoints(folder) == [f"step-{num_steps(folder)}"]
    status = run_to_the_end(folder, "status", code=1)
    assert f"the run in {attempt(folder)} is over; `starling run --resume {attempt(folder)}`" in sentence(status)


def test_operator_commands_report_errors(tmp_path: Path) -> None:
    make_workdir(tmp_path)
    assert "there is no run in runs; give the folder of one" in sentence(run_to_the_end(tmp_path, "status", code=2))
    assert "give --controller and --run together" in sentence(run_to_the_end(tmp_path, "why", "--run", "x", code=2))
    assert "write `starling run --resume RUN_FOLDER`" in sentence(run_to_the_end(tmp_path, "run", "--resume", code=2))
    wrong_address = ("--controller", "tcp://127.0.0.1:9", "--run", "x", "--timeout", "0.3")
    assert "no answer for 0.3 s" in sentence(run_to_the_end(tmp_path, "status", *wrong_address, code=1))


def test_run_resumes_after_a_crash_of_all_processes(tmp_path: Path) -> None:
    """All processes die at once, as in a power failure, and `starling run --resume` continues the run."""
    folder = make_workdir(tmp_path, rl={"num_steps": 150})
    with run(folder, fresh=True) as command:
        command.wait_until(lambda: len(trained(folder)) >= 12, "three steps of reinforcement")
        assert "is being run by process" in sentence(run_to_the_end(folder, "run", "--resume", "runs/tiny", code=2))
        command.process.kill()
        assert command.wait() == -9
    num_made = num_steps(folder)
    assert num_made < 153
    run_to_the_end(folder, "run", "--resume", "runs/tiny")
    assert len(trained(folder)) == 150 * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder)[-1] == "step-153"
    assert len(metrics(folder, "evaluation")) == 1

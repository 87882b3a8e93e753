"""An operator's commands on a run that goes on, and on one that does not; and a run that is taken up again."""

from __future__ import annotations

import json
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
    started,
    trained,
    workplace,
)

pytestmark = pytest.mark.system

ENDLESS = 100_000
RATE = "policy.optimizer.learning_rate"


def asked(folder: Path, *arguments: str, code: int = 0) -> Command:
    """Run one command to its end."""
    with started(folder, *arguments, name=arguments[0]) as command:
        assert command.wait() == code, command.story()
    return command


def told(folder: Path, *arguments: str) -> dict[str, object]:
    """Return its answer as data."""
    answer: dict[str, object] = json.loads(asked(folder, *arguments, "--json").output)
    return answer


def test_operator_queries_changes_and_stops_a_run(tmp_path: Path) -> None:
    folder = workplace(tmp_path, rl={"num_steps": ENDLESS})
    with run(folder) as command:
        command.until(lambda: trained(folder), "a step of reinforcement")
        state = asked(folder, "status").output
        assert all(name in state for name in ("policy-0", "rollout-0", "reward-0", "rl")), state
        assert told(folder, "status", "runs/tiny")["ok"] is True
        assert asked(folder, "why", str(attempt(folder))).output.strip()

        asked(folder, "set", RATE, "0.0003")
        refused = asked(folder, "set", "runs/tiny", "model.path", "elsewhere", code=1)
        assert "model.path" in sentence(refused)
        made = num_steps(folder)
        command.until(lambda: num_steps(folder) > made + 2, "steps with the new rate")
        assert metrics(folder, "step")[-1]["learning_rate"] == 0.0003

        asked(folder, "evaluate", "--num-completions", "2")
        command.until(lambda: metrics(folder, "evaluation"), "the evaluation")
        assert metrics(folder, "evaluation")[0]["k"] == 2

        address = json.loads((attempt(folder) / "controller.json").read_text())["address"]
        config = (attempt(folder) / "config.toml").read_text()
        run_id = next(line.partition('"')[2][:-1] for line in config.splitlines() if line.startswith("id = "))
        key = str(attempt(folder) / "keys/operator-0.json")
        asked(folder, "stop", "--controller", address, "--run", run_id, "--key", key)
        assert command.wait() == 0, command.story()
    assert checkpoints(folder) == [f"step-{num_steps(folder)}"]
    over = asked(folder, "status", code=1)
    assert f"the run in {attempt(folder)} is over; `starling run --resume {attempt(folder)}`" in sentence(over)


def test_operator_commands_report_errors(tmp_path: Path) -> None:
    workplace(tmp_path)
    assert "there is no run in runs; give the folder of one" in sentence(asked(tmp_path, "status", code=2))
    assert "give --controller and --run together" in sentence(asked(tmp_path, "why", "--run", "x", code=2))
    assert "write `starling run --resume RUN_FOLDER`" in sentence(asked(tmp_path, "run", "--resume", code=2))
    nobody = ("--controller", "tcp://127.0.0.1:9", "--run", "x", "--timeout", "0.3")
    assert "no answer for 0.3 s" in sentence(asked(tmp_path, "status", *nobody, code=1))


def test_run_resumes_after_a_crash_of_the_machine(tmp_path: Path) -> None:
    """Everything dies at once, as when the power fails, and a second `starling run` goes on where it was."""
    folder = workplace(tmp_path, rl={"num_steps": 150})
    with run(folder) as command:
        command.until(lambda: len(trained(folder)) >= 12, "three steps of reinforcement")
        assert "is being run by process" in sentence(asked(folder, "run", "--resume", "runs/tiny", code=2))
        command.process.kill()
        assert command.wait() == -9
    made = num_steps(folder)
    assert made < 153
    asked(folder, "run", "--resume", "runs/tiny")
    assert len(trained(folder)) == 150 * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder)[-1] == "step-153"
    assert len(metrics(folder, "evaluation")) == 1

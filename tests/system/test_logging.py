"""Loggers that misbehave, samples, and an alarm that ends the run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from system_runs import attempt, make_workdir, metrics, run, run_concurrently, sentence

pytestmark = pytest.mark.system

LOGGERS = """
import json
import threading


def hangs(step, metrics):
    threading.Event().wait()


class Mine:
    def __init__(self):
        self.file = open("mine.jsonl", "a")

    def log(self, step, metrics):
        print(json.dumps([step, metrics.get("loss")]), file=self.file, flush=True)

    def close(self):
        print(json.dumps("closed"), file=self.file, flush=True)
"""


def hanging_logger(folder: Path) -> None:
    """The run succeeds, the other logger gets every step once, and the report counts the dropped steps."""
    logging = {"loggers": ["mine.py:hangs", "mine.py:Mine"], "close_s": 5.0, "samples_per_step": 2, "samples_every": 2}
    make_workdir(folder, logging=logging)
    (folder / "mine.py").write_text(LOGGERS)
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    records = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    steps = metrics(folder, "step")
    lines = [record for record in records if record != "closed"]
    assert [record for record in lines if record[1] is not None] == [[line["step"], line["loss"]] for line in steps]
    assert records[-1] == "closed"
    [lost] = metrics(folder, "logger")
    assert lost["logger"] == "mine.py:hangs"
    assert lost["dropped"] > len(steps)
    assert "logger mine.py:hangs" in command.output
    samples = [json.loads(line) for line in (attempt(folder) / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [4, 4, 6, 6, 8, 8]
    assert {row["prompt"][-1] for row in samples} == {">"}
    shares = {name: value for name, value in steps[-1].items() if name.startswith("time/") and name.endswith("_share")}
    assert abs(sum(shares.values()) - 1.0) < 1e-9


def alarm_fails_the_run(folder: Path) -> None:
    """The run fails with the alarm's sentence, after the step that raised it."""
    alarms = {"fail_on": ["entropy"], "entropy": 100.0, "entropy_steps": 2}
    algorithm = {"skip_zero_advantage": False}  # so that every step has an entropy
    make_workdir(folder, sft={"num_steps": 0}, evaluation={}, policy={"alarms": alarms, "algorithm": algorithm})
    with run(folder) as command:
        assert command.wait() == 1, command.transcript()
    assert "policy.alarms.fail_on names an alarm that is on: entropy: " in sentence(command)
    assert "against a bound of 100 since step 2: the policy hardly explores" in sentence(command)
    assert [line["step"] for line in metrics(folder, "step")] == [1, 2]
    [line] = metrics(folder, "alarm")
    assert (line["name"], line["step"], line["bound"]) == ("entropy", 2, 100.0)


def missing_logger(folder: Path) -> None:
    """The run is rejected in one sentence before any work."""
    make_workdir(folder, logging={"loggers": ["nowhere.py:log"]})
    with run(folder) as command:
        assert command.wait() != 0, command.transcript()
    assert "the logger 'nowhere.py:log': there is no file" in command.output + command.transcript()


def killed_controller(folder: Path) -> None:
    """The logger still gets every committed step in order, and at most the step in progress twice."""
    num_steps, file = 400, folder / "mine.jsonl"
    logging = {"loggers": ["mine.py:Mine"]}
    make_workdir(folder, run={"kind": "sft"}, sft={"num_steps": num_steps}, evaluation={}, logging=logging)
    (folder / "mine.py").write_text(LOGGERS)
    with run(folder) as command:
        command.wait_until(lambda: file.exists() and file.read_text().count("\n") >= 20, "twenty steps")
        command.process_titled("controller").kill()
        assert command.wait() == 0, command.transcript()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [record[0] for record in records if record != "closed"]
    assert sorted(set(steps)) == list(range(1, num_steps + 1))
    assert steps == sorted(steps)
    assert len(steps) <= num_steps + 1


def test_loggers_record_every_step_and_an_alarm_ends_the_run(tmp_path: Path) -> None:
    scenarios = (hanging_logger, alarm_fails_the_run)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))


@pytest.mark.campaign
def test_loggers_record_every_step_over_restarts(tmp_path: Path) -> None:
    scenarios = (killed_controller, missing_logger)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))

"""What a run says of itself: loggers that misbehave, samples, and an alarm that ends it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from system_runs import attempt, metrics, run, sentence, together, workplace

pytestmark = pytest.mark.system

MINE = """
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


def one_logger_hangs(folder: Path) -> None:
    """The run ends well, the other logger has every step once, and the report tells what was lost."""
    logging = {"loggers": ["mine.py:hangs", "mine.py:Mine"], "close_s": 5.0, "samples_per_step": 2, "samples_every": 2}
    workplace(folder, logging=logging)
    (folder / "mine.py").write_text(MINE)
    with run(folder) as command:
        assert command.wait() == 0, command.story()
    told = [json.loads(line) for line in (folder / "mine.jsonl").read_text().splitlines()]
    steps = metrics(folder, "step")
    lines = [one for one in told if one != "closed"]
    assert [one for one in lines if one[1] is not None] == [[line["step"], line["loss"]] for line in steps]
    assert told[-1] == "closed"
    [lost] = metrics(folder, "logger")
    assert lost["logger"] == "mine.py:hangs"
    assert lost["dropped"] > len(steps)
    assert "logger mine.py:hangs" in command.output
    samples = [json.loads(line) for line in (attempt(folder) / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [4, 4, 6, 6, 8, 8]
    assert {row["prompt"][-1] for row in samples} == {">"}
    shares = {name: value for name, value in steps[-1].items() if name.startswith("time/") and name.endswith("_share")}
    assert abs(sum(shares.values()) - 1.0) < 1e-9


def an_alarm_ends_the_run(folder: Path) -> None:
    """With its sentence, after the step that turned it on."""
    alarms = {"fail_on": ["entropy"], "entropy": 100.0, "entropy_steps": 2}
    algorithm = {"skip_zero_advantage": False}  # so that every step has an entropy
    workplace(folder, sft={"num_steps": 0}, evaluation={}, policy={"alarms": alarms, "algorithm": algorithm})
    with run(folder) as command:
        assert command.wait() == 1, command.story()
    assert "policy.alarms.fail_on names an alarm that is on: entropy: " in sentence(command)
    assert "against a bound of 100 since step 2: the policy hardly explores" in sentence(command)
    assert [line["step"] for line in metrics(folder, "step")] == [1, 2]
    [line] = metrics(folder, "alarm")
    assert (line["name"], line["step"], line["bound"]) == ("entropy", 2, 100.0)


def a_logger_is_not_installed(folder: Path) -> None:
    """One sentence, before anything is computed."""
    workplace(folder, logging={"loggers": ["nowhere.py:log"]})
    with run(folder) as command:
        assert command.wait() != 0, command.story()
    assert "the logger 'nowhere.py:log': there is no file" in command.output + command.story()


def the_controller_is_killed(folder: Path) -> None:
    """The logger gets every committed step all the same, in order, and at most the one in hand twice."""
    num_steps, file = 400, folder / "mine.jsonl"
    logging = {"loggers": ["mine.py:Mine"]}
    workplace(folder, run={"kind": "sft"}, sft={"num_steps": num_steps}, evaluation={}, logging=logging)
    (folder / "mine.py").write_text(MINE)
    with run(folder) as command:
        command.until(lambda: file.exists() and file.read_text().count("\n") >= 20, "twenty steps")
        command.titled("controller").kill()
        assert command.wait() == 0, command.story()
    told = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [one[0] for one in told if one != "closed"]
    assert sorted(set(steps)) == list(range(1, num_steps + 1))
    assert steps == sorted(steps)
    assert len(steps) <= num_steps + 1


STORIES = (one_logger_hangs, the_controller_is_killed, an_alarm_ends_the_run, a_logger_is_not_installed)


def test_loggers_record_every_step_over_restarts(tmp_path: Path) -> None:
    """Runs side by side."""
    together(*(partial(story, tmp_path / story.__name__) for story in STORIES))

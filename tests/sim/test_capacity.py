"""Capacity estimates and the `starling sim` command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from starling.cli.main import main
from starling.common.errors import ConfigError
from starling.controller.core.groups.buffer import GroupBuffer
from starling.sim.capacity.capacity import Load, measure, parse_load

SMALL = "rollouts=4,rewards=1,slots=2,prompts_per_step=8,group_size=2,response_length=256,step_s=2,steps=6"


def test_parse_load_numbers_and_multiples() -> None:
    load = parse_load("rollouts=512, response_length=2x", Load())
    assert (load.rollouts, load.response_length) == (512, 2048)
    assert load.step_s == Load().step_s


@pytest.mark.parametrize("text", ["rolouts=2", "rollouts", "rollouts=two", "rollouts=0", "steps=1e12", "pull_s=nan"])
def test_parse_load_rejects_invalid_changes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_load(text, Load())


def test_measure_slowest_part_bounds_the_throughput() -> None:
    base = parse_load(SMALL, Load())
    answers = {
        text: measure(text, parse_load(text, base), range(2))
        for text in ("rollouts=4", "rollouts=16", "response_length=4x", "max_staleness=0", "step_s=60")
    }
    plain = answers["rollouts=4"]
    assert answers["rollouts=16"].samples_per_s > plain.samples_per_s
    assert answers["response_length=4x"].samples_per_s < plain.samples_per_s / 2
    assert answers["max_staleness=0"].staleness_max == 0
    assert answers["max_staleness=0"].samples_per_s < plain.samples_per_s
    assert answers["step_s=60"].policy_busy > 0.8, "the policy is the bottleneck"
    assert plain.staleness_max == 1


def test_what_if_prints_a_table_and_draws_a_chart(tmp_path: Path) -> None:
    picture = tmp_path / "chart.svg"
    arguments = ["sim", "--base", SMALL, "--what-if", "rollouts=2x", "--seeds", "1", "--picture", str(picture)]
    command = [sys.executable, "-m", "starling.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["load", "samples/s", "tokens/s"]
    assert [line.split()[0] for line in lines[1:]] == [SMALL, "rollouts=2x"]
    assert "rollouts=2x" in picture.read_text()


def test_what_if_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--base", SMALL, "--seeds", "1", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["load"]["rollouts"] == 4
    assert answer["samples_per_s"] > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--faults", "rain"],
        ["--replicas", "2"],
        ["--jobs", "0"],
        ["--seeds", "-1"],
        ["--what-if", "rollouts=2x", "--picture", "answer.jpg"],
    ],
)
def test_sim_rejects_invalid_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *arguments]) == 2
    assert capsys.readouterr().err.startswith("starling: ")


def test_sim_prints_one_line_per_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--faults", "calm,loss", "--seeds", "3", "--first-seed", "5", "--jobs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["calm: 3 of 3 seeds finish", "loss: 3 of 3 seeds finish"]


def test_sim_prints_a_test_of_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    free_slots = GroupBuffer.num_free_slots
    monkeypatch.setattr(GroupBuffer, "num_free_slots", lambda self: free_slots(self) + 1)
    assert main(["sim", "--faults", "calm", "--seeds", "2", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "calm: 0 of 2 seeds finish" in out
    assert "def test_seed_0_of_calm() -> None:" in out
    compile(out[out.index("from starling") :], "printed", "exec")

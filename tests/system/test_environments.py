"""Environments in whole runs: the examples of the documentation work verbatim, and an error costs only its group."""

from __future__ import annotations

import json
import re
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from system_runs import (
    WORDS,
    Command,
    attempt,
    checkpoints,
    make_workdir,
    metrics,
    run,
    run_concurrently,
    trained,
    write_prompts,
)

pytestmark = pytest.mark.system

PAGE = (Path(__file__).parents[2] / "docs/how-to/environments.md").read_text()
SCRATCH = {
    "alphabet": "abcdefghijklmnopqrstuvwxyz>0123456789=+_/<\n ",
    "max_length": 96,
    "chat_template": "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else '<eos>' }}{% endfor %}",
}
FEW = {"num_steps": 4, "prompts_per_step": 4, "group_size": 4, "max_staleness": 0}
ALL = {"algorithm": {"skip_zero_advantage": False}}
"""Trains every sampled token, so that the mismatch metrics cover all of them."""


def page_files() -> dict[str, str]:
    """Return the files in the page's code blocks, by the names in their first lines."""
    return dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


def make_page_workdir(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Create a working directory with the page's environment `name` and its sections of a recipe."""
    page_sections = tomllib.loads(page_files()[f"{name}.toml"])
    sections = {
        "sft": {"num_steps": 0},
        "rl": FEW,
        "evaluation": {},
        "data": {"held_out": 0},
        "policy": ALL,
        **page_sections,
        **changes,
    }
    make_workdir(folder, **sections)
    (folder / f"{name}.py").write_text(page_files()[f"{name}.py"])
    return folder


def set_up_model(folder: Path) -> None:
    """Give the recipe's model the alphabet of the conversations, and a chat template."""
    import tomli_w

    path = folder / "tiny.toml"
    recipe = tomllib.loads(path.read_text())
    recipe["model"]["scratch"] |= SCRATCH
    path.write_text(tomli_w.dumps(recipe))


def run_to_the_end(folder: Path) -> Command:
    set_up_model(folder)
    with run(folder) as command:
        assert command.wait(180) == 0, command.transcript()
    return command


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, "step") if line["phase"] == "rl"]


def assert_masks_are_exact(folder: Path) -> None:
    """Assert that exactly the sampled tokens are trained, with the log-probabilities that the rollout reported."""
    for line in rl_steps(folder):
        num = FEW["prompts_per_step"] * FEW["group_size"]
        assert line["num_trained_tokens"] == line["num_tokens"] == pytest.approx(line["completion_tokens_mean"] * num)
        assert line["mismatch_max"] < 1e-3
        assert line["reward_min"] <= line["reward_mean"] <= line["reward_max"]


def custom_environment(folder: Path) -> None:
    make_page_workdir(folder, "guessing", data={"held_out": 0, "format": ""})
    run_to_the_end(folder)
    assert_masks_are_exact(folder)
    steps = metrics(folder, "step")
    assert len(steps) == 4
    assert all(1.0 <= line["env/guesses"] <= 3.0 and line["turns_mean"] == line["env/guesses"] for line in steps)
    assert all(line["score/environment"] == line["reward_mean"] for line in steps)
    rows = [json.loads(line) for line in (attempt(folder) / "samples.jsonl").read_text().splitlines()]
    assert any("no>" in row["completion"] and row["num_turns"] > 1 for row in rows)
    assert checkpoints(folder) == ["step-4"]


def tools_environment(folder: Path) -> None:
    """After supervised steps on tool calls, the model's calls are answered."""
    make_page_workdir(
        folder,
        "calculator",
        sft={"num_steps": 60, "examples_per_step": 9},
        data={"held_out": 0, "format": "="},
        policy={**ALL, "sft": {"optimizer": {"learning_rate": 1e-2}}},
    )
    rows = [{"question": "x", "answer": f"{a}+{b}"} for a in range(3) for b in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "calculator.py").write_text(
        page_files()["calculator.py"].replace('text.startswith("=")', "True")  # the prompt has it
    )
    run_to_the_end(folder)
    assert_masks_are_exact(folder)
    steps = rl_steps(folder)
    assert len(steps) == 4
    assert sum(line["env/tool_calls"] for line in steps) > 0, "the model has learnt to call tools"
    assert sum(line["env/tool_errors"] for line in steps) == 0
    rows = [json.loads(line) for line in (attempt(folder) / "samples.jsonl").read_text().splitlines()]
    assert any("<tool_response>" in row["completion"] for row in rows)


FAILING = """
import time

from starling.rollout.env.base import Episode


async def play(episode: Episode, *, raises: str, hangs: str, blocks: str) -> float:
    import asyncio

    word = episode.prompt.text.rstrip(">")
    await episode.reply(max_tokens=2)
    if word == raises:
        raise LookupError(f"nothing is known of {word}")
    if word == hangs:
        await asyncio.sleep(3600)
    if word == blocks:
        time.sleep(3600)
    episode.say_text(">")
    return float(len((await episode.reply(max_tokens=2)).text))
"""


def environment_errors_drop_their_groups(folder: Path) -> None:
    options = {"raises": WORDS[0], "hangs": WORDS[1]}
    make_workdir(
        folder,
        sft={"num_steps": 0},
        rl={"num_steps": 9, "prompts_per_step": 4, "group_size": 4, "max_tries": 1},
        evaluation={},
        data={"held_out": 0},
        reward={"scorers": [{"name": "environment"}]},
        rollout={
            "environment": {"kind": "failing.py:play", "timeout_s": 5.0, "options": {**options, "blocks": WORDS[2]}}
        },
    )
    (folder / "failing.py").write_text(FAILING)
    write_prompts(folder, WORDS[:39])
    run_to_the_end(folder)
    dropped = {line["prompt"].rpartition("/")[2]: line for line in metrics(folder, "discarded")}
    assert {"0", "1", "2"} <= set(dropped)
    reasons = {row: line["reason"] for row, line in dropped.items()}
    assert f"the environment raised LookupError: nothing is known of {WORDS[0]}" in reasons["0"]
    assert "the environment took longer than 5 s" in reasons["1"]
    assert "could not be stopped: it must not block" in reasons["2"]
    assert {line["status"] for line in dropped.values()} == {"env_error"}
    assert not {f"train/0/{row}" for row in dropped} & set(trained(folder))
    assert checkpoints(folder) == ["step-9"]
    assert metrics(folder, "step")[-1]["num_env_errors"] >= 6


SLOW = """
import asyncio

from starling.rollout.env.base import Episode


async def play(episode: Episode) -> float:
    await episode.reply(max_tokens=2)
    await asyncio.sleep(0.7)
    episode.say_text(">")
    return float(len((await episode.reply(max_tokens=2)).text))
"""


def terminated_rollout_loses_no_prompt(folder: Path) -> None:
    make_workdir(
        folder,
        launch={"num_rollouts": 2},
        sft={"num_steps": 0},
        rl={"num_steps": 10, "prompts_per_step": 4, "group_size": 2, "max_tries": 0},
        evaluation={},
        data={"held_out": 0},
        reward={"scorers": [{"name": "environment"}]},
        rollout={"num_slots": 2, "environment": {"kind": "slow.py:play"}},
    )
    (folder / "slow.py").write_text(SLOW)
    write_prompts(folder, WORDS[:40])
    set_up_model(folder)
    with run(folder) as command:
        command.wait_until(lambda: len(metrics(folder, "step")) >= 2, "two steps", 180)
        command.process_titled("rollout-0").terminate()
        assert command.wait(180) == 0, command.transcript()
    assert trained(folder) == {f"train/0/{row}": 1 for row in range(40)}
    assert metrics(folder, "discarded") == [], "groups that the rollout gave back have not failed"


def bad_settings_are_rejected(folder: Path) -> None:
    make_workdir(folder, rollout={"environment": {"kind": "tool"}})
    with run(folder) as command:
        assert command.wait() != 0
    assert "rollout.environment.kind is 'tool': did you mean 'tools'" in command.output + command.errors


def test_environments_train_and_recover(tmp_path: Path) -> None:
    scenarios = (custom_environment, environment_errors_drop_their_groups)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))


@pytest.mark.campaign
def test_environments_with_tools_of_a_terminated_rollout_and_of_bad_settings(tmp_path: Path) -> None:
    scenarios = (tools_environment, terminated_rollout_loses_no_prompt, bad_settings_are_rejected)
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios), max_workers=2)

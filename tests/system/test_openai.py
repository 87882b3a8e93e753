"""Agents in whole runs: the examples of the documentation work verbatim, and exactly their tokens are trained."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import openai
import pytest
import tomli_w
from system_runs import attempt, checkpoints, make_workdir, metrics, run

pytestmark = pytest.mark.system

PAGE = (Path(__file__).parents[2] / "docs/how-to/openai-endpoint.md").read_text()
CHAT = "{% for m in messages %}{{ m.content }}{{ '>' if m.role == 'user' else '<eos>' }}{% endfor %}"
FEW = {"num_steps": 3, "prompts_per_step": 4, "group_size": 4, "max_staleness": 0}


def page_file(name: str) -> str:
    """Return the page's code block of the file `name`."""
    return dict(re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))[name]


def make_chat_workdir(folder: Path, **sections: dict[str, Any]) -> None:
    """Create a working directory for conversations, with `sections` of a recipe."""
    make_workdir(
        folder,
        sft={"num_steps": 0},
        rl=FEW,
        evaluation={},
        sampling={"max_tokens": 20},
        data={"held_out": 0, "format": ""},
        policy={"algorithm": {"skip_zero_advantage": False}},
        **sections,
    )
    recipe = tomllib.loads((folder / "tiny.toml").read_text())
    recipe["model"]["scratch"] |= {"chat_template": CHAT, "max_length": 96}
    (folder / "tiny.toml").write_text(tomli_w.dumps(recipe))


def exact_rl_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the RL steps; assert that exactly the sampled tokens are trained, with the reported log-probabilities.

    Every sampled token is trained, so that an error in the mask shows.
    """
    steps = [line for line in metrics(folder, "step") if line["phase"] == "rl"]
    assert len(steps) == FEW["num_steps"]
    for line in steps:
        num = FEW["prompts_per_step"] * FEW["group_size"]
        assert line["num_trained_tokens"] == line["num_tokens"] == pytest.approx(line["completion_tokens_mean"] * num)
        assert line["mismatch_max"] < 1e-3
    return steps


def test_openai_agent_is_trained_by_changing_its_base_url(tmp_path: Path) -> None:
    page: dict[str, Any] = tomllib.loads(page_file("speller.toml"))
    page["rollout"]["api"] = {"enabled": True, "key": "mine"}
    make_chat_workdir(tmp_path, **page)
    (tmp_path / "speller.py").write_text(page_file("speller.py"))
    answers: list[Any] = []
    with run(tmp_path) as command:

        def is_answered() -> bool:
            """Send a request from outside the run as soon as there are weights."""
            file = attempt(tmp_path) / "api/rollout-0.json" if (tmp_path / "runs").is_dir() else None
            if file is None or not file.is_file():
                return command.process.poll() is not None
            address = json.loads(file.read_text())
            client = openai.OpenAI(base_url=address["base_url"], api_key="mine", max_retries=0, timeout=60)
            try:
                answers.append(client.completions.create(model=address["model"], prompt="a>", max_tokens=3))
            except openai.APIError:
                return command.process.poll() is not None  # the rollout is leaving
            return True

        command.wait_until(is_answered, "an answer to a client outside the run", 180)
        assert command.wait(180) == 0, command.transcript()
    assert answers
    assert all(span["version"] >= 0 for span in answers[0].choices[0].starling["versions"])
    for line in exact_rl_steps(tmp_path):
        assert line["env/num_branches"] == 1.0
        assert 1.0 <= line["turns_mean"] <= 2.0
        assert line["score/environment"] == line["reward_mean"]
    rows = [json.loads(line) for line in (attempt(tmp_path) / "samples.jsonl").read_text().splitlines()]
    assert any("no>" in row["completion"] and row["num_turns"] == 2 for row in rows)
    assert checkpoints(tmp_path) == ["step-3"]
    assert not list((attempt(tmp_path) / "api").iterdir()), "the address file was removed at the end"


VERIFIERS = """
import verifiers as vf
from datasets import Dataset


class Nagging(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "no"}]


def share(completion, answer):
    text = "".join(message["content"] for message in completion if message["role"] == "assistant")
    return sum(letter in answer for letter in text) / max(1, len(text))


def nag():
    return Nagging(
        dataset=Dataset.from_list([{"question": "a", "answer": "a"}]), max_turns=2, rubric=vf.Rubric(funcs=[share])
    )
"""


@pytest.mark.campaign
def test_verifiers_environment_is_trained(tmp_path: Path) -> None:
    environment = {"kind": "verifiers", "options": {"environment": "nagging.py:nag"}, "turn_max_tokens": 5}
    make_chat_workdir(tmp_path, rollout={"environment": environment}, reward={"scorers": [{"name": "environment"}]})
    (tmp_path / "nagging.py").write_text(VERIFIERS)
    with run(tmp_path) as command:
        assert command.wait(180) == 0, command.transcript()
    steps = exact_rl_steps(tmp_path)
    # verifiers ends an episode at an empty reply, and does not count that turn.
    assert all(1.0 <= line["env/num_turns"] <= line["turns_mean"] <= 2.0 for line in steps)
    assert all(line["env/share"] == pytest.approx(line["reward_mean"]) for line in steps)
    assert not (attempt(tmp_path) / "api").exists(), "the endpoint is internal: no address file"

"""Runs without a policy, and runs without rollouts: evaluated, answered, generated, replayed, and killed on the way."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tomli_w
import torch
from openai import OpenAI
from safetensors.torch import load_file
from system_runs import WORDS, Command, attempt, checkpoints, metrics, run, sentence, started, together, workplace
from transformers import AutoConfig, AutoModelForCausalLM

from starling.cli.model.scratch import make_model_folder
from starling.cli.recipe.schema import load_recipe

pytestmark = pytest.mark.system

SYNCHRONOUS = {"rl": {"num_steps": 3, "max_staleness": 0}, "sft": {"num_steps": 0}, "evaluation": {}}
LONG = "ab" * 20
"""A prompt that is longer than the tiny model's context."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny model whose weights are wide enough for its answers to differ from prompt to prompt."""
    place = workplace(tmp_path_factory.mktemp("model"))
    settings = load_recipe([place / "tiny.toml"], []).model.scratch
    assert settings is not None
    folder = place / "model"
    make_model_folder(settings, folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.3
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def evaluation(folder: Path, model: Path, num: int, out: str) -> tuple[str, ...]:
    """Return the command line that evaluates two tasks on `num` instances."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("one", WORDS), ("two", [word[::-1] for word in WORDS])):
        rows = [{"question": f"{word}>", "answer": word[:2]} for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("evaluate", "--model", str(model), "--tasks", "one.jsonl,two.jsonl", "--scorer", "prefix_match", "--plain")
    shown = ("--max-tokens", "6", "--launch.screen", "plain", "--network.heartbeat-s", "0.3")
    return (*words, "--num-gpus", str(num), "--out", out, *shown)


def test_evaluate_result_is_independent_of_instances_and_failures(tmp_path: Path, model: Path) -> None:
    """One instance alone; and three, all of whose processes are killed on the way."""

    def alone() -> None:
        folder = tmp_path / "alone"
        with started(folder, *evaluation(folder, model, 1, "out")) as command:
            assert command.wait() == 0, command.story()
        assert "1 shares of the CPU = 1 instances x tp 1" in command.output
        assert "128 prompts x 1 completions = 128 sequences" in command.output
        assert "prompt 128 of 128" in command.output

    def killed() -> None:
        folder = tmp_path / "killed"
        with started(folder, *evaluation(folder, model, 3, "out")) as command:
            index = folder / "out" / "trajectories" / "index.jsonl"
            command.until(lambda: index.exists() and index.stat().st_size, "a file")
            command.kill()
            command.wait()
        assert not (folder / "out" / "answers.jsonl").exists(), "it was killed too late to prove anything"
        with started(folder, "evaluate", "--resume", "out", name="again") as again:
            assert again.wait() == 0, again.story()
        assert sorted(path.name for path in (folder / "out" / "logs").glob("rollout*")) == [
            "rollout-0.log", "rollout-1.log", "rollout-2.log"
        ]  # fmt: skip

    together(alone, killed)
    answers, others = ((tmp_path / name / "out" / "answers.jsonl").read_bytes() for name in ("alone", "killed"))
    assert answers == others
    lines = [json.loads(line) for line in answers.splitlines()]
    assert [line["id"] for line in lines] == [f"{task}/{row}" for task in ("one", "two") for row in range(64)]
    assert len({line["completions"][0]["text"] for line in lines}) > 30, "the answers tell the prompts apart"
    summary = json.loads((tmp_path / "alone" / "out" / "summary.json").read_text())
    rewards = [line["completions"][0]["reward"] for line in lines]
    assert summary["reward_mean"] == pytest.approx(sum(rewards) / 128)
    assert list(summary["tasks"]) == ["one", "two"]
    assert all(line["completions"][0]["scores"].keys() == {f"{line['task']}/prefix_match"} for line in lines)


def test_infer_answers_prompts_and_reports_the_one_that_fails(tmp_path: Path, model: Path) -> None:
    rows = [{"text": "ab>"}, {"text": LONG}, {"text": "cd>"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--max-tokens", "4", "--num-completions", "2", "--temperature", "1", "--launch.screen", "plain")
    words = ("infer", "--model", str(model), "prompts.jsonl", "--out", "answers.jsonl")
    with started(tmp_path, *words, *flags) as command:
        assert command.wait() == 0, command.story()
    assert "answers to 3 prompts, 1 without any: answers.jsonl" in command.output
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["id"], line["text"], len(line["completions"])) for line in lines] == [
        ("0", "ab>", 2), ("1", LONG, 0), ("2", "cd>", 2)
    ]  # fmt: skip
    assert "40 tokens" in lines[1]["problem"]
    assert set(lines[0]["completions"][0]) == {"text", "status", "num_tokens"}, "nothing was scored"
    again = Command(tmp_path, *words, *flags, name="again")
    assert again.wait() == 2
    assert sentence(again).startswith("answers.jsonl exists; give another --out")


def test_serve_answers_an_openai_client_until_stopped(tmp_path: Path, model: Path) -> None:
    with started(tmp_path, "serve", "--model", str(model), "--launch.screen", "plain") as command:
        told = tmp_path / "runs/serve/attempt-1/api/rollout-0.json"
        command.until(told.exists, "an endpoint")
        address = json.loads(told.read_text())
        with OpenAI(base_url=address["base_url"], api_key=address["api_key"], timeout=60.0, max_retries=0) as client:
            answer = client.completions.create(model=address["model"], prompt="ab>", max_tokens=4, temperature=0)
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 4
        command.interrupt()
        assert command.wait() == 0, command.story()
    assert "stopping in order: requests in progress get no answer" in command.output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the only run in `folder` has made of the model."""
    [step] = checkpoints(folder)
    return load_file(attempt(folder) / "checkpoints" / step / "model.safetensors")


def test_replay_reproduces_the_weights_of_the_recorded_run(tmp_path: Path) -> None:
    """To the bit: a synchronous run trains its groups in order, by the same versions and draws."""
    first, second = tmp_path / "first", tmp_path / "second"
    with run(workplace(first, **SYNCHRONOUS, logging={"trajectories": True})) as command:
        assert command.wait() == 0, command.story()
    workplace(second, **SYNCHRONOUS)
    (second / "prompts.jsonl").unlink()
    trajectories = attempt(first) / "trajectories"
    with started(second, "policy", "--replay", str(trajectories), "tiny.toml", name="replay") as command:
        assert command.wait() == 0, command.story()
    assert "replay: 12 groups = 3 steps x 4 prompts; 3 are trained" in command.output
    assert not list((attempt(second) / "logs").glob("rollout*"))
    made, again = weights(first), weights(second)
    assert made.keys() == again.keys()
    assert all(torch.equal(made[name], again[name]) for name in made)
    prompts = [[line["prompts"] for line in metrics(folder, "trained")] for folder in (first, second)]
    assert prompts[0] == prompts[1]
    assert [line["staleness_max"] for line in metrics(second, "step")] == [0, 0, 0]


def test_generate_then_replay_trains_without_rollouts(tmp_path: Path, model: Path) -> None:
    generated, trained = tmp_path / "generated", tmp_path / "trained"
    changes: dict[str, Any] = {**SYNCHRONOUS, "model": {"path": str(model)}}
    workplace(generated, **changes)
    drop_scratch(generated)
    with started(generated, "rollout", "--only", "tiny.toml", name="generate") as command:
        assert command.wait() == 0, command.story()
    folder = attempt(generated) / "trajectories"
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    told = [(line["step"], line["num_groups"], line["num_usable"]) for line in lines]
    assert told == [(1, 4, 4), (2, 4, 4), (3, 4, 4)]
    assert "12 in 3 files, 0 of them without an answer" in command.output
    file = msgpack.unpackb((folder / lines[0]["file"]).read_bytes())
    assert (file["format"], file["version"], file["step"]) == ("starling-trajectories", 1, 1)
    for group in file["groups"]:
        tokens, logprobs, versions = (
            np.frombuffer(buffer, meta["dtype"]).reshape(meta["shape"])
            for buffer, meta in zip(group["buffers"][1:4], group["tensors"][1:4], strict=True)
        )
        assert len(tokens) == sum(trajectory["num_tokens"] for trajectory in group["trajectories"])
        assert (logprobs <= 0).all()
        assert set(versions) == {0}
        assert len(group["rewards"]) == 4
    workplace(trained, **changes)
    drop_scratch(trained)
    with started(trained, "policy", "--replay", str(folder), "tiny.toml", name="replay") as command:
        assert command.wait() == 0, command.story()
    assert [line["staleness_max"] for line in metrics(trained, "step")] == [0, 1, 2], "told, and nothing is dropped"
    before = load_file(model / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trained).items())


def drop_scratch(folder: Path) -> None:
    """Let the recipe have a model's folder instead of one from nothing."""
    recipe = tomllib.loads((folder / "tiny.toml").read_text())
    del recipe["model"]["scratch"]
    (folder / "tiny.toml").write_text(tomli_w.dumps(recipe))
    assert os.path.isdir(recipe["model"]["path"])

"""Runs without a policy (evaluate, infer, serve, rollout --only) and without rollouts (replay), some of them killed."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import tomli_w
import torch
from openai import OpenAI
from safetensors.torch import load_file
from system_runs import (
    WORDS,
    Command,
    attempt,
    checkpoints,
    make_varied_model,
    make_workdir,
    metrics,
    run,
    run_concurrently,
    sentence,
    starling_command,
)

from starling.common.folder_digests import DIGESTS, model_digest
from starling.controller.core.records import CheckpointLoaded
from starling.controller.shell.journal.journal import Journal

pytestmark = pytest.mark.system

SYNCHRONOUS = {"rl": {"num_steps": 3, "max_staleness": 0}, "sft": {"num_steps": 0}, "evaluation": {}}
LONG_PROMPT = "ab" * 20
"""Prompt longer than the tiny model's context."""
DIFFERS = "has loaded another checkpoint than this run began with: "
SERVE_BY_HAND = """
[run]
kind = "serve"
id = "one"
[network]
curve = false
heartbeat_s = 0.3
[data]
source = ""
[rollout]
load_weights = true
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_varied_model(tmp_path_factory.mktemp("model"))


def evaluate_arguments(folder: Path, model: Path, num: int, out: str) -> tuple[str, ...]:
    """Write two tasks; return the arguments that evaluate them on `num` instances."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("one", WORDS), ("two", [word[::-1] for word in WORDS])):
        rows = [{"question": f"{word}>", "answer": word[:2]} for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("evaluate", "--model", str(model), "--tasks", "one.jsonl,two.jsonl", "--scorer", "prefix_match", "--plain")
    shown = ("--max-tokens", "6", "--launch.screen", "plain", "--network.heartbeat-s", "0.3")
    return (*words, "--num-gpus", str(num), "--out", out, *shown)


def test_evaluate_result_is_independent_of_instances_and_failures(tmp_path: Path, model: Path) -> None:
    """Compares one instance with three whose processes are all killed before the end."""

    def alone() -> None:
        folder = tmp_path / "alone"
        with starling_command(folder, *evaluate_arguments(folder, model, 1, "out")) as command:
            assert command.wait() == 0, command.transcript()
        assert "1 share of the CPU = 1 instance x tp 1" in command.output
        assert "128 prompts x 1 completion = 128 sequences" in command.output
        assert "prompt 128 of 128" in command.output

    def killed() -> None:
        folder = tmp_path / "killed"
        with starling_command(folder, *evaluate_arguments(folder, model, 3, "out")) as command:
            index = folder / "out" / "trajectories" / "index.jsonl"
            command.wait_until(lambda: index.exists() and index.stat().st_size, "a file")
            command.kill()
            command.wait()
        assert not (folder / "out" / "answers.jsonl").exists(), "the run was killed too late to prove anything"
        with starling_command(folder, "evaluate", "--resume", "out", name="again") as second:
            assert second.wait() == 0, second.transcript()
        assert sorted(path.name for path in (folder / "out" / "logs").glob("rollout*")) == [
            "rollout-0.log", "rollout-1.log", "rollout-2.log"
        ]  # fmt: skip

    run_concurrently(alone, killed)
    answers, others = ((tmp_path / name / "out" / "answers.jsonl").read_bytes() for name in ("alone", "killed"))
    assert answers == others
    lines = [json.loads(line) for line in answers.splitlines()]
    assert [line["id"] for line in lines] == [f"{task}/{row}" for task in ("one", "two") for row in range(64)]
    assert len({line["completions"][0]["text"] for line in lines}) > 30, "the answers depend on the prompts"
    summary = json.loads((tmp_path / "alone" / "out" / "summary.json").read_text())
    rewards = [line["completions"][0]["reward"] for line in lines]
    assert summary["reward_mean"] == pytest.approx(sum(rewards) / 128)
    assert list(summary["tasks"]) == ["one", "two"]
    assert all(line["completions"][0]["scores"].keys() == {f"{line['task']}/prefix_match"} for line in lines)


def test_infer_answers_prompts_and_reports_the_one_that_fails(tmp_path: Path, model: Path) -> None:
    rows = [{"text": "ab>"}, {"text": LONG_PROMPT}, {"text": "cd>"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--max-tokens", "4", "--num-completions", "2", "--temperature", "1", "--launch.screen", "plain")
    words = ("infer", "--model", str(model), "prompts.jsonl", "--out", "answers.jsonl")
    with starling_command(tmp_path, *words, *flags) as command:
        assert command.wait() == 0, command.transcript()
    assert "answers to 3 prompts, 1 without any: answers.jsonl" in command.output
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["id"], line["text"], len(line["completions"])) for line in lines] == [
        ("0", "ab>", 2), ("1", LONG_PROMPT, 0), ("2", "cd>", 2)
    ]  # fmt: skip
    assert "40 tokens" in lines[1]["problem"]
    assert set(lines[0]["completions"][0]) == {"text", "status", "num_tokens"}, "nothing was scored"
    with closing(Journal(tmp_path / "runs/infer/attempt-1/journal.sqlite")) as journal:
        [checkpoint] = [record for record in journal.records() if isinstance(record, CheckpointLoaded)]
    assert (checkpoint.name, checkpoint.digest) == ("controller", model_digest(model))
    second = Command(tmp_path, *words, *flags, name="again")
    assert second.wait() == 2
    assert sentence(second).startswith("answers.jsonl exists; give another --out")


@pytest.mark.campaign
def test_evaluate_fails_if_no_prompt_has_an_answer(tmp_path: Path, model: Path) -> None:
    rows = [{"question": LONG_PROMPT, "answer": "a"}] * 2
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("evaluate", "--model", str(model), "--tasks", "long.jsonl", "--scorer", "prefix_match", "--plain")
    with starling_command(tmp_path, *words, "--out", "out", "--launch.screen", "plain") as command:
        assert command.wait() == 1, command.transcript()
    assert "starling: none of the 2 prompts has an answer; the first failed with: prompt long/0: " in command.errors
    assert "the prompt of 40 tokens leaves no room" in command.errors
    assert "pass_at_0" not in command.output
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["num_failed"] == 2


def flip_bit(model: Path, folder: Path) -> Path:
    """Copy a model to `folder` and flip one bit of its weights."""
    shutil.copytree(model, folder)
    (folder / DIGESTS).unlink(missing_ok=True)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    return folder


def test_rollout_of_another_checkpoint_is_refused_also_after_a_restart(tmp_path: Path, model: Path) -> None:
    other = flip_bit(model, tmp_path / "other")
    (tmp_path / "serve.toml").write_text(SERVE_BY_HAND)
    config = ("--config", "serve.toml", "--dir", "run")
    run_folder = tmp_path / "run"
    run_folder.mkdir()

    def joined() -> list[str]:
        path = run_folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line["replica"] for line in map(json.loads, lines) if line["kind"] == "joined"]

    def refused(name: str, folder: Path, address: str) -> str:
        words = ("rollout", *config, "--controller", address, "--name", name, "--model.path", str(folder))
        with starling_command(tmp_path, *words, name=f"{name}-{folder.name}") as command:
            assert command.wait() == 1, command.transcript()
        return command.errors

    with starling_command(tmp_path, "controller", *config, name="first") as controller:
        controller.wait_until((run_folder / "controller.json").exists, "its address")
        address = json.loads((run_folder / "controller.json").read_text())["address"]
        words = ("rollout", *config, "--controller", address, "--model.path", str(model))
        with starling_command(tmp_path, *words, name="rollout-0") as rollout:
            controller.wait_until(lambda: joined() == ["rollout-0"], "the first rollout")
            errors = refused("rollout-1", other, address)
            assert f"the controller refuses rollout-1: rollout-1 {DIFFERS}" in errors
            assert f"has the digest {model_digest(other)}, and that of the run is {model_digest(model)}" in errors
            assert joined() == ["rollout-0"]
            controller.interrupt()
            assert (controller.wait(), rollout.wait()) == (0, 0), controller.transcript()
    (run_folder / "controller.json").unlink()
    with starling_command(tmp_path, "controller", *config, name="second") as controller:
        controller.wait_until((run_folder / "controller.json").exists, "its address")
        address = json.loads((run_folder / "controller.json").read_text())["address"]
        assert f"the controller refuses rollout-0: rollout-0 {DIFFERS}" in refused("rollout-0", other, address)
        controller.interrupt()
        assert controller.wait() == 0
    with starling_command(tmp_path, "controller", *config, "--controller.model-path", str(other)) as controller:
        assert controller.wait() == 2, controller.transcript()
    assert f"starling controller: the checkpoint in {other} is not that of this run: " in controller.errors


@pytest.mark.campaign
def test_first_rollout_is_refused_if_the_controller_has_another_checkpoint(tmp_path: Path, model: Path) -> None:
    (tmp_path / "serve.toml").write_text(SERVE_BY_HAND)
    config = ("--config", "serve.toml", "--dir", "run")
    address_file = tmp_path / "run" / "controller.json"
    address_file.parent.mkdir()
    with starling_command(tmp_path, "controller", *config, "--controller.model-path", str(model)) as controller:
        controller.wait_until(address_file.exists, "its address")
        address = json.loads(address_file.read_text())["address"]
        other = flip_bit(model, tmp_path / "other")
        words = ("rollout", *config, "--controller", address, "--model.path", str(other))
        with starling_command(tmp_path, *words, name="rollout-0") as rollout:
            assert rollout.wait() == 1, rollout.transcript()
        assert f"the controller refuses rollout-0: rollout-0 {DIFFERS}" in rollout.errors
        assert f"that of the run is {model_digest(model)}" in rollout.errors
        controller.interrupt()
        assert controller.wait() == 0, controller.transcript()


def test_serve_answers_an_openai_client_until_stopped(tmp_path: Path, model: Path) -> None:
    with starling_command(tmp_path, "serve", "--model", str(model), "--launch.screen", "plain") as command:
        address_file = tmp_path / "runs/serve/attempt-1/api/rollout-0.json"
        command.wait_until(address_file.exists, "an endpoint")
        address = json.loads(address_file.read_text())
        with OpenAI(base_url=address["base_url"], api_key=address["api_key"], timeout=60.0, max_retries=0) as client:
            answer = client.completions.create(model=address["model"], prompt="ab>", max_tokens=4, temperature=0)
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 4
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    assert "stopping gracefully: requests in progress get no answer" in command.output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the only checkpoint of the run in `folder`."""
    [step] = checkpoints(folder)
    return load_file(attempt(folder) / "checkpoints" / step / "model.safetensors")


def test_replay_reproduces_the_weights_of_the_recorded_run(tmp_path: Path) -> None:
    """Bitwise, because a synchronous run trains its groups in order, with the same versions and seeds."""
    first, second = tmp_path / "first", tmp_path / "second"
    with run(make_workdir(first, **SYNCHRONOUS, logging={"trajectories": True})) as command:
        assert command.wait() == 0, command.transcript()
    make_workdir(second, **SYNCHRONOUS)
    (second / "prompts.jsonl").unlink()
    trajectories = attempt(first) / "trajectories"
    with starling_command(second, "policy", "--replay", str(trajectories), "tiny.toml", name="replay") as command:
        assert command.wait() == 0, command.transcript()
    assert "replay: 12 groups = 3 steps x 4 prompts; it trains 3" in command.output
    assert not list((attempt(second) / "logs").glob("rollout*"))
    made, replayed = weights(first), weights(second)
    assert made.keys() == replayed.keys()
    assert all(torch.equal(made[name], replayed[name]) for name in made)
    prompts = [[line["prompts"] for line in metrics(folder, "trained")] for folder in (first, second)]
    assert prompts[0] == prompts[1]
    assert [line["staleness_max"] for line in metrics(second, "step")] == [0, 0, 0]


def test_generate_then_replay_trains_without_rollouts(tmp_path: Path, model: Path) -> None:
    generated, trained = tmp_path / "generated", tmp_path / "trained"
    changes: dict[str, Any] = {**SYNCHRONOUS, "model": {"path": str(model)}}
    make_workdir(generated, **changes)
    drop_scratch(generated)
    with starling_command(generated, "rollout", "--only", "tiny.toml", name="generate") as command:
        assert command.wait() == 0, command.transcript()
    folder = attempt(generated) / "trajectories"
    lines = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    address_file = [(line["step"], line["num_groups"], line["num_usable"]) for line in lines]
    assert address_file == [(1, 4, 4), (2, 4, 4), (3, 4, 4)]
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
    make_workdir(trained, **changes)
    drop_scratch(trained)
    with starling_command(trained, "policy", "--replay", str(folder), "tiny.toml", name="replay") as command:
        assert command.wait() == 0, command.transcript()
    assert [line["staleness_max"] for line in metrics(trained, "step")] == [0, 1, 2], "stale groups are not dropped"
    before = load_file(model / "model.safetensors")
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(trained).items())


def drop_scratch(folder: Path) -> None:
    """Remove `[model.scratch]`, so that the recipe uses the model folder."""
    recipe = tomllib.loads((folder / "tiny.toml").read_text())
    del recipe["model"]["scratch"]
    (folder / "tiny.toml").write_text(tomli_w.dumps(recipe))
    assert os.path.isdir(recipe["model"]["path"])

"""Runs that train nothing, whose weights one process reads and all rollouts pull."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from system_runs import (
    WORDS,
    make_varied_model,
    make_workdir,
    num_steps,
    rollouts_on_other_hosts,
    run,
    sentence,
    starling_command,
)

from starling.common.folder_digests import model_digest
from starling.controller.core.records import CheckpointLoaded
from starling.controller.shell.journal.journal import Journal

pytestmark = pytest.mark.system

FAN_OUT = ("--launch.fan-out", "true", "--launch.screen", "plain", "--network.heartbeat-s", "0.3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_varied_model(tmp_path_factory.mktemp("model"))


def adoptions(folder: Path) -> list[dict[str, Any]]:
    """Return the adoptions of the run in `folder`."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in map(json.loads, (one for one in lines if one.endswith("\n"))) if line["kind"] == "adopted"]


def test_answers_are_those_of_rollouts_that_read_the_folder(tmp_path: Path, model: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"{word}>"}) + "\n" for word in WORDS))
    arguments = ("infer", "prompts.jsonl", "--model", str(model), "--num-gpus", "2", "--max-tokens", "8", "--plain")
    for name, flags in (("own", ("--launch.screen", "plain")), ("pulled", FAN_OUT)):
        with starling_command(tmp_path, *arguments, "--run.name", name, *flags, name=name) as command:
            assert command.wait() == 0, command.transcript()
    own, pulled = (tmp_path / "runs" / name / "attempt-1" for name in ("own", "pulled"))
    assert (pulled / "answers.jsonl").read_text() == (own / "answers.jsonl").read_text()
    adopted = adoptions(pulled)
    assert {line["replica"] for line in adopted} == {"rollout-0", "rollout-1"}
    assert all(line["attested"] and line["version"] == 0 for line in adopted)
    for folder in (own, pulled):  # both prove the same checkpoint
        with closing(Journal(folder / "journal.sqlite")) as journal:
            [loaded] = [record for record in journal.records() if isinstance(record, CheckpointLoaded)]
        assert loaded.digest == model_digest(model)


@pytest.mark.campaign
def test_rollout_that_joins_later_reads_no_weights_from_the_disk(tmp_path: Path, model: Path) -> None:
    copy, folder = tmp_path / "model", tmp_path / "runs/serve/attempt-1"
    shutil.copytree(model, copy)
    with starling_command(tmp_path, "serve", "--model", str(copy), "--num-gpus", "2", *FAN_OUT) as command:
        command.wait_until(lambda: len(adoptions(folder)) == 2, "the adoptions of both")
        for weights in copy.glob("*.safetensors"):
            weights.unlink()
        command.process_titled("rollout-1").kill()
        command.wait_until(lambda: len(adoptions(folder)) == 3, "its next adoption")
        found = folder / "api/rollout-1.json"
        command.wait_until(found.exists, "its address")
        address = json.loads(found.read_text())
        with OpenAI(base_url=address["base_url"], api_key=address["api_key"], timeout=60.0) as client:
            answer = client.completions.create(model=address["model"], prompt="ab>", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        check_follower(tmp_path, folder)
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    assert [(line["replica"], line["attested"]) for line in adoptions(folder)[2:]] == [
        ("rollout-1", True),
        ("rollout-7", True),
    ]


BY_HAND = """
[run]
kind = "serve"
id = "by-hand"
[network]
curve = false
heartbeat_s = 0.3
[data]
source = ""
[controller]
fan_out = true
num_rollouts = 3
relay_from_mb = 0.0
"""


@pytest.mark.campaign
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another name of the host")
def test_rollouts_on_other_hosts_pass_the_weights_on(tmp_path: Path, model: Path) -> None:
    """The policy sends the weights once, however many hosts need them."""
    (tmp_path / "serve.toml").write_text(BY_HAND)
    (tmp_path / "run").mkdir()
    shutil.copytree(model, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    config = ["--config", "serve.toml", "--dir", "run"]
    with ExitStack() as stack:
        controller = stack.enter_context(starling_command(tmp_path, "controller", *config, name="controller"))
        controller.wait_until((tmp_path / "run/controller.json").exists, "its address")
        at = ["--controller", json.loads((tmp_path / "run/controller.json").read_text())["address"]]
        policy = stack.enter_context(
            starling_command(tmp_path, "policy", *config, *at, "--model.path", str(model), name="policy")
        )
        stack.enter_context(rollouts_on_other_hosts(tmp_path, 3, *config, *at, "--model.path", "empty"))
        controller.wait_until(lambda: len(adoptions(tmp_path / "run")) == 3, "three adoptions")
        controller.interrupt()
        assert controller.wait() == 0, controller.transcript()
        assert policy.wait() == 0, policy.transcript()
    adopted = adoptions(tmp_path / "run")
    assert all(line["attested"] for line in adopted)
    assert [line["source"] for line in adopted].count("policy-0") == 1


def check_follower(place: Path, folder: Path) -> None:
    """Serve the weights of the run in `folder` by another command, which is interrupted."""
    with starling_command(place, "keys", "make", str(folder / "keys"), "rollout-7", name="keys") as keys:
        assert keys.wait() == 0, keys.transcript()
    address = json.loads((folder / "controller.json").read_text())["address"]
    files = ("--config", str(folder / "config.toml"), "--key", str(folder / "keys/rollout-7.json"))
    with starling_command(place, "serve", "--from", address, *files, name="follower", fresh=True) as follower:
        follower.wait_until((place / "runs/serve/attempt-2/api/rollout-7.json").exists, "its address")
        follower.wait_until(lambda: len(adoptions(folder)) == 4, "its adoption")
        follower.interrupt()
        assert follower.wait() == 0, follower.transcript()


def test_fan_out_beside_a_trainer_is_refused(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path)
    with starling_command(folder, "run", "tiny.toml", "--launch.fan-out", "true", name="run") as command:
        assert command.wait() == 2
    expected = "launch.fan_out = true, but run.kind = 'rl' has a policy that publishes its weights; remove it"
    assert expected in sentence(command)


@pytest.fixture
def bucket(model: Path) -> Iterator[tuple[str, ...]]:
    """Serve the model by S3 from a separate process; return the flags of a run that loads it from there."""
    import s3fs

    options = {"key": "testing", "secret": "testing"}
    with subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", "0"], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            options["endpoint_url"] = next(
                found[0] for line in server.stderr if (found := re.search(r"http://[0-9.:]+", line))
            )
            threading.Thread(target=server.stderr.read, daemon=True).start()  # an unread pipe would block the server
            store = s3fs.S3FileSystem(**options)
            store.mkdir("models")
            store.put(str(model), "models/tiny", recursive=True)
            table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
            yield ("--policy.weights-from", "s3://models/tiny", "--policy.saving.storage-options", f"{{{table}}}")
        finally:
            server.kill()


def test_weights_of_s3_are_fetched_once_and_answer_as_those_of_the_folder(
    tmp_path: Path, model: Path, bucket: tuple[str, ...]
) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": f"{word}>"}) + "\n" for word in WORDS))
    shutil.copytree(model, tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    words = ("infer", "prompts.jsonl", "--num-gpus", "2", "--max-tokens", "8", "--plain", "--launch.screen", "plain")
    own, fetched = ("--model", str(model), "--run.name", "own"), ("--model", "empty", "--run.name", "s3")
    for name, flags in (("own", own), ("s3", (*fetched, *FAN_OUT, *bucket))):
        with starling_command(tmp_path, *words, *flags, name=name) as command:
            assert command.wait() == 0, command.transcript()
    folders = [tmp_path / "runs" / name / "attempt-1" for name in ("own", "s3")]
    answers = [(folder / "answers.jsonl").read_text() for folder in folders]
    assert answers[0] == answers[1]
    assert (folders[1] / "logs" / "policy-0.log").read_text().count("weights_fetched") == 1
    assert not list(folders[1].glob(".weights*"))
    with closing(Journal(folders[1] / "journal.sqlite")) as journal:
        [loaded] = [record for record in journal.records() if isinstance(record, CheckpointLoaded)]
    assert (loaded.name, loaded.digest) == ("policy-0", model_digest(model))


@pytest.mark.campaign
def test_policy_trains_from_the_weights_of_s3(tmp_path: Path, model: Path, bucket: tuple[str, ...]) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(model, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    folder = make_workdir(tmp_path, model={}, rl={"num_steps": 1}, sft={"num_steps": 0}, evaluation={})
    with run(folder, "--model.path", str(empty), *bucket) as command:
        assert command.wait() == 0, command.transcript()
    assert num_steps(folder) == 1


def test_weights_from_elsewhere_without_a_policy_are_refused(tmp_path: Path, model: Path) -> None:
    flags = ("--model", str(model), "--policy.weights-from", "s3://models/tiny")
    with starling_command(tmp_path, "serve", *flags, name="serve") as command:
        assert command.wait() == 2
    expected = "policy.weights_from = 's3://models/tiny' is read by a policy, and this run has none; set launch.fan_out"
    assert expected in sentence(command)

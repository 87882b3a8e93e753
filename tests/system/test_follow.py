"""`starling serve --from`: a server that takes the weights of a run while it trains, and none of its work."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from system_runs import attempt, make_workdir, metrics, run, sentence, starling_command

pytestmark = pytest.mark.system


def lines_of(folder: Path, kind: str, replica: str) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, kind) if line["replica"] == replica]


@pytest.mark.campaign
def test_server_follows_a_run_without_weights_on_its_disk(tmp_path: Path) -> None:
    endless = {"num_steps": 10_000, "max_staleness": 1}  # until it is interrupted
    folder = make_workdir(tmp_path, rl=endless, sft={"num_steps": 0}, evaluation={"at_end": False})
    with run(folder) as command:
        command.wait_until(lambda: metrics(folder, "published"), "a version")
        run_folder = attempt(folder)
        with starling_command(folder, "keys", "make", str(run_folder / "keys"), "rollout-7", name="keys") as keys:
            assert keys.wait() == 0, keys.transcript()
        model = folder / "elsewhere"
        shutil.copytree(run_folder / "model", model, ignore=shutil.ignore_patterns("*.safetensors"))
        address = json.loads((run_folder / "controller.json").read_text())["address"]
        arguments = ("--from", address, "--config", str(run_folder / "config.toml"), "--model", str(model))
        key = ("--key", str(run_folder / "keys/rollout-7.json"))
        with starling_command(folder, "serve", *arguments, *key, name="server", fresh=True) as server:
            found = folder / "runs/serve/attempt-1/api/rollout-7.json"
            server.wait_until(found.exists, "its address")
            server.wait_until(lambda: len(lines_of(folder, "adopted", "rollout-7")) > 2, "its adoptions")
            api = json.loads(found.read_text())
            with closing(OpenAI(base_url=api["base_url"], api_key=api["api_key"])) as client:
                answer = client.completions.create(model=api["model"], prompt="abc>", max_tokens=4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens > 0
            command.interrupt()
            assert command.wait() == 0, command.transcript()
            assert server.wait() == 0, server.transcript()
    adopted = lines_of(folder, "adopted", "rollout-7")
    assert all(line["attested"] for line in adopted)
    assert [line["version"] for line in adopted] == sorted({line["version"] for line in adopted})
    assert not lines_of(folder, "interrupted", "rollout-7")
    assert "Traceback" not in server.errors


def test_what_cannot_be_followed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path)
    served = '[run]\nid = "a/1"\nkind = "serve"\n[data]\nsource = ""\n[network]\ncurve = false\n'
    (folder / "served.toml").write_text(served)
    (folder / "open.toml").write_text('[run]\nid = "a/1"\n[network]\ncurve = true\n')
    (folder / "recipe.toml").write_text("[network]\ncurve = true\n")
    with starling_command(folder, "keys", "make", "keys", "operator-0", name="keys") as keys:
        assert keys.wait() == 0, keys.transcript()
    at = ("--from", "tcp://127.0.0.1:1")
    expected = {
        ("--from", "somewhere"): "--from somewhere is not an address; write tcp://host:port",
        at: "--config is missing; give the run's config.toml",
        (*at, "--config", "recipe.toml"): "recipe.toml has no run.id, as a recipe has none",
        (*at, "--config", "open.toml"): "--key is missing; make a key of this replica's own where the run is",
        (*at, "--config", "open.toml", "--key", "keys/operator-0.json"): "was made for operator-0, which is no rollout",
        (*at, "--config", "served.toml"): "run.kind = 'serve', which publishes no weights to serve",
        (*at, "--config", "open.toml", "--num-gpus", "2"): "--num-gpus is not for --from, which starts one replica",
        ("--key", "keys/operator-0.json"): "--key is for the weights of a run; give --from tcp://host:port too",
    }
    for arguments, text in expected.items():
        with starling_command(folder, "serve", *arguments, name="serve") as command:
            assert command.wait() == 2, command.transcript()
            assert text in sentence(command)

"""The HTTP server of a rollout process: its address file, its answers, and its end with the replica."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import openai
import pytest
import torch
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica
from transformers import AutoConfig, AutoModelForCausalLM

from starling.cli.model.scratch import ScratchSettings, make_model_folder

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model_folder(ScratchSettings(config=SMALL, max_length=4096), folder)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def wait_for_address(folder: Path) -> dict[str, str]:
    """Wait for the address file, and return its content."""
    file, until = folder / "api/rollout-0.json", time.monotonic() + DEADLINE_S
    while not file.is_file():
        assert time.monotonic() < until, "the server did not start to listen"
        time.sleep(0.05)
    assert file.stat().st_mode & 0o777 == 0o600
    server: dict[str, str] = json.loads(file.read_text())
    return server


def test_api_server_starts_and_ends_with_its_replica(hub: FakeHub, trained_model: Path, tmp_path: Path) -> None:
    flags = ("--model.path", str(trained_model), "--model.device", "cpu", "--rollout.load-weights", "true")
    api_flags = ("--rollout.api.enabled", "true", "--rollout.api.key", "a key of mine")
    with replica(hub, "rollout-0", tmp_path, *flags, *api_flags) as process:
        hello, _ = hub.hello("rollout-0")
        assert hello.version == 0
        server = wait_for_address(tmp_path)
        assert server["api_key"] == "a key of mine"
        client = openai.OpenAI(
            base_url=server["base_url"], api_key=server["api_key"], max_retries=0, timeout=DEADLINE_S
        )
        answer = client.completions.create(model=server["model"], prompt="abc", max_tokens=5)
        assert answer.usage is not None
        num_tokens = answer.usage.completion_tokens
        assert 1 <= num_tokens <= 5, "it may end itself"
        versions = answer.choices[0].starling["versions"]  # type: ignore[attr-defined]
        assert versions == [{"version": 0, "start": 0, "end": num_tokens}]
        assert client.models.retrieve("tiny").starling["version"] == 0  # type: ignore[attr-defined]

        stream = client.completions.create(model="tiny", prompt="q", max_tokens=4000, temperature=0, stream=True)
        next(stream)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="this replica is shutting down; use another one") as failed:
            list(stream)
        assert failed.value.code == "stopping"
        assert exit_code(process) == 0
    assert not (tmp_path / "api/rollout-0.json").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--rollout.api.host", "no.such.host.invalid"), "the server cannot listen on no.such.host.invalid:0"),
        (("--rollout.api.port", "70000"), "rollout.api.port = 70000"),
    ],
)
def test_invalid_api_address_is_rejected(
    hub: FakeHub, trained_model: Path, tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    shared = ("--model.path", str(trained_model), "--model.device", "cpu", "--rollout.load-weights", "true")
    with replica(hub, "rollout-0", tmp_path, *shared, "--rollout.api.enabled", "true", *flags) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0
        assert problem in errors
        assert "Traceback" not in errors

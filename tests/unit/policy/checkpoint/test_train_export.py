"""Export of saved states in Hugging Face format, outside a run."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from starling.cli.main import main
from starling.cli.model.export import while_states_are_replaced
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.checkpoint.huggingface import export_hf
from starling.policy.train.checkpoint.state import HostBuffers, StateMetadata, StateStore, in_section, take_state
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.examples import PreferencePair
from starling.policy.train.learner import Learner
from starling.policy.train.model.load import load_model, version_tensors
from starling.policy.train.model.lora import export_model, load_adapters
from starling.weightsync.tensors.adapters import add_adapters

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}
PAIR = PreferencePair(*(np.array(ids, dtype=np.int32) for ids in ([3, 4], [5, 6], [6])))
Make = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model folder without weights."""
    folder = tmp_path / "model"
    make_model_folder(ScratchSettings(config=CONFIG, alphabet="abcd>", max_length=64), folder)
    return folder


def attempt(tmp_path: Path, model: Path) -> Path:
    """Return the folder of an attempt that saved a state of version 4."""
    folder = tmp_path / "run" / "attempt-1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'[model]\npath = "{model}"\n')
    learner = Learner(lambda: load_model(model, init="random", seed=4), PolicySettings())
    StateStore(Storage(str(folder / "states"))).write(learner.take_state(4, run="run/attempt-1"))
    return folder


def test_export_accepts_run_states_folder_and_state(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = attempt(tmp_path, model)
    expected = version_tensors(load_model(model, init="random", seed=4))
    for number, source in enumerate((folder.parent, folder, folder / "states", folder / "states" / "version-4")):
        out = tmp_path / f"out-{number}"
        assert main(["export", str(source), str(out)]) == 0
        assert capsys.readouterr().out == f"version 4 is in {out}, from {folder / 'states' / 'version-4'}\n"
        again = version_tensors(load_model(out))
        assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
        assert (out / "tokenizer.json").exists()


@pytest.mark.campaign
def test_export_prints_one_line_and_nothing_of_libraries(tmp_path: Path, model: Path) -> None:
    folder, out = attempt(tmp_path, model), tmp_path / "out"
    words = [sys.executable, "-m", "starling.cli.main", "export", str(folder), str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("step", "complete", "taken"), [(6, True, "step-6"), (6, False, "version-4"), (4, True, "version-4")]
)
def test_export_takes_the_newest_of_states_and_checkpoints(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], step: int, complete: bool, taken: str
) -> None:
    folder, out = attempt(tmp_path, model), tmp_path / "out"
    newer = load_model(model, init="random", seed=5)
    checkpoints = Storage(str(folder / "checkpoints"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    for version in (2, step):
        export_hf(newer, tokenizer, checkpoints, f"step-{version}", weights=version_tensors(newer))
    if not complete:
        (folder / "checkpoints" / f"step-{step}" / "config.json").unlink()
    assert main(["export", str(folder.parent), str(out)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(taken)
    expected = newer if taken == "step-6" else load_model(model, init="random", seed=4)
    again = version_tensors(load_model(out))
    assert all(torch.equal(again[name], tensor) for name, tensor in version_tensors(expected).items())
    assert (out / "tokenizer.json").exists()
    assert not list(tmp_path.glob(".out*"))


def test_export_of_a_run_without_states_takes_its_checkpoint(tmp_path: Path, model: Path) -> None:
    folder, out = attempt(tmp_path, model), tmp_path / "out"
    made = load_model(model, init="random", seed=5)
    export_hf(made, None, Storage(str(folder / "checkpoints")), "step-2", weights=version_tensors(made))
    assert main(["export", str(folder), str(tmp_path / "ema"), "--ema"]) == 2
    shutil.rmtree(folder / "states")
    assert main(["export", str(folder), str(out)]) == 0
    again = version_tensors(load_model(out))
    assert all(torch.equal(again[name], tensor) for name, tensor in version_tensors(made).items())


def test_export_files_have_bounded_size(tmp_path: Path, model: Path) -> None:
    big = tmp_path / "big"
    config = {**CONFIG, "hidden_size": 256, "intermediate_size": 512}
    make_model_folder(ScratchSettings(config=config, alphabet="abcd>", max_length=64), big)
    folder = attempt(tmp_path, big)
    assert main(["export", str(folder), str(tmp_path / "out"), "--shard-mb", "2"]) == 0
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert all(file.stat().st_size < 2_100_000 for file in files)
    expected, again = (
        version_tensors(load_model(big, init="random", seed=4)),
        version_tensors(load_model(tmp_path / "out")),
    )
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())


def test_export_ema_writes_the_ema_weights(tmp_path: Path, model: Path) -> None:
    made = load_model(model, init="random", seed=4)
    held = {
        **in_section("weights/", version_tensors(made)),
        "trainer/exp_avg:model.norm.weight": torch.ones(32),
        "trainer/ema:model.norm.weight": torch.full((32,), 0.25),
    }
    StateStore(Storage(str(tmp_path / "states"))).write(
        take_state(StateMetadata(run="r", version=4), held, torch.device("cpu"), HostBuffers())
    )
    arguments = ["export", str(tmp_path / "states"), str(tmp_path / "out"), "--model", str(model)]
    assert main([*arguments, "--ema"]) == 0
    again = version_tensors(load_model(tmp_path / "out"))
    assert again["model.norm.weight"].tolist() == [0.25] * 32
    assert torch.equal(again["model.embed_tokens.weight"], version_tensors(made)["model.embed_tokens.weight"])


def test_export_reward_model_scores(tmp_path: Path, model: Path) -> None:
    learner = Learner(lambda: load_model(model, init="random", seed=4, scores=True), PolicySettings())
    learner.prefer([PAIR], objective="reward_model", step=1, num_steps=2)
    StateStore(Storage(str(tmp_path / "states"))).write(learner.take_state(1))
    assert main(["export", str(tmp_path / "states"), str(tmp_path / "out"), "--model", str(model)]) == 0
    again = version_tensors(load_model(tmp_path / "out", scores=True))
    assert again.keys() == learner.tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in learner.tensors.items())
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize("merged", [False, True])
def test_export_adapters_follows_run_settings(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], merged: bool
) -> None:
    load_model(model, init="random", seed=4).save_pretrained(model)
    lora = LoraSettings(rank=2, targets=("q_proj",), merged=merged)

    def load() -> Any:
        made = load_model(model)
        add_adapters(made, lora, seed=7)
        return made

    learner = Learner(load, PolicySettings())
    with torch.no_grad():
        for tensor in learner.tensors.values():
            tensor += 0.5
    folder = tmp_path / "run" / "attempt-1"
    StateStore(Storage(str(folder / "states"))).write(learner.take_state(4))
    assert main(["export", str(folder), str(tmp_path / "out"), "--model", str(model)]) == 2
    assert "contains adapters, and [model.lora] is not known" in capsys.readouterr().err
    lora_settings = f'targets = ["q_proj"]\nmerged = {str(merged).lower()}\n'
    (folder / "config.toml").write_text(f'[model]\npath = "{model}"\n[model.lora]\nrank = 2\n{lora_settings}')
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    if merged:
        again, expected = version_tensors(load_model(tmp_path / "out")), export_model(learner.model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
        return
    other = load()
    load_adapters(other, tmp_path / "out")
    assert all(torch.equal(tensor, learner.tensors[name]) for name, tensor in version_tensors(other).items())


def test_export_full_disk_is_one_sentence(tmp_path: Path, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<word-{number}>" for number in range(20_000)])
    made = load_model(model, init="random")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))  # more than the weights, less than the tokens
    try:
        with pytest.raises(ConfigError, match=r"step-1 cannot be written \(.+\): free space or choose another folder"):
            export_hf(made, tokenizer, Storage(str(tmp_path / "out")), "step-1", weights=version_tensors(made))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "out").iterdir()) == []


def test_export_errors_are_one_sentence(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = attempt(tmp_path, model)
    other = tmp_path / "other"
    make_model_folder(
        ScratchSettings(config={**CONFIG, "num_hidden_layers": 1}, alphabet="abcd>", max_length=64), other
    )
    (folder / "states").rename(tmp_path / "states")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    states, out = str(tmp_path / "states"), str(tmp_path / "out")
    for arguments, words in (
        ([states, out], f"no configuration near {states} that names the trained model; give its folder with --model"),
        ([str(folder), out], f"there is no intact state in {folder}"),
        ([states, str(tmp_path / "full"), "--model", str(model)], "exists and is not empty"),
        ([states, out, "--model", str(model), "--ema"], "has no EMA weights: omit --ema"),
        ([states, out, "--model", str(other)], "of another model: it has model.layers.1.input_layernorm.weight"),
        ([str(tmp_path / "nowhere"), out], "nowhere does not exist"),
    ):
        assert main(["export", *arguments]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
    assert not Path(out).exists()


def test_export_of_a_state_that_a_run_removes_meanwhile_takes_the_next(tmp_path: Path) -> None:
    states = tmp_path / "states"
    (states / "version-1").mkdir(parents=True)

    def read_newest() -> str:
        [newest] = states.iterdir()
        if newest.name == "version-3":
            return newest.name
        newest.rename(states / f"version-{int(newest.name[-1]) + 1}")
        raise ConfigError(f"{newest} cannot be read")

    assert while_states_are_replaced(str(tmp_path), read_newest) == "version-3"


def test_export_of_a_state_that_stays_fails_once(tmp_path: Path) -> None:
    (tmp_path / "states" / "version-1").mkdir(parents=True)
    tries = []

    def fail() -> None:
        tries.append(1)
        raise ConfigError("the state is damaged")

    with pytest.raises(ConfigError, match="is damaged"):
        while_states_are_replaced(str(tmp_path), fail)
    assert len(tries) == 1

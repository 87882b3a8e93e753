"""Digests of an exported model: a damaged file is named by whoever loads the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from starling.cli.main import main
from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError
from starling.common.folder_digests import DIGESTS, check_digests
from starling.common.service import check_model_folder
from starling.policy.train.checkpoint.huggingface import export_hf
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.model.load import load_model, version_tensors

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {**SIZES, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": True}


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Return the folder of an attempt with one exported checkpoint, of step 2."""
    source, folder = tmp_path / "model", tmp_path / "run" / "attempt-1"
    make_model_folder(ScratchSettings(config=CONFIG, alphabet="abcd>", max_length=64), source)
    model = load_model(source, init="random", seed=5)
    checkpoints, tokenizer = Storage(str(folder / "checkpoints")), AutoTokenizer.from_pretrained(source)
    export_hf(model, tokenizer, checkpoints, "step-2", weights=version_tensors(model))
    (folder / "config.toml").write_text(f'[model]\npath = "{source}"\n')
    return folder


@pytest.fixture
def exported(attempt: Path) -> Path:
    return attempt / "checkpoints" / "step-2"


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_export_has_the_digest_of_each_file(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", DIGESTS} <= names
    assert json.loads((exported / DIGESTS).read_text()).keys() == names - {DIGESTS}
    check_model_folder(str(exported), weights=True)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_damaged_file_is_named(exported: Path, name: str, damage: Callable[[Path], Any]) -> None:
    damage(exported / name)
    with pytest.raises(ConfigError) as error:
        check_model_folder(str(exported), weights=True)
    assert str(exported) in str(error.value)
    assert name in str(error.value) or "no weights" in str(error.value)
    assert "\n" not in str(error.value)
    (exported / DIGESTS).unlink()
    if name != "model.safetensors":
        check_model_folder(str(exported), weights=True)


def test_weights_are_read_only_by_a_process_that_loads_them(exported: Path) -> None:
    flip(exported / "model.safetensors")
    check_model_folder(str(exported), weights=False)
    check_model_folder(str(exported), weights=True, reads_weights=False)
    (exported / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors is missing, and starling-digests\.json lists it"):
        check_model_folder(str(exported), weights=False)


@pytest.mark.parametrize("content", ["", '{"config.json": "', "[]", "\0\0"])
def test_damaged_digests_are_one_sentence(exported: Path, content: str) -> None:
    (exported / DIGESTS).write_text(content)
    with pytest.raises(ConfigError, match=r"starling-digests\.json cannot be read \(it is cut off or damaged\); copy"):
        check_digests(exported)


def test_damaged_checkpoint_is_not_exported(
    attempt: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(attempt), str(tmp_path / "good")]) == 0
    check_model_folder(str(tmp_path / "good"), weights=True)
    flip(exported / "model.safetensors")
    assert main(["export", str(attempt), str(tmp_path / "out")]) == 2
    assert f"{exported}/model.safetensors does not match its digest" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

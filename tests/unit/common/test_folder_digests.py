"""The digest of a model folder: the same for copies, another for any change of what an engine reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.folder_digests import DIGESTS, check_digests, model_digest, write_digests

TEMPLATE = "additional_chat_templates/default.jinja"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    contents = {"config.json": "{}", "model.safetensors": "weights", "pytorch_model.bin": "old", "tokenizer.json": "{}"}
    for name, text in contents.items():
        (path / name).write_text(text)
    return path


def test_copies_of_a_folder_have_one_digest(folder: Path, tmp_path: Path) -> None:
    digest = model_digest(folder)
    assert len(bytes.fromhex(digest)) == 16
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in ("README.md", "LICENSE", ".gitattributes", "consolidated.00.pth", "model.gguf", "optimizer.pt"):
        (copy / name).write_text("about the model")
    (copy / "pytorch_model.bin").unlink()  # not read where there are safetensors
    (copy / "logs").mkdir()
    assert model_digest(copy) == digest


def test_recorded_digests_are_those_of_the_files(folder: Path) -> None:
    digest = model_digest(folder)
    write_digests(folder)
    assert model_digest(folder) == digest
    (folder / DIGESTS).write_text("[")
    with pytest.raises(ConfigError, match="cannot be read"):
        model_digest(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors", "tokenizer.json", TEMPLATE, "chat_template.jinja", "merges.txt"),
        *("source.spm", "bpe.codes", "prophetnet.tokenizer", "tokenizer.model.v3", "spk_dict.pt", "of_a_later_version"),
        *(".model.safetensors", ".tokenizer.5.0.json"),
    ],
)
def test_any_file_that_an_engine_reads_changes_the_digest(name: str, folder: Path) -> None:
    digest = model_digest(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("other")
    assert model_digest(folder) != digest


def test_weights_of_an_older_format_are_read_where_there_are_no_others(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    digest = model_digest(folder)
    (folder / "pytorch_model.bin").write_text("other")
    assert model_digest(folder) != digest


@pytest.mark.parametrize("beside", ["decoy.safetensors", "adapter_config.json"])
def test_weights_that_transformers_prefers_change_the_digest(beside: str, folder: Path) -> None:
    # It loads pytorch_model.bin beside any other *.safetensors, and adapter_model.bin where there is an adapter.
    if beside == "decoy.safetensors":
        (folder / "model.safetensors").unlink()
    (folder / beside).write_text("{}")
    digest = model_digest(folder)
    (folder / "pytorch_model.bin").write_text("other")
    assert model_digest(folder) != digest


@pytest.mark.parametrize(
    "name", ["/dev/zero", "../other", "a/../../other", "a\0b", "/", "\ud800", "a" * 256, "a/" * 999]
)
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_text("x")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / DIGESTS).write_text(json.dumps({name: "0" * 32}))
    with pytest.raises(ConfigError, match="which is no file of this folder"):
        check_digests(folder)


def test_listed_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / DIGESTS).write_text(json.dumps({"config.json": "0" * 32}))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read \(it is no regular file\)"):
        check_digests(tmp_path)


def test_nested_digests_are_damaged(tmp_path: Path) -> None:
    (tmp_path / DIGESTS).write_text("[" * 200_000)
    for read in (check_digests, model_digest):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(tmp_path)

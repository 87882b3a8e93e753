"""Folders of which vLLM would load other weights than transformers, and so than the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.rollout.engine.vllm.weight_files import check_weight_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_folder(folder: Path, *names: str, config: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config or {}))
    for name in names:
        (folder / name).write_text("")
    return folder


def write_index(folder: Path, *names: str, ending: str = "model.safetensors") -> None:
    (folder / f"{ending}.index.json").write_text(json.dumps({"weight_map": dict(enumerate(names))}))


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors",),
        ("model.safetensors", "pytorch_model.bin", "training_args.bin"),
        ("pytorch_model.bin", "training_args.bin", "optimizer.bin"),
    ],
)
def test_usual_folder_is_accepted(names: tuple[str, ...], tmp_path: Path) -> None:
    check_weight_files(write_folder(tmp_path, *names))


def test_shards_beside_other_files_are_accepted(tmp_path: Path) -> None:
    write_index(tmp_path, *SHARDS)
    check_weight_files(write_folder(tmp_path, *SHARDS, "consolidated.safetensors", "pytorch_model.bin"))


def test_weights_that_the_configuration_names_are_accepted(tmp_path: Path) -> None:
    check_weight_files(
        write_folder(tmp_path, "other.safetensors", config={"transformers_weights": "other.safetensors"})
    )


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "zz.safetensors"),
        ("model.safetensors", "consolidated.safetensors"),
        ("decoy.safetensors", "pytorch_model.bin"),
        ("pytorch_model.bin", "other.bin"),
        ("model.safetensors", "adapter_config.json", "adapter_model.safetensors"),
    ],
)
def test_other_weights_beside_them_are_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of transformers and vllm only one would load .*; leave only"):
        check_weight_files(write_folder(tmp_path, *names))


def test_index_beside_a_whole_file_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path, *SHARDS)
    with pytest.raises(ConfigError, match="only one would load"):
        check_weight_files(write_folder(tmp_path, *SHARDS, "model.safetensors"))


def test_damaged_index_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ConfigError, match=r"the index of the weights in .* cannot be read"):
        check_weight_files(write_folder(tmp_path, *SHARDS))

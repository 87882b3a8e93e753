"""Folders of which vLLM would load other weights than transformers, and so than the policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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


def test_hidden_files_are_not_loaded(tmp_path: Path) -> None:
    check_weight_files(write_folder(tmp_path, "model.safetensors", "._model.safetensors"))  # macOS leaves such files


def write_shards(folder: Path, *, tensors: str, names: tuple[str, ...], ending: str = "safetensors") -> Path:
    """Write a file for each of `names` with the tensor of that position."""
    for name, tensor in zip(names, tensors, strict=True):
        if ending == "safetensors":
            save_file({tensor: torch.zeros(1)}, folder / name)
        else:
            torch.save({tensor: torch.zeros(1)}, folder / name)
    write_index(folder, *names, ending="model.safetensors" if ending == "safetensors" else "pytorch_model.bin")
    return write_folder(folder)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_tensor_in_several_files_that_are_loaded_in_different_orders_is_refused(ending: str, tmp_path: Path) -> None:
    folder = write_shards(
        tmp_path, tensors="aab", names=(f"m-10.{ending}", f"m-9.{ending}", f"m.{ending}"), ending=ending
    )
    with pytest.raises(ConfigError, match=r"m-9\.\w+ and m-10\.\w+ both have a, of which transformers and vllm would"):
        check_weight_files(folder)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_of_different_tensors_are_accepted_in_any_order(ending: str, tmp_path: Path) -> None:
    check_weight_files(write_shards(tmp_path, tensors="ab", names=(f"m-10.{ending}", f"m-9.{ending}"), ending=ending))


def test_damaged_shard_is_one_sentence(tmp_path: Path) -> None:
    write_index(tmp_path, "m-10.safetensors", "m-9.safetensors")
    with pytest.raises(ConfigError, match=r"the weights in .*m-10.safetensors cannot be read \(.*\): replace them"):
        check_weight_files(write_folder(tmp_path, "m-10.safetensors", "m-9.safetensors"))


def test_damaged_index_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(ConfigError, match=r"the index of the weights in .* cannot be read"):
        check_weight_files(write_folder(tmp_path, *SHARDS))

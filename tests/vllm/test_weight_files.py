"""Which files of a model folder vLLM and transformers load: their own code agrees with what is computed here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import spec_of
from transformers import Qwen3Config
from transformers.modeling_utils import _get_resolved_checkpoint_files
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.config import get_config

from starling.rollout.engine.vllm.launch import arguments
from starling.rollout.engine.vllm.weight_files import _of_transformers, _of_vllm

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "names",
    [
        ("model.safetensors", "zz.safetensors"),
        ("model.safetensors", "consolidated.safetensors", "pytorch_model.bin"),
        ("a.safetensors", "b.safetensors", "consolidated.safetensors", INDEX),
        ("model.safetensors", "a.safetensors", "b.safetensors", INDEX),
        ("decoy.safetensors", "pytorch_model.bin"),
        ("pytorch_model.bin", "other.bin", "training_args.bin"),
    ],
)
def test_files_are_those_that_the_loaders_take(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("config.json", *names):
        (tmp_path / name).write_text("{}")
    if INDEX in names:
        (tmp_path / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": {"1": "a.safetensors", "2": "b.safetensors"}})
        )
    loader = DefaultModelLoader(LoadConfig(load_format="hf"))
    taken = loader._prepare_weights(str(tmp_path), None, None, True, None)[1]
    assert _of_vllm(tmp_path) == {Path(path).name for path in taken}
    found, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False)
    assert _of_transformers(tmp_path) == {Path(path).name for path in found}


def test_configuration_in_the_format_of_mistral_is_not_read(tmp_path: Path) -> None:
    Qwen3Config(vocab_size=77).save_pretrained(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 1, "n_heads": 1, "vocab_size": 5}))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "consolidated.safetensors").write_text("")
    made = arguments(spec_of(tmp_path), on_cpu=True)
    config = get_config(str(tmp_path), trust_remote_code=False, config_format=made["config_format"])
    assert (config.model_type, config.vocab_size) == ("qwen3", 77)

"""Model folders that name files elsewhere, other models, or kernels of a hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.model_folder import check_indexes, check_named_files

SHARD = "model-00001-of-00001.safetensors"


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "entry",
    [
        {"speculators_config": {"verifier": {"name_or_path": "/models/other"}}},
        {"text_model_id": "owner/model"},
        {"audio_config": {}, "audio_model_id": "/models/other"},
        {"vision_config": {"architecture": "hf-hub:owner/model"}},
        {"configuration_files": ["config.1.0.0.json"]},
        {"transformers_weights": "inner/model.safetensors"},
        {"text_config": {"transformers_weights": "inner/model.safetensors.index.json"}},
        {"transformers_weights": "adapter_model.bin"},
        {"transformers_weights": ["model.safetensors"]},
    ],
)
def test_configuration_that_has_other_files_loaded_is_refused(entry: dict[str, object], tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "qwen3", **entry})
    with pytest.raises(ConfigError, match=r"config\.json has \w+ = .*[;,] ") as caught:
        check_named_files(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "files", [["../tokenizer.1.0.json"], ["/other/tokenizer.1.0.json"], {"a/tokenizer.1.0.json": 1}, "a/b.json"]
)
def test_tokenizer_elsewhere_is_refused(files: object, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"fast_tokenizer_files": files})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has fast_tokenizer_files = .*, which is no file"):
        check_named_files(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"vocab": "/other/vocab.json"},
        {"merges": "m.txt"},
        {"merges_file": "/other/merges.txt"},
        {"gguf_file": "../x.gguf"},
        {"init_inputs": ["/other/vocab"]},
    ],
)
def test_tokenizer_that_is_given_paths_is_refused(entry: dict[str, object], tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **entry})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has \w+ = .*, which can have a file elsewhere read"):
        check_named_files(tmp_path)


@pytest.mark.parametrize("kind", ["XLORA", None, ["LORA"]])
def test_adapter_that_loads_others_is_refused(kind: object, tmp_path: Path) -> None:
    write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
    check_named_files(tmp_path)
    write_json(tmp_path / "adapter_config.json", {"peft_type": kind, "adapters": {"0": "owner/adapter"}})
    with pytest.raises(ConfigError, match=r"adapter_config\.json has peft_type = .*, an adapter that can have others"):
        check_named_files(tmp_path)


@pytest.mark.parametrize("key", ["vocab_file", "tokenizer_file", "vocab", "init_inputs", "token", ""])
def test_special_tokens_that_are_none_are_refused(key: str, tmp_path: Path) -> None:
    # transformers gives them to the class of the tokenizer in place of the folder's own files.
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "</s>"}, key: "/other/vocab.json"})
    with pytest.raises(ConfigError, match=rf"special_tokens_map\.json has {key} = .*, which is no special token"):
        check_named_files(tmp_path)


def test_files_of_the_folder_itself_may_be_named(tmp_path: Path) -> None:
    entries = {"transformers_weights": "model.safetensors.index.json", "text_model_id": None, "architecture": "vit"}
    write_json(tmp_path / "config.json", entries)
    files = {"fast_tokenizer_files": ["tokenizer.4.0.json", "tokenizer.json"], "vocab_file": "/home/author/vocab.json"}
    inline = {"init_inputs": [], "added_tokens_decoder": {"0": {"content": "vocab"}}, "extra": {"vocab": "x"}}
    write_json(tmp_path / "tokenizer_config.json", {**files, **inline, "gguf_file": None})
    special = {
        "eos_token": {"content": "</s>", "lstrip": False},
        "additional_special_tokens": ["<a>", {"content": "b"}],
    }
    write_json(tmp_path / "special_tokens_map.json", {**special, "image_token": "<i>"})
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": SHARD, "b": SHARD}})
    write_json(tmp_path / "tf_model.h5.index.json", {"weight_map": {"a": "tf_model-00001.h5"}})
    check_named_files(tmp_path)
    check_indexes(tmp_path)


@pytest.mark.parametrize("name", [f"/models/{SHARD}", f"../{SHARD}", f"inner/{SHARD}", "weights.data", "x.bin", ""])
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "other.safetensors.index.json"])
def test_index_of_other_files_is_refused(index: str, name: str, tmp_path: Path) -> None:
    write_json(tmp_path / index, {"weight_map": {"a": SHARD, "b": name}})
    with pytest.raises(ConfigError, match=r"index\.json names .*, which is no file beside it that ends in \.safetens"):
        check_indexes(tmp_path)


@pytest.mark.parametrize("text", ["[" * 99_999, "[]", "{}", '{"weight_map": {"a": 1, "b": "c"}}', '{"weight_map": 1}'])
def test_damaged_index_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json is no index of weights \(\w+\): replace it"):
        check_indexes(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "code",
    [
        {"AutoConfig": "tiny.Config", "AutoModelForCausalLM": "owner/repository--tiny.Model"},
        {"AutoTokenizer": ["../other--tiny.Tokenizer", None]},
        ["/models/tiny.Tokenizer", None],
        {"AutoConfig": "inner/tiny.Config"},
    ],
)
def test_code_elsewhere_is_refused_where_code_is_run(name: str, code: object, tmp_path: Path) -> None:
    write_json(tmp_path / name, {"auto_map": code})
    check_named_files(tmp_path)  # without model.trust_remote_code, transformers uses its own classes
    with pytest.raises(ConfigError, match=rf"{name} has auto_map = .*, code of a hub or of another folder"):
        check_named_files(tmp_path, runs_code=True)
    write_json(tmp_path / name, {"auto_map": {"AutoConfig": "tiny.Config", "AutoTokenizer": ["tiny.Tokenizer", None]}})
    check_named_files(tmp_path, runs_code=True)

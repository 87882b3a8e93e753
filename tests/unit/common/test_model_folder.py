"""Model folders that name files elsewhere, other models, or kernels of a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.model_folder import check_indexes, check_links, check_named_files

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


@pytest.mark.parametrize("entry", [{"gguf_file": "../x.gguf"}, {"gguf_file": "x.gguf"}, {"init_inputs": ["x"]}])
def test_tokenizer_that_is_given_files_is_refused(entry: dict[str, object], tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **entry})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has \w+ = .*, which can have another file read"):
        check_named_files(tmp_path)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model folder beside other files, of which one is in the working directory."""
    for name in ("model/config.json", "model/inner/own.json", "model/vocab.json", "other/vocab.json", "cwd/words.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write_json(tmp_path / name, {})
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "model"


ELSEWHERE = (
    *("{}/other/vocab.json", "{}/other", "../other/vocab.json", "words.json", "~/other/vocab.json"),
    *("file://{}/other/vocab.json", "inner/own.json", "./inner/../../other", "{}/model/inner"),
)


@pytest.mark.parametrize("value", ELSEWHERE)
def test_paths_of_files_elsewhere_are_refused(value: str, model: Path) -> None:
    write_json(model / "processor_config.json", {"parts": [{"any_key": value.format(model.parent)}]})
    with pytest.raises(ConfigError, match=r"processor_config\.json has any_key = .*, which is a file of this machine"):
        check_named_files(model)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        # GemmaTokenizer has only tokenizer.json as a file of its own: the path is read where that is missing.
        ("tokenizer_config.json", {"tokenizer_class": "GemmaTokenizer", "vocab_file": "{}/other/vocab.json"}),
        ("tokenizer_config.json", {"vocab": "{}/other/vocab.json"}),
        ("tokenizer_config.json", {"merges_file": "{}/other/vocab.json"}),
        ("config.json", {"vision_config": {"model_args": {"checkpoint_path": "{}/other/vocab.json"}}}),
    ],
)
def test_paths_that_loaders_take_are_refused(name: str, entry: dict[str, object], model: Path) -> None:
    (model / name).write_text(json.dumps(entry).replace("{}", str(model.parent)))
    with pytest.raises(ConfigError, match=r"\w+\.json has \w+ = .*, which is a file of this machine"):
        check_named_files(model)


def test_other_texts_are_no_paths(model: Path) -> None:
    (Path.cwd() / "gelu").mkdir()
    texts = ["</s>", "/", "..", "", "a\0b", "gelu", "owner/name", "/nowhere/x", "x" * 9999, "\ud800/x", "./vocab.json"]
    write_json(model / "config.json", {"_name_or_path": str(model.parent / "other"), "texts": [*texts, str(model)]})
    template = "{% for message in messages %}/{{ message }}\n{% endfor %}"
    notes = {"name_or_path": str(model.parent / "other"), "tokenizer_file": str(model.parent / "other/vocab.json")}
    write_json(model / "tokenizer_config.json", {"chat_template": template, "vocab_file": "vocab.json", **notes})
    check_named_files(model)


@pytest.mark.parametrize(
    "name", ["preprocessor_config.json", "chat_template.jinja", "additional_chat_templates/a.jinja"]
)
def test_links_out_of_the_folder_are_refused(name: str, model: Path) -> None:
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(model.parent / "other/vocab.json")
    with pytest.raises(ConfigError, match=r" is a link to .*/other/vocab\.json, outside of the model fol"):
        check_links(model)


def test_links_of_weights_and_of_a_hubs_cache_are_followed(model: Path) -> None:
    (model / "model.safetensors").symlink_to(model.parent / "other/vocab.json")
    (model / "tokenizer_config.json").symlink_to("vocab.json")
    (model / "README.md").symlink_to("nowhere")
    check_links(model)
    cached = model.parent / "models--a--b"
    for name in ("blobs", "snapshots/1a"):
        (cached / name).mkdir(parents=True)
    (cached / "blobs" / "77").write_text("{}")
    (cached / "snapshots/1a/config.json").symlink_to("../../blobs/77")
    os.symlink(cached / "snapshots/1a", model.parent / "link")
    check_links(cached / "snapshots/1a")
    check_links(model.parent / "link")


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


def test_process_that_leaves_the_hub_can_still_have_a_title() -> None:
    """Its environment keeps its place in memory, from which the place of the title is found."""
    text = (
        "from starling.common.model_folder import leave_hub; leave_hub(); import setproctitle; "
        "setproctitle.setproctitle('starling: x'); print(open('/proc/self/cmdline').read())"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("starling: x\0"), done

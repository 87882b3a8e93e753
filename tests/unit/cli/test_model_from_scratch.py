"""Model folders with random weights: transformers loads them, and the tokenizer loses no character."""

from __future__ import annotations

import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}a:"
UNICODE = "añß→日 \n\t'.,!?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "small"
    make_model_folder(ScratchSettings(config=SMALL, chat_template=TEMPLATE, max_length=77), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def unicode_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models") / "unicode"
    make_model_folder(ScratchSettings(config=SMALL, alphabet=UNICODE), folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(string.ascii_letters + string.digits + string.punctuation + " \n"))
def test_tokenizer_round_trips_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(UNICODE))
def test_tokenizer_round_trips_any_alphabet(unicode_tokenizer: Any, text: str) -> None:
    ids = unicode_tokenizer.encode(text)
    assert len(ids) == len(text)
    assert unicode_tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_has_the_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 3 + 26 + 26 + 10 + 32 + 2
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("ab<eos>é") == [3, 4, 1, 2]
    assert tokenizer.decode([3, 4, 1, 0], skip_special_tokens=True) == "ab"
    assert tokenizer.model_max_length == 77
    padded = tokenizer(["a", "abc"], padding=True)["input_ids"]
    assert padded == [[0, 0, 3], [3, 4, 5]]


def test_chat_template_is_written(tokenizer: Any, unicode_tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi\na:"
    assert unicode_tokenizer.chat_template is None


def test_model_loads_from_the_folder(folder: Path, tokenizer: Any) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert {name: getattr(config, name) for name in SMALL} == SMALL
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.vocab_size, config.max_position_embeddings) == (len(tokenizer), 77)
    generation = GenerationConfig.from_pretrained(folder)
    for made in (config, generation):
        assert (made.pad_token_id, made.eos_token_id, made.bos_token_id) == (0, 1, None)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("abc")])).logits
    assert logits.shape == (1, 3, len(tokenizer))


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}),
        ("gpt2", {"n_embd": 32, "num_hidden_layers": 1, "n_head": 2}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}),
    ],
)
def test_model_type_selects_the_architecture(tmp_path: Path, model_type: str, config: dict[str, Any]) -> None:
    make_model_folder(ScratchSettings(model_type=model_type, config=config, alphabet="ab"), tmp_path / "model")
    loaded = AutoConfig.from_pretrained(tmp_path / "model")
    assert (loaded.model_type, loaded.vocab_size, loaded.hidden_size) == (model_type, 5, 32)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_same_settings_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make_model_folder(
        ScratchSettings(config=dict(reversed(SMALL.items())), chat_template=TEMPLATE, max_length=77),
        tmp_path / "deep" / "other",
    )
    assert read_all(tmp_path / "deep" / "other") == read_all(folder)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= {*read_all(folder)}
    assert not any(name.endswith((".safetensors", ".bin")) for name in read_all(folder))


def test_existing_folder_is_kept_and_one_of_other_settings_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    settings = ScratchSettings(config=SMALL, alphabet="ab")
    make_model_folder(settings, folder)
    (folder / "model.safetensors").write_bytes(b"trained since")
    before = read_all(folder)
    make_model_folder(settings, folder)
    assert read_all(folder) == before
    with pytest.raises(ConfigError, match="was not made with these settings: remove it"):
        make_model_folder(ScratchSettings(config=SMALL, alphabet="abc"), folder)
    assert read_all(folder) == before


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen33"}, "'qwen33' is not a causal language model .*nearest: qwen3"),
        ({"model_type": "clip"}, "'clip' is not a causal language model"),
        ({"config": {"hiden_size": 32}}, "a qwen3 has no config.hiden_size; nearest: hidden_size"),
        ({"config": {"hidden_size": "wide"}}, "hidden_size.*expected int"),
        ({"config": {"vocab_size": 9}}, "config.vocab_size follows from the alphabet"),
    ],
)
def test_invalid_config_is_refused_and_writes_nothing(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_model_folder(ScratchSettings(**changes), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"alphabet": "abcab"}, "alphabet repeats 'ab'"),
        ({"alphabet": ""}, "alphabet"),
        ({"max_length": 0}, "max_length"),
        ({"alphabeth": "abc"}, "alphabeth"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        ScratchSettings(**changes)


def test_import_loads_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, starling.cli.model.scratch; "
        "print(*sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (Path("/proc/x"), tmp_path / "file" / "x"):
        with pytest.raises(ConfigError, match=f"the model folder {folder} cannot be made: .*; give another folder"):
            make_model_folder(ScratchSettings(), folder)

"""Tests of loading models from folders, and of text encoding and decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import CONTEXT, drain, make_engine, make_model, request
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from starling.algo.text import decode, encode_prompt
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Prompt
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.embedded.model import build_model, live_tensors
from starling.rollout.engine.model_config import end_token_ids, max_trainable_length

torch.set_num_threads(1)
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model("qwen3", seed=3).save_pretrained(tmp_path)
    return tmp_path


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """Create a tokenizer of single characters that prepends <s> unless disabled."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{c: 3 + i for i, c in enumerate("abcdef :u")}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = chat_template
    return tokenizer


# --- model --------------------------------------------------------------------------------------------------------


def test_build_model_with_weights(folder: Path) -> None:
    model = build_model(folder, dtype="float32", device="cpu", weights=True)
    original = dict(make_model("qwen3", seed=3).named_parameters())
    assert not model.training
    for name, tensor in live_tensors(model).items():
        assert not tensor.requires_grad
        assert torch.equal(tensor, original[name])


def test_build_model_without_weights_has_the_same_tensors(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = build_model(folder, dtype="bfloat16", device="cpu", weights=False)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in live_tensors(model).items()}
    expected = {n: (p.shape, torch.bfloat16) for n, p in make_model("qwen3").named_parameters()}
    assert shapes == expected
    assert not any(tensor.requires_grad for tensor in live_tensors(model).values())


def test_model_with_pulled_weights_generates_as_its_source(folder: Path) -> None:
    source = make_model("qwen3", seed=3)
    engine = make_engine(build_model(folder, dtype="float32", device="cpu", weights=False))
    with torch.no_grad():
        for name, tensor in engine.tensors().items():
            tensor.copy_(dict(source.named_parameters())[name])
    other = make_engine(source)
    for one in (engine, other):
        one.add(request("g", [1, 2, 3], max_tokens=10, temperature=0.0))
    ours, theirs = (drain(one)["g"].completions[0].token_ids.tolist() for one in (engine, other))
    assert ours == theirs


def test_live_tensors_list_only_persistent_buffers() -> None:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(live_tensors(module)) == ["weight", "bias", "kept"]


def test_build_model_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        build_model(tmp_path / "nowhere", dtype="float32", device="cpu", weights=False)


def test_build_model_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        build_model(tmp_path, dtype="float32", device="cpu", weights=False)


@pytest.mark.parametrize("content", ["{", "{}", '{"model_type": "no_such_model"}'])
def test_build_model_unreadable_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_model(tmp_path, dtype="float32", device="cpu", weights=False)


def test_build_model_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_model(folder, dtype="float32", device="cpu", weights=True)


def test_engine_rejects_a_model_that_it_cannot_decode() -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes))
    with pytest.raises(ConfigError, match="MambaForCausalLM takes no"):
        TransformersEngine(model, eos_token_ids=(), max_model_len=64)


@pytest.mark.parametrize(("family", "limit"), [("qwen3", CONTEXT), ("mistral_all_sliding", 64), ("gpt2", CONTEXT)])
def test_max_trainable_length_bounds_sampling(family: str, limit: int) -> None:
    config = make_model(family).config
    assert [max_trainable_length(config, requested) for requested in (None, limit - 1, limit)] == [
        limit,
        limit - 1,
        limit,
    ]
    with pytest.raises(ConfigError, match=rf"max_model_len = {limit + 1} is more than the {limit} tokens .* lower it"):
        max_trainable_length(config, limit + 1)


# --- text ---------------------------------------------------------------------------------------------------------


def test_plain_text_is_tokenized_without_a_template() -> None:
    assert encode_prompt(make_tokenizer(None), Prompt(id="p", text="abc")) == [3, 4, 5]


def test_conversation_is_rendered_with_a_generation_prompt() -> None:
    prompt = Prompt(id="p", messages=(ChatMessage(role="u", content="ab"),), text="ignored")
    assert encode_prompt(make_tokenizer(CHAT), prompt) == [0, 11, 10, 3, 4, 1, 0, 3, 10]


def test_conversation_without_a_template_is_rejected() -> None:
    prompt = Prompt(id="train/0/1", messages=(ChatMessage(role="u", content="ab"),))
    with pytest.raises(ConfigError, match=r"'train/0/1' is a conversation .* no chat template"):
        encode_prompt(make_tokenizer(None), prompt)


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ messages[7].content }}", "{% if %}"])
def test_conversation_that_the_template_rejects_is_rejected(template: str) -> None:
    prompt = Prompt(id="train/0/1", messages=(ChatMessage(role="u", content="ab"),))
    with pytest.raises(ConfigError, match=r"template cannot render prompt 'train/0/1' \(\w+: .+\); change the prompt"):
        encode_prompt(make_tokenizer(template), prompt)


def test_decode_skips_special_tokens() -> None:
    text = decode(make_tokenizer(None), [0, 3, 4, 5, 1])
    assert text.replace(" ", "") == "abc"


def test_end_token_ids_are_those_of_tokenizer_and_folder(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    assert end_token_ids(tokenizer, tmp_path) == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert end_token_ids(tokenizer, tmp_path) == (1, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_token_ids(tokenizer, tmp_path) == (1, 9)
    (tmp_path / "generation_config.json").unlink()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no end-of-sequence token, so every completion would go on"):
        end_token_ids(tokenizer, tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 99_999, "[]", *(f'{{"eos_token_id": {v}}}' for v in ('"a"', '[1, "a"]', '{"a": 1}'))]
)
def test_damaged_generation_config_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json (cannot be read \(|has eos_token_id = )") as caught:
        end_token_ids(make_tokenizer(None), tmp_path)
    assert "\n" not in str(caught.value)


def test_built_model_returns_no_router_logits(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 4}
    config = Qwen3MoeConfig(vocab_size=32, num_experts_per_tok=2, output_router_logits=True, **sizes, **heads)
    config.save_pretrained(tmp_path)
    model = build_model(tmp_path, dtype="float32", device="cpu", weights=False)
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        assert model(input_ids=ids).router_logits is None

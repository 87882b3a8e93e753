"""Loading models, the tensors of a version, and crash-safe saving."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.huggingface import TokenizerFiles, save_hf
from starling.policy.train.model.load import frozen_copy, load_model, longest_sequence, version_tensors

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITH_EXPERTS = {
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
}


class Words:
    """A tokenizer of one file, whose write can be made to fail."""

    def __init__(self, grief: Callable[[], None] | None = None) -> None:
        self._grief = grief

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory, "words.txt").write_text("a b c", encoding="utf-8")
        if self._grief is not None:
            self._grief()


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    a, b = version_tensors(one), version_tensors(other)
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("tied", [True, False])
def test_save_hf_round_trip(tiny: Callable[..., Any], tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny(tied=tied)
    save_hf(model, Words(), tmp_path / "deep" / "step-1")
    folder = tmp_path / "deep" / "step-1"
    assert (folder / "words.txt").read_text(encoding="utf-8") == "a b c"
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
    assert equal(load_model(folder), model)
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


def test_export_includes_processor_files(tiny: Callable[..., Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "preprocessor_config.json").write_text('{"patch_size": 4}', encoding="utf-8")
    (source / "notes.txt").write_text("no part of a model", encoding="utf-8")
    folder = tmp_path / "step-1"
    save_hf(tiny(), TokenizerFiles(Words(), source), folder)
    assert (folder / "preprocessor_config.json").read_text(encoding="utf-8") == '{"patch_size": 4}'
    assert (folder / "words.txt").exists()
    assert not (folder / "notes.txt").exists()


def test_save_hf_replaces_the_folder(tiny: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "last"
    save_hf(tiny(), Words(), folder)
    save_hf(tiny(seed=1), None, folder)
    assert equal(load_model(folder), tiny(seed=1))
    assert not (folder / "words.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_save_hf_crash_keeps_previous_checkpoint(tiny: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "last"
    save_hf(tiny(), Words(), folder)
    child = os.fork()
    if child == 0:
        save_hf(tiny(seed=1), Words(lambda: os._exit(9)), folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert equal(load_model(folder), tiny())
    save_hf(tiny(seed=1), Words(), folder)
    assert equal(load_model(folder), tiny(seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_save_hf_error_keeps_previous_checkpoint(tiny: Callable[..., Any], tmp_path: Path) -> None:
    def disk_full() -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "last"
    save_hf(tiny(), Words(), folder)
    with pytest.raises(ConfigError, match="No space left on device"):
        save_hf(tiny(seed=1), Words(disk_full), folder)
    assert equal(load_model(folder), tiny())
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_save_hf_over_a_file_is_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "last").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="is a file"):
        save_hf(tiny(), None, tmp_path / "last")


def test_load_model_random_weights_depend_only_on_seed(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path)
    torch.manual_seed(5)
    one = load_model(tmp_path, init="random", seed=3)
    state = torch.random.get_rng_state()
    torch.rand(7)
    other = load_model(tmp_path, init="random", seed=3)
    third = load_model(tmp_path, init="random", seed=4)
    assert equal(one, other)
    assert not equal(one, third)
    torch.manual_seed(5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert next(one.parameters()).dtype == torch.float32
    assert not one.training


@pytest.mark.parametrize("kind", sorted(WITH_EXPERTS))
def test_random_weights_have_the_element_types_of_loaded_ones(kind: str, tmp_path: Path) -> None:
    """transformers keeps some tensors of these models in float32, but not those of dots1 where it makes them."""
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **SMALL, **WITH_EXPERTS[kind]).save_pretrained(tmp_path)
    random = load_model(tmp_path, dtype="bfloat16", init="random")
    save_hf(random, None, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved", dtype="bfloat16")
    types = {name: tensor.dtype for name, tensor in version_tensors(random).items()}
    assert types == {name: tensor.dtype for name, tensor in version_tensors(loaded).items()}


def test_load_model_unusable_folder_is_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent does not exist: give the path"):
        load_model(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path)
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'no weights: add model\.safetensors, or set init = "random"'):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path, init="random")


def test_load_model_corrupt_or_foreign_weights_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    save_hf(tiny(), None, tmp_path / "one")
    save_hf(tiny(num_hidden_layers=1), None, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"do not fit its config\.json: 11 tensors"):
        load_model(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(tmp_path / "one")


def test_tied_weights_that_differ_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    # transformers leaves both; a rollout that starts without weights, and vLLM, have one.
    model = tiny(tied=False)
    save_hf(model, None, tmp_path)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lm_head\.weight and another model\.embed_tokens\.weight, and its config"):
        load_model(tmp_path)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_version_tensors_name_tied_weights_once(tiny: Callable[..., Any]) -> None:
    tied, untied = tiny(tied=True), tiny(tied=False)
    assert "model.embed_tokens.weight" in version_tensors(tied)
    assert "lm_head.weight" not in version_tensors(tied)
    assert "lm_head.weight" in version_tensors(untied)
    assert not any("inv_freq" in name for name in version_tensors(tied))
    named = version_tensors(tied)
    with torch.no_grad():
        tied.model.norm.weight.fill_(3.0)
    assert (named["model.norm.weight"] == 3.0).all()
    assert not any(tensor.requires_grad for tensor in named.values())


def test_version_tensors_include_persistent_buffers() -> None:
    assert set(version_tensors(torch.nn.BatchNorm1d(2))) == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip


def test_frozen_copy_does_not_change(tiny: Callable[..., Any]) -> None:
    model = tiny()
    model.model.norm.weight.grad = torch.ones(32)
    reference = frozen_copy(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert equal(reference, tiny())
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in reference.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_longest_sequence_is_the_context(tiny: Callable[..., Any]) -> None:
    assert longest_sequence(tiny()) == 512
    assert longest_sequence(tiny(use_sliding_window=True, sliding_window=64, max_window_layers=1)) == 512

"""Parts of the tensors in a model's files: the bits that transformers loads, whatever the names and forms there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.model.deferred import DeferredModel, defer_model
from starling.policy.train.model.load import load_model, outline
from starling.policy.train.model.tensors import all_named
from starling.policy.train.model.weight_files import WeightFiles, has_slices

CPU = torch.device("cpu")


@contextmanager
def deferred(folder: Path, dtype: str = "float32", **arguments: Any) -> Iterator[DeferredModel]:
    with defer_model(folder, CPU, seed=3, dtype=dtype, **arguments) as found:
        assert found is not None
        yield found


def filled(folder: Path, dtype: str = "float32", **arguments: Any) -> dict[str, Tensor]:
    """Return all tensors of a deferred model, read whole."""
    with deferred(folder, dtype, **arguments) as found:
        named = dict(all_named(found.model, each_name=True))
        values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in named.items() if tensor.is_meta}
        parts = {name: Part.whole(value) for name, value in values.items()}
        found.fill(parts, {name: tensor.dtype for name, tensor in named.items()})
    return named | values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen2", False), ("qwen3_moe", False)])
def test_deferred_model_has_the_tensors_of_the_loaded_one(
    kind: str, tied: bool, dtype: str, tiny: Callable[..., Any], tmp_path: Path
) -> None:
    """Computed buffers included."""
    tiny(kind, tied=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    loaded, found = load_model(tmp_path, dtype=dtype), filled(tmp_path, dtype)
    expected = dict(all_named(loaded, each_name=True))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_new_layer_of_scores_is_drawn_as_by_the_loader(tiny: Callable[..., Any], tmp_path: Path) -> None:
    tiny(kind="llama").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, seed=3, scores=True)
    found = filled(tmp_path, scores=True)
    assert torch.equal(found["score.weight"], loaded.score.weight)
    assert torch.equal(found["model.norm.weight"], loaded.model.norm.weight)


def test_any_part_of_experts_is_read_from_the_tensors_of_those(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Across the rows at which two tensors of a file are joined, and no other bytes."""
    tiny("qwen3_moe").save_pretrained(tmp_path, max_shard_size="20KB")
    whole = load_model(tmp_path).state_dict()
    with WeightFiles(tmp_path, outline(tmp_path)) as files:
        name = "model.layers.1.mlp.experts.gate_up_proj"
        for start, size in (((1, 20, 3), (2, 9, 5)), ((0, 0, 0), (4, 24, 32)), ((3, 30, 0), (1, 2, 1))):
            before = files.bytes_read
            box = tuple(slice(one, one + length) for one, length in zip(start, size, strict=True))
            assert torch.equal(files.read(name, start, size), whole[name][box])
            assert files.bytes_read - before == whole[name][box].numel() * 4


def test_parts_of_unusable_weights_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    """As by the loader of the whole model."""
    tiny().save_pretrained(tmp_path / "one")
    tiny(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"do not fit its config\.json: 11 tensors"), deferred(tmp_path / "one"):
        pass
    (tmp_path / "one" / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="cannot be loaded"), deferred(tmp_path / "one"):
        pass


def test_parts_of_tied_weights_that_differ_are_refused(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny(tied=False)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight and another model\.embed_tokens\.weight, and its config"):
        filled(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(filled(tmp_path)["lm_head.weight"], tensors["lm_head.weight"])


def test_weights_in_other_formats_are_not_read_in_parts(tiny: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert not has_slices(tmp_path, model.config)
    with defer_model(tmp_path, CPU, seed=0, dtype="float32") as found:
        assert found is None

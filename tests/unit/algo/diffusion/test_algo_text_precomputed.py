"""Embeddings that were computed before the run: each form of file is read, and others say what is wrong."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file

from starling.algo.diffusion.text.precomputed import MAX_BYTES, read_embeddings
from starling.common.errors import ConfigError
from starling.common.wire.tensors import POOLED, TEXT, TEXT_MASK

LENGTH = 8


def text(num_tokens: int = 3, dtype: Any = np.float32) -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(size=(num_tokens, 4)).astype(dtype)


def padded(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate([array, np.zeros((LENGTH - len(array), array.shape[1]), array.dtype)])


def written(path: Path, content: Any) -> Path:
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".safetensors":
        save_file(content, path)
    else:
        path.write_bytes(pickle.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("one.npy", text()),
        ("one.npy", padded(text())[None]),
        ("one.npy", text(dtype=">f4")),
        ("one.pickle", [text()]),
        ("one.pickle", [padded(text())]),
        ("one.pkl", text()),
        ("one.pickle", {"prompt_embeds": text()[None]}),
        ("one.safetensors", {"text": torch.from_numpy(text())}),
        ("one.safetensors", {TEXT: torch.from_numpy(padded(text()))}),
    ],
)
def test_text_embeddings_are_read_without_padding(name: str, content: Any, tmp_path: Path) -> None:
    found = read_embeddings(written(tmp_path / name, content), LENGTH)
    assert found.keys() == {TEXT}
    assert found[TEXT].dtype == np.float32
    np.testing.assert_array_equal(found[TEXT], text())


def test_mask_says_what_is_padding(tmp_path: Path) -> None:
    ours = torch.from_numpy(padded(text()) + 1.0).to(torch.bfloat16)
    mask, pooled = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 0]]), torch.ones(1, 5, dtype=torch.float16)
    tensors = {"prompt_embeds": ours[None], "prompt_attention_mask": mask, "pooled_prompt_embeds": pooled}
    found = read_embeddings(written(tmp_path / "one.safetensors", tensors), LENGTH)
    np.testing.assert_array_equal(found[TEXT], ours[:3].float().numpy())
    np.testing.assert_array_equal(found[TEXT_MASK], np.array([1, 0, 1], np.uint8))
    np.testing.assert_array_equal(found[POOLED], np.ones(5, np.float32))


def test_empty_text_keeps_a_token(tmp_path: Path) -> None:
    found = read_embeddings(written(tmp_path / "one.npy", np.zeros((LENGTH, 4), np.float32)), LENGTH)
    assert found[TEXT].shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one.npy", text(9), "has 9 tokens, and the model reads 1 to 8"),
        ("one.npy", np.ones(4, np.float32), "of 1 dimensions"),
        ("one.npy", np.full((2, 4), np.nan, np.float32), "not finite"),
        ("one.npy", np.array([["a"]]), "and no numbers"),
        ("one.npy", np.array([None]), "cannot be read: .*pickle"),
        ("one.pickle", [text(), text()], "no list with one"),
        ("one.pickle", {"a": text(), "b": text()}, "a tensor 'a', which is none of"),
        ("one.pickle", Path("one"), r"it names pathlib"),
        ("one.safetensors", {POOLED: torch.ones(4)}, "no text_embeddings"),
        ("one.safetensors", {TEXT: torch.ones(2, 4), TEXT_MASK: torch.ones(3)}, "3 elements for 2 embeddings"),
    ],
)
def test_unusable_file_says_why(name: str, content: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_embeddings(written(tmp_path / name, content), LENGTH)


def test_file_that_is_none_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        read_embeddings(tmp_path / "one.npy", LENGTH)
    for name in ("one.npy", "one.safetensors", "one.pickle"):
        for content in (b"", b"\x93NUMPY\x01\x00", b"no embeddings"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ConfigError, match=r"cannot be read: .*; compute them anew"):
                read_embeddings(tmp_path / name, LENGTH)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4000), }\n"
    (tmp_path / "one.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ConfigError, match=r"cannot be read: .*; compute them anew"):
        read_embeddings(tmp_path / "one.npy", LENGTH)
    os.truncate(tmp_path / "one.npy", MAX_BYTES + 1)
    with pytest.raises(ConfigError, match="it has 1073741825 bytes, more than the 1073741824"):
        read_embeddings(tmp_path / "one.npy", LENGTH)
    (tmp_path / "one.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"files of embeddings end in \.safetensors, "):
        read_embeddings(tmp_path / "one.pt", LENGTH)

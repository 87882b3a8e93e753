"""Prompts of a diffusion model: embeddings by the text encoders or from a file, and prompts without any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_diffusion import TEXT_WIDTH
from tiny_pipelines import save_whole, without_texts

from starling.algo.diffusion.folder import PipelineFolder
from starling.algo.diffusion.settings import SamplerSettings
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import ChatMessage, Media, Prompt
from starling.rollout.engine.diffusion.prompts import EMBEDDING, DiffusionPrompts

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_whole(tmp_path_factory.mktemp("wan"), "wan")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_whole(tmp_path_factory.mktemp("bare"), "wan", texts=False)


def prompts_of(path: Path, **changes: Any) -> DiffusionPrompts:
    return DiffusionPrompts(path, SamplerSettings(**{"text_dtype": "float32", **changes}), "cpu")


def test_texts_are_embedded_by_the_text_encoders(wan: PipelineFolder) -> None:
    prompts = prompts_of(wan.path)
    messages = (ChatMessage(role="system", content="a cat"), ChatMessage(role="user", content="sits"))
    (first, second) = PipelineEmbedder(wan, dtype=torch.float32).embed(["a dog", "a cat\n\nsits"])
    for prompt, expected in ((Prompt(id="1", text="a dog"), first), (Prompt(id="2", messages=messages), second)):
        ids, tensors = prompts.encode(prompt)
        assert ids == [0]
        assert tensors.keys() == expected.keys() == {"text_embeddings"}
        np.testing.assert_array_equal(tensors["text_embeddings"], expected["text_embeddings"])


def test_released_text_encoders_are_loaded_again(wan: PipelineFolder) -> None:
    prompts, prompt = prompts_of(wan.path), Prompt(id="p", text="a dog")
    _, before = prompts.encode(prompt)
    embedder = prompts._embedder
    assert isinstance(embedder, PipelineEmbedder)
    assert embedder.is_loaded
    prompts.release()
    assert not embedder.is_loaded
    _, after = prompts.encode(prompt)
    np.testing.assert_array_equal(before["text_embeddings"], after["text_embeddings"])


def test_a_cache_spares_the_text_encoders(wan: PipelineFolder, tmp_path: Path) -> None:
    prompt = Prompt(id="p", text="a dog")
    _, first = prompts_of(wan.path, text_cache=str(tmp_path / "cache")).encode(prompt)
    again = prompts_of(wan.path, text_cache=str(tmp_path / "cache"))
    again.release()  # nothing is loaded
    _, second = again.encode(prompt)
    np.testing.assert_array_equal(first["text_embeddings"], second["text_embeddings"])
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 1


def test_embeddings_that_a_prompt_names_are_read(wan: PipelineFolder, bare: PipelineFolder, tmp_path: Path) -> None:
    expected = np.random.default_rng(0).standard_normal((3, TEXT_WIDTH), np.float32)
    np.save(tmp_path / "a.npy", expected)
    prompt = Prompt(id="p", text="it is not read", metadata={EMBEDDING: str(tmp_path / "a.npy")})
    for folder in (wan, bare):
        ids, tensors = prompts_of(folder.path).encode(prompt)
        assert ids == [0]
        np.testing.assert_array_equal(tensors["text_embeddings"], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has no text encoders, and the prompt no text_embedding: save the pipeline with them, or give each"),
        ({"metadata": {EMBEDDING: 7}}, "its text_embedding is 7: give the path"),
        ({"metadata": {EMBEDDING: ""}}, "its text_embedding is '': give the path"),
        ({"metadata": {EMBEDDING: "a\0b.npy"}}, "give the path"),
        ({"metadata": {EMBEDDING: "/no/such.npy"}}, r"cannot be read \(No such file"),
        ({"media": (Media(kind="image", uri="a.png"),)}, "it has images or videos, and .* read text: leave them out"),
    ],
)
def test_prompts_without_embeddings_are_refused(bare: PipelineFolder, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StarlingError, match=message):
        prompts_of(bare.path).encode(Prompt(id="p", text="a cat", **changes))


def test_a_pipeline_with_other_text_encoders_is_refused_at_the_start(tmp_path: Path) -> None:
    save_whole(tmp_path, "wan")
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace("UMT5EncoderModel", "T5EncoderModel"))
    with pytest.raises(ConfigError, match="was trained with UMT5EncoderModel"):
        prompts_of(tmp_path)
    without_texts(tmp_path)
    prompts_of(tmp_path)

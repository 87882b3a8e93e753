"""Embeddings of prompts: those of diffusers' pipelines, for each family, and folders that cannot be used."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tiny_diffusion import FAMILIES, latents, tiny
from tiny_text import save_pipeline, text_modules
from torch import Tensor

from starling.algo.diffusion.conditions import Conditions, conditions_of, joined
from starling.algo.diffusion.folder import TEXT_LENGTHS, PipelineFolder, read_pipeline
from starling.algo.diffusion.models import velocity
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.algo.diffusion.text.families import TEXT_FAMILIES, default_instruction
from starling.common.errors import ConfigError
from starling.common.wire.tensors import POOLED, TEXT

CPU = torch.device("cpu")
PIPELINES = {
    "wan": "WanPipeline",
    "cosmos": "Cosmos2_5_PredictBasePipeline",
    "sd3": "StableDiffusion3Pipeline",
    "sana": "SanaPipeline",
    "sana_video": "SanaVideoPipeline",
}
PROMPTS = ["a cat", "", " A  red CAR &amp;amp; a dog: 2 ", "x", "long " * 150]
NEGATIVE = ["", "ugly", "", "blurred", "dull " * 150]


def their_pipeline(name: str, modules: dict[str, Any]) -> Any:
    """Return a pipeline of diffusers that has nothing but what it embeds prompts with."""

    def __init__(self: Any) -> None:
        for part, module in modules.items():
            setattr(self, part, module)
        self.tokenizer_max_length = 77

    cls = getattr(diffusers, PIPELINES[name])
    return type("TextPipeline", (cls,), {"__init__": __init__, "_execution_device": CPU})()


def their_embeddings(name: str, modules: dict[str, Any], instruct: bool = True) -> dict[bool, Conditions]:
    """Return the padded embeddings of `PROMPTS`, and of `NEGATIVE` (True), by diffusers' pipeline, one by one."""
    pipeline, found = their_pipeline(name, modules), []
    instruction = default_instruction(PIPELINES[name]).split("\n") if name.startswith("sana") and instruct else None
    with torch.no_grad():
        for prompt, negative in zip(PROMPTS, NEGATIVE, strict=True):
            if name == "sd3":
                found.append(pipeline.encode_prompt([prompt], None, None, negative_prompt=[negative]))
            elif name in ("wan", "cosmos"):
                found.append(pipeline.encode_prompt([prompt], [negative], max_sequence_length=512))
            else:
                settings = {"negative_prompt": [negative], "complex_human_instruction": instruction}
                found.append(pipeline.encode_prompt([prompt], **settings))
    parts = [torch.cat(one) for one in zip(*found, strict=True)]
    if name == "sd3":
        return {False: Conditions(parts[0], None, parts[2]), True: Conditions(parts[1], None, parts[3])}
    if name in ("wan", "cosmos"):
        return {False: Conditions(parts[0]), True: Conditions(parts[1])}
    return {False: Conditions(parts[0], parts[1].bool()), True: Conditions(parts[2], parts[3].bool())}


def our_embeddings(embedder: PipelineEmbedder, folder: PipelineFolder, unconditional: bool) -> Conditions:
    texts = NEGATIVE if unconditional else PROMPTS
    found = embedder.embed(texts, unconditional=unconditional)
    for tensors in found:
        assert {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    return joined([conditions_of(tensors, folder.text_length, CPU) for tensors in found])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0.0)


def test_each_family_has_text_encoders() -> None:
    assert TEXT_FAMILIES.keys() == TEXT_LENGTHS.keys()


@pytest.mark.parametrize(
    ("name", "instruct"), [*((name, True) for name in FAMILIES), ("sana", False), ("sana_video", False)]
)
def test_embeddings_are_the_pipelines(name: str, instruct: bool, tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path, name)
    embedder = PipelineEmbedder(folder, dtype=torch.float32, instruct=instruct)
    theirs = their_embeddings(name, text_modules(name), instruct)
    for unconditional in (False, True):
        ours, their = our_embeddings(embedder, folder, unconditional), theirs[unconditional]
        assert ours.text_mask is not None
        if their.text_mask is None:
            assert_close(ours.text, their.text)
        else:
            assert torch.equal(ours.text_mask, their.text_mask)
            assert_close(ours.text, their.text * their.text_mask.unsqueeze(-1))
        if their.pooled is not None:
            assert ours.pooled is not None
            assert_close(ours.pooled, their.pooled)


@pytest.mark.parametrize("name", FAMILIES)
def test_velocity_is_that_of_the_pipelines_embeddings(name: str, tmp_path: Path) -> None:
    """What the model predicts does not depend on whether padding was removed and put back."""
    folder, model = save_pipeline(tmp_path, name), tiny(name)
    ours = our_embeddings(PipelineEmbedder(folder, dtype=torch.float32), folder, False)
    theirs = their_embeddings(name, text_modules(name))[False]
    state, sigma = latents(name, batch=len(PROMPTS)), torch.full((len(PROMPTS),), 0.5)
    with torch.no_grad():
        found, expected = (velocity(model, state, sigma, one) for one in (ours, theirs))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_do_not_depend_on_other_prompts(name: str, tmp_path: Path) -> None:
    embedder = PipelineEmbedder(save_pipeline(tmp_path, name), dtype=torch.bfloat16)
    together = embedder.embed(PROMPTS)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (found,) = embedder.embed([prompt])
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)
            rounded = torch.from_numpy(array).to(torch.bfloat16).float().numpy()
            np.testing.assert_array_equal(rounded, array)
    assert len(together[1][TEXT]) >= 1, "of the empty prompt"


def test_sd3_without_t5_has_zeros_in_its_place(tmp_path: Path) -> None:
    modules = {part: one for part, one in text_modules("sd3").items() if not part.endswith("_3")}
    folder = save_pipeline(tmp_path, "sd3", modules)
    ours = our_embeddings(PipelineEmbedder(folder, dtype=torch.float32), folder, False)
    theirs = their_embeddings("sd3", modules | {"text_encoder_3": None, "transformer": tiny("sd3")})[False]
    assert_close(ours.text, theirs.text)
    assert theirs.pooled is not None
    assert ours.pooled is not None
    assert_close(ours.pooled, theirs.pooled)


def test_prompt_that_is_too_long_is_reported_once(tmp_path: Path) -> None:
    embedder = PipelineEmbedder(save_pipeline(tmp_path, "wan"), dtype=torch.float32)
    with capture_logs() as logs:
        embedder.embed(["a cat"])
        embedder.embed(["long " * 150, "long " * 151])
    assert [(one["event"], one["num_tokens"]) for one in logs] == [("prompt_cut_off", 150 * 5 + 1 - 512)]


def changed_index(path: Path, **changes: Any) -> PipelineFolder:
    index = path / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | changes))
    return read_pipeline(path)


def test_pipeline_without_a_part_is_refused(tmp_path: Path) -> None:
    save_pipeline(tmp_path, "wan")
    for part in ("text_encoder", "tokenizer"):
        for missing in ([None, None], None):
            with pytest.raises(ConfigError, match=f"has no {part}, which computes the embeddings"):
                PipelineEmbedder(changed_index(tmp_path, **{part: missing}), dtype=torch.float32)
        changed_index(tmp_path, text_encoder=["transformers", "UMT5EncoderModel"])
    folder = changed_index(tmp_path, tokenizer=["transformers", "T5Tokenizer"])
    (tmp_path / "tokenizer").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        PipelineEmbedder(folder, dtype=torch.float32)


def test_text_encoder_of_another_family_is_refused(tmp_path: Path) -> None:
    save_pipeline(tmp_path, "wan")
    folder = changed_index(tmp_path, text_encoder=["transformers", "BertModel"])
    with pytest.raises(
        ConfigError, match=r"has the text_encoder 'BertModel', and .* was trained with UMT5EncoderModel"
    ):
        PipelineEmbedder(folder, dtype=torch.float32)
    folder = changed_index(
        tmp_path, text_encoder=["transformers", "UMT5EncoderModel"], tokenizer=["transformers", "NoTokenizer"]
    )
    with pytest.raises(ConfigError, match=r"has the tokenizer 'NoTokenizer', which transformers .* does not have"):
        PipelineEmbedder(folder, dtype=torch.float32).embed(["a"])


def test_weights_are_read_from_safetensors_only(tmp_path: Path) -> None:
    embedder = PipelineEmbedder(save_pipeline(tmp_path, "wan"), dtype=torch.float32)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    (tmp_path / "text_encoder" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"the text_encoder in .* cannot be loaded"):
        embedder.embed(["a"])
    weights.write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"the text_encoder in .* cannot be loaded"):
        embedder.embed(["a"])
    assert not embedder.is_loaded


def test_configuration_that_names_code_of_a_hub_is_refused(tmp_path: Path) -> None:
    embedder = PipelineEmbedder(save_pipeline(tmp_path, "wan"), dtype=torch.float32)
    config = tmp_path / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": "someone/kernel"}))
    with pytest.raises(ConfigError, match="a kernel that transformers would download"):
        embedder.embed(["a"])


def test_embeddings_that_cannot_be_computed_say_why(tmp_path: Path) -> None:
    modules = text_modules("cosmos")
    modules["tokenizer"].chat_template = None
    embedder = PipelineEmbedder(save_pipeline(tmp_path / "cosmos", "cosmos", modules), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"cannot embed 'a cat': .*template"):
        embedder.embed(["a cat"])
    modules = text_modules("wan")
    with torch.no_grad():
        modules["text_encoder"].encoder.final_layer_norm.weight.fill_(1e30)
    embedder = PipelineEmbedder(save_pipeline(tmp_path / "wan", "wan", modules), dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"in torch\.float16: .* not finite.*use bfloat16"):
        embedder.embed(["a cat"])


def test_pooled_embeddings_are_those_of_both_clips(tmp_path: Path) -> None:
    (found,) = PipelineEmbedder(save_pipeline(tmp_path, "sd3"), dtype=torch.float32).embed(["a cat"])
    assert {name: array.shape for name, array in found.items()} == {TEXT: (333, 12), POOLED: (6,)}

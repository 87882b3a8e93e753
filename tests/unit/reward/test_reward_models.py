"""Scorers of published reward models, with tiny weights in place of theirs, and what they need to be installed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring import batch_of

from starling.common.errors import ConfigError
from starling.reward.score.scorers import reward_models
from starling.reward.score.scorers.batch import Batch
from starling.reward.score.scorers.registry import BUILT_IN_CLASSES, check_name, check_scorer, load_scorer
from starling.reward.score.scorers.reward_models import COSMOS_TYPES, REWARD_MODELS, RewardModel


@pytest.mark.parametrize("name", [name for name in COSMOS_TYPES if name not in {*REWARD_MODELS, *BUILT_IN_CLASSES}])
def test_reward_type_without_a_scorer_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is a reward type of Cosmos-RL without a scorer here.*`label = "):
        check_name(name)


def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = RewardModel("a.b:C", ("json", "no_such_package"), "no-such-package")
    monkeypatch.setitem(reward_models.REWARD_MODELS, "hpsv3", model)
    with pytest.raises(
        ConfigError, match=r"needs no_such_package, which is not installed.*pip install no-such-package"
    ):
        check_name("hpsv3")


def test_every_reward_model_is_a_class_of_its_module() -> None:
    for name, model in REWARD_MODELS.items():
        assert name in (*COSMOS_TYPES, "judge", "reward_model", "service", "verifiers_rubric")
        module, _, attribute = model.scorer.partition(":")
        assert isinstance(getattr(importlib.import_module(module), attribute), type)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a CLIP model of random weights, and a tokenizer of bytes."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, **sizes}
    vision = {"image_size": 16, "patch_size": 8, **sizes}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    shape = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = transformers.CLIPImageProcessorPil(**shape)
    transformers.CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def batch(prompts: list[str], pixels: list[Any]) -> Batch:
    num = len(prompts)
    return batch_of(num, prompts=tuple(prompts), pixels=tuple(pixels), fps=(16.0,) * num)


def test_pickscore_is_the_scaled_similarity_of_prompt_and_image(clip_folder: Path) -> None:
    import torch
    from transformers import CLIPModel, CLIPProcessor

    from starling.reward.score.scorers.models.pickscore import PickScore

    images = np.random.default_rng(0).integers(0, 256, (3, 20, 24, 3), np.uint8)
    prompts = ["a red square", "b", "a very long prompt " * 40]
    scorer = PickScore(model_path=str(clip_folder), num_frames=2)
    scorer.setup()
    found = scorer.score(batch(prompts, [one[None] for one in images]))["pickscore"]
    model, processor = CLIPModel.from_pretrained(clip_folder), CLIPProcessor.from_pretrained(clip_folder)
    for score, prompt, image in zip(found, prompts, images, strict=True):  # one by one, and by hand
        inputs = processor(text=[prompt], images=[image], truncation=True, max_length=77, return_tensors="pt")
        with torch.no_grad():
            out = model(**inputs)
            cosine = torch.nn.functional.cosine_similarity(out.text_embeds, out.image_embeds)
            assert score == pytest.approx(float(model.logit_scale.exp() * cosine) / 26.0, abs=1e-4)
    assert len({round(score, 6) for score in found}) == 3
    video = np.stack([images[0], images[1], images[1], images[2]])
    apart = scorer.score(batch(["b", "b"], [images[0][None], images[1][None]]))["pickscore"]
    assert scorer.score(batch(["b"], [video]))["pickscore"] == pytest.approx([sum(apart) / 2], abs=1e-4)


def test_pickscore_is_a_scorer_by_name(clip_folder: Path) -> None:
    options = {"model_path": str(clip_folder), "dtype": "bfloat16", "device": "cpu", "download_path": "/workspace"}
    check_scorer("pickscore", options)
    form = load_scorer("pickscore", options).form
    assert (form.keys, form.media, form.batch_size) == (("pickscore",), "pixels", 16)
    for wrong, problem in (
        ({**options, "model_path": "/nowhere"}, "'/nowhere' is no folder; download yuvalkirstain/PickScore_v1"),
        ({**options, "num_frames": 0}, "num_frames is 0"),
        ({**options, "modle_path": "a"}, "no option 'modle_path'"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_scorer("pickscore", wrong)

"""Scorers of published models of images and videos, with random weights, or stand-ins of packages that are not here."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from test_reward_models import batch, clip_folder  # noqa: F401 - a fixture

from starling.common.errors import ConfigError
from starling.reward.score.scorers.judge.client import JudgeError
from starling.reward.score.scorers.models.gen_eval.rules import (
    COLORS,
    Found,
    Requirement,
    certain_objects,
    judge,
    relations,
    requirements_of,
)
from starling.reward.score.scorers.models.options import frame_means
from starling.reward.score.scorers.models.unified_reward import UnifiedReward, score_of
from starling.reward.score.scorers.models.video import PatchForm, fitted_size, patches_of, sampled_frames
from starling.reward.score.scorers.registry import load_scorer

RNG = np.random.default_rng(0)


def noise(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, np.uint8)


# --- frames and patches ------------------------------------------------------------------------------------------


@given(st.integers(1, 400), st.integers(2, 160), st.sampled_from([1, 2, 4]))
@examples(100)
def test_sampled_frames_are_evenly_spaced_and_a_multiple(num: int, most: int, multiple: int) -> None:
    video = np.arange(num, dtype=np.uint16).reshape(num, 1, 1, 1)
    frames, interval = sampled_frames(video, most, multiple)
    assert len(frames) % multiple == 0
    assert len(frames) <= max(most, multiple)
    numbers = frames.ravel().tolist()
    assert numbers == [min(number * interval, num - 1) for number in range(len(frames))] or num < multiple * interval
    assert (num - 1) // interval + 1 <= most


@given(st.integers(8, 4000), st.integers(8, 4000))
@examples(200)
def test_fitted_size_is_within_the_limits(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match="one side may be 200 times the other"):
            fitted_size(height, width, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)
        return
    rows, columns = fitted_size(height, width, factor=28, min_pixels=56 * 56, max_pixels=1280 * 28 * 28)
    assert rows % 28 == columns % 28 == 0
    assert rows * columns >= 56 * 56
    assert rows * columns <= 1280 * 28 * 28 or min(rows, columns) == 28


def test_patches_of_an_image_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mean, std = (0.5, 0.4, 0.3), (0.3, 0.4, 0.5)
    theirs = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, image_mean=mean, image_std=std, size={"shortest_edge": 64, "longest_edge": 1024}
    )
    image = noise(22, 30, 3)
    size = fitted_size(22, 30, factor=8, min_pixels=64, max_pixels=1024)
    found = patches_of(np.stack([image, image]), size, PatchForm(4, 2, 2, mean, std))
    expected = theirs(images=[image], return_tensors="np")
    assert found.grid == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(found.values, expected["pixel_values"], atol=1e-5)


def test_patches_have_their_frames_in_order() -> None:
    form = PatchForm(2, 2, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    video = np.stack([np.full((4, 4, 3), 10 * number, np.uint8) for number in range(4)])
    found = patches_of(video, (4, 4), form)
    assert found.grid == (2, 2, 2)
    elements = (found.values * 255).round().reshape(2, 4, 3, 2, 2, 2)  # [t, patch, channel, frame, row, column]
    assert [elements[t, :, :, frame].mean() for t in range(2) for frame in range(2)] == [0.0, 10.0, 20.0, 30.0]


# --- Cosmos-Reason1 ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reason_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_vision import write_folder

    return write_folder(tmp_path_factory.mktemp("reason"), "qwen2_5_vl")


def reason_options(folder: Path, **others: Any) -> dict[str, Any]:
    words = {"system_prompt": "abc", "question": "us {prompt}?", "yes": "u", "no": "s"}
    return {"model_path": str(folder), "dtype": "float32", "max_tokens": 64, "max_frames": 4, **words, **others}


def test_cosmos_reason1_is_the_probability_of_no(reason_folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    videos = [noise(5, 20, 28, 3), noise(1, 16, 16, 3)]
    scorer = load_scorer("cosmos_reason1", reason_options(reason_folder))
    assert (scorer.form.keys, scorer.form.media) == (("no_score", "yes_logit", "no_logit"), "pixels")
    from starling.reward.score.scorers.models.cosmos_reason1 import CosmosReason1

    one = CosmosReason1(**reason_options(reason_folder))
    one.setup()
    found = one.score(batch(["on", "sun"], videos))
    for no_score, yes, no in zip(*(found[key] for key in one.keys), strict=True):
        assert no_score == pytest.approx(math.exp(no) / (math.exp(yes) + math.exp(no)))
    assert found["yes_logit"][0] != found["yes_logit"][1]
    # By hand, for the first: 5 frames, every second, the odd one out.
    tokenizer = AutoTokenizer.from_pretrained(reason_folder)
    model = AutoModelForImageTextToText.from_pretrained(reason_folder)
    form = PatchForm(4, 2, 2, (0.5, 0.4, 0.3), (0.3, 0.4, 0.5))
    size = fitted_size(20, 28, factor=8, min_pixels=16 * 128, max_pixels=64 * 128 // 2)
    patches = patches_of(videos[0][:4:2], size, form)
    pads = "<|video_pad|>" * (math.prod(patches.grid) // 4)
    text = f"<s>system:abc</s><s>user:<|vision_start|>{pads}<|vision_end|>us on?</s><s>a:"
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    kinds = torch.where(ids == model.config.video_token_id, 2, 0)
    with torch.no_grad():
        logits = model(
            input_ids=ids,
            mm_token_type_ids=kinds,
            pixel_values_videos=torch.from_numpy(patches.values),
            video_grid_thw=torch.tensor([patches.grid]),
            second_per_grid_ts=torch.tensor([2 * 2 / 16.0]),
        ).logits[0, -1]
    yes_id, no_id = tokenizer.convert_tokens_to_ids(["u", "s"])
    assert found["yes_logit"][0] == pytest.approx(float(logits[yes_id]), abs=1e-4)
    assert found["no_logit"][0] == pytest.approx(float(logits[no_id]), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"no": "u"}, "its tokenizer does not tell 'u' from 'u'"),
        ({"model_path": "/nowhere"}, "'/nowhere' is no folder; download nvidia/Cosmos-Reason1-7B-Reward"),
        ({"max_frames": 1}, "max_frames is 1; give 2 to 4096"),
    ],
)
def test_cosmos_reason1_refuses_what_cannot_score(reason_folder: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_scorer("cosmos_reason1", reason_options(reason_folder, **changes))


def test_prompt_that_looks_like_a_video_fails(reason_folder: Path) -> None:
    from starling.reward.score.scorers.models.cosmos_reason1 import CosmosReason1

    one = CosmosReason1(**reason_options(reason_folder))
    one.setup()
    with pytest.raises(ValueError, match="the token that stands for a video"):
        one.score(batch(["<|video_pad|>"], [noise(2, 16, 16, 3)]))


# --- HPS v2 ------------------------------------------------------------------------------------------------------


def as_open_clip(model: Any) -> dict[str, Any]:
    """Return the weights of a CLIP model of transformers as open_clip has them."""
    import torch

    state, found = model.state_dict(), dict[str, Any]()
    outer = {
        "vision_model.embeddings.class_embedding": "visual.class_embedding",
        "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
        "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
        "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
        "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
        "vision_model.post_layernorm.weight": "visual.ln_post.weight",
        "vision_model.post_layernorm.bias": "visual.ln_post.bias",
        "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "text_model.final_layer_norm.weight": "ln_final.weight",
        "text_model.final_layer_norm.bias": "ln_final.bias",
        "logit_scale": "logit_scale",
    }
    for theirs, ours in outer.items():
        found[ours] = state[theirs]
    found["visual.proj"] = state["visual_projection.weight"].T
    found["text_projection"] = state["text_projection.weight"].T
    for tower, prefix in (("vision_model", "visual.transformer"), ("text_model", "transformer")):
        for number in range(2):
            layer, block = f"{tower}.encoder.layers.{number}", f"{prefix}.resblocks.{number}"
            for kind in ("weight", "bias"):
                parts = [state[f"{layer}.self_attn.{one}_proj.{kind}"] for one in "qkv"]
                found[f"{block}.attn.in_proj_{kind}"] = torch.cat(parts)
                found[f"{block}.attn.out_proj.{kind}"] = state[f"{layer}.self_attn.out_proj.{kind}"]
                for one, other in (("fc1", "c_fc"), ("fc2", "c_proj")):
                    found[f"{block}.mlp.{other}.{kind}"] = state[f"{layer}.mlp.{one}.{kind}"]
                for one in ("1", "2"):
                    found[f"{block}.ln_{one}.{kind}"] = state[f"{layer}.layer_norm{one}.{kind}"]
    return found


def test_hpsv2_is_the_cosine_with_the_weights_of_the_checkpoint(clip_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    import torch
    from PIL import Image
    from transformers import CLIPModel, CLIPProcessor

    from starling.reward.score.scorers.models.hpsv2 import Hpsv2

    torch.manual_seed(1)
    other = CLIPModel(CLIPModel.from_pretrained(clip_folder).config).eval()
    file = tmp_path / "HPS.pt"
    torch.save({"state_dict": as_open_clip(other)}, file)
    scorer = Hpsv2(model_path=str(clip_folder), checkpoint=str(file))
    scorer.setup()
    images = [noise(1, 16, 16, 3), noise(1, 8, 16, 3)]
    found = scorer.score(batch(["a red square", "b"], images))["hpsv2"]
    padded = np.zeros((16, 16, 3), np.uint8)
    padded[4:12] = images[1][0]
    processor = CLIPProcessor.from_pretrained(clip_folder)
    for score, prompt, image in zip(found, ["a red square", "b"], [images[0][0], padded], strict=True):
        inputs = processor(text=[prompt], images=[Image.fromarray(image)], return_tensors="pt")
        with torch.no_grad():
            out = other(**inputs)
        assert score == pytest.approx(float((out.text_embeds * out.image_embeds).sum()), abs=1e-5)
    own = Hpsv2(model_path=str(clip_folder))
    own.setup()
    assert own.score(batch(["b"], images[:1]))["hpsv2"] != pytest.approx(found[:1])


def test_checkpoint_of_another_model_is_refused(clip_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    import torch

    file = tmp_path / "other.pt"
    torch.save({"logit_scale": torch.zeros(()), "visual.proj": torch.zeros(3, 3)}, file)
    with pytest.raises(ConfigError, match="it is of another model than the folder"):
        load_scorer("hpsv2", {"model_path": str(clip_folder), "checkpoint": str(file)})


# --- packages that are not here: the keys, and how they are called -----------------------------------------------


def test_frame_means_are_of_evenly_spaced_frames() -> None:
    clips = [np.arange(8).reshape(8, 1, 1, 1), np.full((1, 1, 1, 1), 5)]
    assert frame_means(clips, 4, lambda frames, owners: [float(one.item()) for one in frames]) == [3.0, 5.0]


def test_hpsv3_is_the_mean_of_the_estimate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, made = ModuleType("hpsv3"), list[dict[str, Any]]()

    class HPSv3RewardInferencer:
        def __init__(self, **arguments: Any) -> None:
            made.append(arguments)

        def reward(self, *, prompts: list[str], image_paths: list[Any]) -> Any:
            return np.array([[len(prompt), image.size[0]] for prompt, image in zip(prompts, image_paths, strict=True)])

    module.HPSv3RewardInferencer = HPSv3RewardInferencer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpsv3", module)
    monkeypatch.setattr(module, "__spec__", object())
    (tmp_path / "hpsv3").mkdir()
    (tmp_path / "hpsv3" / "HPSv3.safetensors").touch()
    scorer = load_scorer("hpsv3", {"device": "cuda", "download_path": str(tmp_path)})
    assert made == [{"device": "cuda", "checkpoint_path": f"{tmp_path}/hpsv3/HPSv3.safetensors"}]
    assert scorer.form.keys == ("hpsv3",)
    from starling.reward.score.scorers.models.hpsv3 import Hpsv3

    one = Hpsv3()
    one.setup()
    assert one.score(batch(["abc", "d"], [noise(1, 2, 4, 3), noise(3, 2, 5, 3)]))["hpsv3"] == [3.0, 1.0]


def test_image_reward_scores_each_image_with_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    module = ModuleType("ImageReward")

    class Model(torch.nn.Module):
        def score(self, prompt: str, image: Any) -> float:
            return len(prompt) + image.size[0] / 100

    def load(name: str, **arguments: Any) -> Model:
        assert (name, arguments) == ("ImageReward-v1.0", {"device": "cpu", "download_root": "/models"})
        return Model()

    module.load = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ImageReward", module)
    from starling.reward.score.scorers.models.image_reward import ImageReward

    one = ImageReward(model_path="/models")
    one.setup()
    found = one.score(batch(["abc", "d"], [noise(1, 2, 4, 3), noise(1, 2, 5, 3)]))
    assert found == {"image_reward": pytest.approx([3.04, 1.05])}


VIDEO_ALIGN = """
import cv2

class VideoVLMRewardInference:
    def __init__(self, load_from_pretrained, device, dtype):
        self.made_with = load_from_pretrained, device, str(dtype)

    def reward(self, video_paths, prompts, use_norm=True):
        found = []
        for path, prompt in zip(video_paths, prompts):
            video = cv2.VideoCapture(path)
            frames = []
            while True:
                ok, frame = video.read()
                if not ok:
                    break
                frames.append(frame[:, :, ::-1])
            red = float(sum(int(frame[:, :, 0].astype(int).sum()) for frame in frames))
            found.append({"VQ": red, "MQ": float(len(frames)), "TA": float(len(prompt)), "Overall": float(use_norm)})
        return found
"""


def test_dance_grpo_gives_videos_without_loss_to_video_align(tmp_path: Path) -> None:
    code, weights = tmp_path / "code", tmp_path / "weights"
    code.mkdir()
    weights.mkdir()
    (code / "inference.py").write_text(VIDEO_ALIGN)
    from starling.reward.score.scorers.models.dance_grpo import VideoAlign

    one = VideoAlign(model_path=str(weights), download_path=str(code))
    path = list(sys.path)
    try:
        one.setup()
        video = noise(5, 32, 48, 3)
        found = one.score(batch(["abc"], [video]))
        assert one._model.made_with == (str(weights), "cpu", "torch.bfloat16")
    finally:
        sys.path[:] = path
        sys.modules.pop("inference", None)
    red = float(video[..., 0].astype(int).sum())
    assert found == {"vq_reward": [red], "mq_reward": [5.0], "ta_reward": [3.0], "overall_reward": [1.0]}
    with pytest.raises(ConfigError, match=r"has no inference.py; clone https://github.com/KwaiVGI/VideoAlign"):
        load_scorer("dance_grpo", {"model_path": str(weights), "code_path": str(weights)})


# --- UnifiedReward -----------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """An OpenAI-compatible endpoint: its address, what it was asked, and what it answers, one after another."""
    asked, answers = list[dict[str, Any]](), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({**body, "key": self.headers["authorization"]})
            answer = answers.pop(0)
            data = json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            self.send_response(503 if answer == "busy" else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked, answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_unified_reward_is_a_fifth_of_the_final_score(endpoint: Any) -> None:
    url, asked, answers = endpoint
    one = UnifiedReward(endpoint_url=url, endpoint_api_key="secret", concurrency=1, num_frames=2)
    one.setup()
    answers += ["busy", "Good. Final Score: 4"]
    assert one.score(batch(["a cat"], [noise(3, 4, 4, 3)])) == {"unified_reward": [0.8]}
    assert len(asked) == 2
    *images, text = asked[1]["messages"][0]["content"]
    assert len(images) == 2
    assert all(one["image_url"]["url"].startswith("data:image/png;base64,") for one in images)
    assert "[a cat]" in text["text"]
    assert asked[1]["key"] == "Bearer secret"
    assert asked[1]["model"] == "UnifiedReward-7b-v1.5"
    answers += ["I cannot say."]
    with pytest.raises(ValueError, match="the answer has no 'Final Score:'"):
        one.score(batch(["a cat"], [noise(1, 4, 4, 3)]))


def test_unified_reward_without_an_answer_fails(endpoint: Any) -> None:
    url, _, answers = endpoint
    one = UnifiedReward(endpoint_url=url, retries=1)
    one.setup()
    answers += ["busy", "busy"]
    with pytest.raises(JudgeError, match="status 503"):
        one.score(batch(["a cat"], [noise(1, 4, 4, 3)]))
    with pytest.raises(ConfigError, match="give an address as http"):
        UnifiedReward(endpoint_url="judge:8000")


@pytest.mark.parametrize(
    ("answer", "score"), [("Final Score: 3.5", 0.7), ("**Final Score:** 1 ... final score: 5", 1.0)]
)
def test_last_final_score_counts(answer: str, score: float) -> None:
    assert score_of(answer) == pytest.approx(score)


def test_final_score_out_of_range_fails() -> None:
    with pytest.raises(ValueError, match="the final score is 10, not from 1 to 5"):
        score_of("Final Score: 10")


# --- GenEval -----------------------------------------------------------------------------------------------------


def thing(name: str, left: float, top: float, confidence: float = 0.95, size: float = 10.0) -> Found:
    return Found(name, confidence, (left, top, left + size, top + size))


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (30.0, 0.0, {"right of"}),
        (-30.0, 0.0, {"left of"}),
        (0.0, -30.0, {"above"}),
        (0.0, 30.0, {"below"}),
        (30.0, 30.0, {"right of", "below"}),
        (1.0, 1.0, set()),
        (0.0, 0.0, set()),
    ],
)
def test_relation_of_objects_is_that_of_their_centres(x: float, y: float, expected: set[str]) -> None:
    assert relations(thing("a", x, y), thing("b", 0.0, 0.0)) == expected


def test_counting_takes_only_certain_objects_and_the_best_of_many() -> None:
    objects = [thing("dog", 0.0, 0.0, 0.5), thing("dog", 1.0, 0.0, 0.92), thing("cat", 0.0, 0.0, 0.2)]
    assert [one.confidence for one in certain_objects(objects, "single_object")["dog"]] == [0.92, 0.5]
    assert [one.confidence for one in certain_objects(objects, "counting")["dog"]] == [0.92]
    assert "cat" not in certain_objects(objects, "single_object")
    assert len(certain_objects([thing("dog", 0.0, 0.0)] * 40, "counting")["dog"]) == 16


NO_COLORS: Any = None


@pytest.mark.parametrize(
    ("num", "verdict"),
    [(0, (False, False, 0.0)), (1, (False, False, 0.5)), (2, (True, True, 1.0)), (3, (True, False, 0.5))],
)
def test_number_of_objects_is_at_least_or_just_what_is_required(num: int, verdict: tuple[bool, bool, float]) -> None:
    assert judge([Requirement("dog", 2)], {"dog": [thing("dog", 0.0, 0.0)] * num}, NO_COLORS) == verdict


def test_colours_and_places_are_parts_of_the_score() -> None:
    dog, cat = [thing("dog", 0.0, 0.0)], [thing("cat", 40.0, 0.0)]
    required = requirements_of(
        [{"class": "dog", "count": 1, "color": "red"}, {"class": "cat", "count": 1, "position": ["right of", 0]}]
    )
    objects = {"dog": dog, "cat": cat}
    assert judge(required, objects, lambda name, found: ["red"] * len(found)) == (True, True, 1.0)
    # The dog is blue, so that there is no red dog for the cat to be beside.
    assert judge(required, objects, lambda name, found: ["blue"] * len(found)) == (False, False, 0.5)
    assert judge(required, {"dog": dog}, lambda name, found: ["red"] * len(found)) == (False, False, 0.5)


@pytest.mark.parametrize(
    "include",
    [
        None, "dog", [], [1], [{"class": "dog"}], [{"class": "dog", "count": 0}], [{"class": "dog", "count": True}],
        [{"class": "dog", "count": 1, "color": "mauve"}], [{"class": "dog", "count": 1, "position": ["left of", 0]}],
        [{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": ["beside", 0]}],
        [{"class": "a", "count": 1}, {"class": "b", "count": 1, "position": "left"}],
    ],
)  # fmt: skip
def test_requirements_that_are_none_are_refused(include: Any) -> None:
    with pytest.raises(ValueError, match="geneval_includes"):
        requirements_of(include)


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Mask2Former of random weights, of two classes."""
    import torch
    import transformers
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    folder = tmp_path_factory.mktemp("detector")
    backbone = transformers.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=8,
        id2label={0: "dog", 1: "mouse"}, label2id={"dog": 0, "mouse": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(folder)
    return folder


def test_gen_eval_runs_with_models_of_transformers(clip_folder: Path, detector_folder: Path) -> None:  # noqa: F811
    from starling.reward.score.scorers.models.gen_eval.scorer import GenEval, box_of, cut_out

    one = GenEval(model_path=str(detector_folder), clip_path=str(clip_folder))
    one.setup()
    image = noise(48, 64, 3)
    for found in one._find(image):
        assert found.name in ("dog", "mouse")
        assert found.box == box_of(found.mask)
    mask = np.zeros((48, 64), bool)
    mask[10:20, 30:50] = True
    known = Found("dog", 0.9, box_of(mask), mask)
    assert known.box == (30.0, 10.0, 50.0, 20.0)
    assert cut_out(image, known).shape == (10, 20, 3)
    assert set(one._colors(image, "dog", [known, known])) <= set(COLORS)
    metadata = {"geneval_tags": "colors", "geneval_includes": [{"class": "computer mouse", "count": 1, "color": "red"}]}
    found = one.score(batch_with(["p"], [image[None]], [metadata]))
    assert set(found) == set(one.keys)
    assert found["gen_eval_group/counting"] == [-10.0]
    assert found["gen_eval_group/colors"] == found["gen_eval_reward"]
    with pytest.raises(ValueError, match="`geneval_tags` is None"):
        one.score(batch_with(["p"], [image[None]], [{}]))


def batch_with(prompts: list[str], pixels: list[Any], metadata: list[dict[str, Any]]) -> Any:
    from dataclasses import replace

    return replace(batch(prompts, pixels), metadata=tuple(metadata))

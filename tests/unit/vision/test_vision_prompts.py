"""Encoding of prompts with images and videos, and the errors for invalid ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_vision import (
    FAMILIES,
    PIXELS,
    VOCABULARY,
    ask,
    data_url,
    generate,
    image,
    make_encoder,
    make_model,
    make_tokenizer,
    picture,
    write_folder,
    write_video,
)
from transformers import LlamaConfig, LlamaForCausalLM

from starling.common.errors import ConfigError, StarlingError
from starling.common.wire.messages import ChatMessage, Media, Prompt, Sampling
from starling.rollout.engine.base import GroupRequest, RequestError
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.multimodal.loading import MediaBudget
from starling.rollout.engine.multimodal.prompts import FrameProcessor, PromptEncoder
from starling.rollout.shell.results import generated_message

IMAGE, VIDEO = VOCABULARY["<|image_pad|>"], VOCABULARY["<|video_pad|>"]


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("model")
    return make_encoder(write_folder(folder, request.param, weights=False), make_model(request.param))


def video(uri: object, fps: float = 0.0) -> Media:
    return Media(kind="video", uri=str(uri), fps=fps)


def test_image_has_one_token_per_four_patches(encoder: PromptEncoder) -> None:
    ids, tensors = encoder.encode(ask("a<image>b<image>", image(16, 24), image(40, 8)))
    assert tensors["image_grid_thw"].tolist() == [[1, 6, 4], [1, 2, 10]]
    assert tensors["pixel_values"].shape == (44, 96)
    assert ids.count(IMAGE) == 11
    first, second = ids.index(IMAGE), len(ids) - 1 - ids[::-1].index(IMAGE)
    assert ids[first - 1] == VOCABULARY["<|vision_start|>"]
    assert ids[second + 1] == VOCABULARY["<|vision_end|>"]
    assert VOCABULARY["b"] in ids[first:second]
    assert tensors["position_ids"].shape == (3, len(ids))


def test_image_is_the_same_by_path_url_and_data_url(encoder: PromptEncoder, tmp_path: Path) -> None:
    shown = picture(16, 24)
    path = tmp_path / "a picture.png"
    shown.save(path)
    uris = [str(path), f"file://{tmp_path}/a%20picture.png", data_url(shown)]
    pixels = [encoder.encode(ask("<image>", Media(kind="image", uri=uri)))[1]["pixel_values"] for uri in uris]
    assert np.array_equal(pixels[0], pixels[1])
    assert np.array_equal(pixels[0], pixels[2])


def test_text_prompt_has_no_tensors(encoder: PromptEncoder) -> None:
    ids, tensors = encoder.encode(ask("abc"))
    assert make_tokenizer().decode(ids).replace(" ", "") == "<s>u:abc</s><s>a:"
    assert tensors == {}
    assert encoder.encode(Prompt(id="p", text="abc"))[0] == [VOCABULARY[c] for c in "abc"]


def test_video_positions_follow_its_frame_rate(tmp_path: Path) -> None:
    prompt = ask("<video>", video(write_video(tmp_path / "frames", 24, 16, 5), fps=2.0))
    encoders = {
        family: make_encoder(write_folder(tmp_path / family, family, weights=False), make_model(family))
        for family in FAMILIES
    }
    # Five frames make three steps of two; 6 x 4 cells of a frame make 6 tokens.
    ids, tensors = encoders["qwen2_5_vl"].encode(prompt)
    assert tensors["video_grid_thw"].tolist() == [[3, 4, 6]]
    assert ids.count(VIDEO) == 18
    # A step takes a second, in which four positions go by.
    assert np.unique(tensors["position_ids"][0, np.array(ids) == VIDEO]).tolist() == [4, 8, 12]
    text = make_tokenizer().decode(encoders["qwen3_vl"].encode(prompt)[0]).replace(" ", "")
    assert text.count("<|vision_start|>") == 3
    assert [time in text for time in ("<0.2seconds>", "<1.2seconds>", "<2.0seconds>")] == [True] * 3


def test_animated_image_is_a_video(encoder: PromptEncoder, tmp_path: Path) -> None:
    frames = [picture(16, 16, seed).quantize(16) for seed in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    _, tensors = encoder.encode(ask("<video>", video(tmp_path / "a.gif")))
    assert tensors["video_grid_thw"][0, 0] == 2
    steps = np.split(tensors["pixel_values_videos"], 2)
    assert not np.array_equal(*steps)


@pytest.mark.parametrize("per_video", [False, True])
def test_still_video_has_the_patches_of_its_image(tmp_path: Path, per_video: bool) -> None:
    """The image processor repeats an image once per frame of a patch, so both must be bitwise equal."""
    from transformers import AutoImageProcessor

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    shown = picture(20, 13)
    of_image = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(images=[shown], return_tensors="np")
    patches, grid = FrameProcessor.read(tmp_path, per_video=per_video)([shown, shown], MediaBudget(1 << 20))
    assert [grid] == of_image["image_grid_thw"].tolist()
    np.testing.assert_allclose(patches, of_image["pixel_values"], rtol=0, atol=1e-6)


def test_frame_processor_reads_the_files_of_transformers(tmp_path: Path) -> None:
    def read() -> FrameProcessor:
        return FrameProcessor.read(tmp_path, per_video=True)

    assert (read().patch_size, read().min_pixels, read().max_pixels) == (14, 128 * 28 * 28, 768 * 28 * 28)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    assert (read().patch_size, read().min_pixels, read().max_pixels) == (4, 64, 1024)
    of_video = {"patch_size": 8, "size": {"shortest_edge": 5, "longest_edge": 6}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(of_video))
    assert (read().patch_size, read().min_pixels, read().max_pixels) == (8, 5, 6)
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"patch_size": 2}}))
    assert read().patch_size == 2
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"processor_config.json is not valid JSON"):
        read()


# --- invalid prompts -----------------------------------------------------------------------------------------------


def refused(encoder: PromptEncoder, prompt: Prompt) -> str:
    with pytest.raises(StarlingError) as caught:
        encoder.encode(prompt)
    return str(caught.value)


def test_unreadable_media_are_rejected(encoder: PromptEncoder, tmp_path: Path) -> None:
    def image_at(uri: object) -> str:
        return refused(encoder, ask("<image>", Media(kind="image", uri=str(uri))))

    (tmp_path / "text.png").write_text("no image")
    whole = (tmp_path / "whole.png").write_bytes
    picture(30, 30).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:300])
    whole(b"")
    assert "nowhere.png' does not exist on the rollout's host" in image_at(tmp_path / "nowhere.png")
    assert "'/dev/null' is not a regular file: name an image" in image_at("/dev/null")
    os.mkfifo(tmp_path / "pipe.png")
    assert "pipe.png' is not a regular file: name an image" in image_at(tmp_path / "pipe.png")
    for name in ("text.png", "cut.png", "whole.png"):
        assert f"{name}' does not decode (" in image_at(tmp_path / name)
    assert "does not decode" in image_at(tmp_path)
    assert "is not fetched from elsewhere: give a path" in image_at("https://example.org/a.png")
    assert "is not a base64 data URL" in image_at("data:image/png,abc")
    assert "is not valid base64" in image_at("data:image/png;base64,!!")
    assert len(image_at("data:image/png;base64," + "A" * 4000)) < 300


def test_unusable_videos_are_rejected(encoder: PromptEncoder, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is a folder without files" in refused(encoder, ask("<video>", video(empty)))
    mixed = Path(write_video(tmp_path / "mixed", 16, 16, 2))
    picture(8, 16).save(mixed / "0002.png")
    assert "has frames of 8x16 and 16x16 pixels" in refused(encoder, ask("<video>", video(mixed)))


def test_image_of_extreme_aspect_ratio_is_rejected(encoder: PromptEncoder) -> None:
    assert "aspect ratio" in refused(encoder, ask("<image>", image(600, 2)))


def test_too_many_pixels_are_rejected(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen3_vl", weights=False)
    encoder = make_encoder(folder, make_model("qwen3_vl"), max_media_bytes=20_000)
    encoder.encode(ask("<image>", image(24, 24)))
    assert "rollout.max_media_bytes is 20000: give smaller" in refused(
        encoder, ask("<image><image>", image(24, 24), image(24, 24))
    )


def test_too_large_image_is_not_decoded(encoder: PromptEncoder, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    Image.new("1", (3000, 3000)).save(bomb)
    assert bomb.stat().st_size < 10_000
    whole = bomb.read_bytes()
    bomb.write_bytes(whole[:100])  # nothing but the header is there to be read
    assert "take 27000000 bytes or more and rollout.max_media_bytes is 1048576" in refused(
        encoder, ask("<image>", Media(kind="image", uri=str(bomb)))
    )


def test_media_budget_counts_frames_while_reading(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "qwen3_vl", weights=False)
    encoder = make_encoder(folder, make_model("qwen3_vl"), max_media_bytes=20_000)
    frames = [picture(32, 32, seed).quantize(16) for seed in range(9)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert "take 21504 bytes or more" in refused(encoder, ask("<video>", video(tmp_path / "a.gif")))
    assert "take 21504 bytes or more" in refused(
        encoder, ask("<video>", video(write_video(tmp_path / "frames", 32, 32, 9)))
    )


def test_media_budget_counts_enlarged_frames_before_resizing(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    processor = FrameProcessor.read(tmp_path, per_video=False)
    with pytest.raises(RequestError, match=r"take 1536 bytes or more and rollout.max_media_bytes is 1535"):
        processor([picture(2, 2)], MediaBudget(1535))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (ask("<image><image>", image(8, 8)), "refers to image, image and has image: write <image>"),
        (ask("<image>"), "refers to image and has no media"),
        (ask("abc", image(8, 8)), "refers to no media and has image"),
        (ask("<video>", image(8, 8)), "refers to video and has image"),
        (Prompt(id="p", text="<image>", media=(image(8, 8),)), "is plain text: give it as a conversation"),
        (ask("<image><|image_pad|>", image(8, 8)), r"2 places <|image_pad|> for 1 images"),
    ],
)
def test_media_that_do_not_match_the_text_are_rejected(encoder: PromptEncoder, prompt: Prompt, complaint: str) -> None:
    assert complaint in refused(encoder, prompt)


def test_text_model_rejects_images(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    encoder = make_encoder(tmp_path, model)
    assert "only text is supported here; generate with a vision-language model" in refused(
        encoder, ask("<image>", image(8, 8))
    )
    # Without media the marker is text like any other.
    assert encoder.encode(ask("<image>"))[1] == {}
    engine = TransformersEngine(model.eval(), eos_token_ids=())
    with pytest.raises(RequestError, match="has images or videos, and the model takes text only"):
        engine.add(GroupRequest("g", [1, 2], 1, Sampling(max_tokens=1), {"image_grid_thw": np.ones((1, 3), np.int64)}))


def test_folder_without_an_image_processor_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the image processor of .* cannot be loaded"):
        make_encoder(tmp_path, make_model("qwen3_vl"))


def test_engine_rejects_placeholders_without_images(encoder: PromptEncoder, tmp_path: Path) -> None:
    model = make_model("qwen3_vl")
    engine = TransformersEngine(model, eos_token_ids=())
    ids, tensors = encoder.encode(ask("<image>", image(16, 16)))
    settings = Sampling(max_tokens=2)
    engine.add(GroupRequest("good", ids, 1, settings, tensors))
    for name, wrong_ids, wrong_tensors in (("none", ids, {}), ("more", [*ids, IMAGE], tensors), ("a", [VIDEO], {})):
        with pytest.raises(RequestError, match="placeholder tokens"):
            engine.add(GroupRequest(name, wrong_ids, 1, settings, wrong_tensors))
    assert engine.num_waiting == 1
    assert [result.lease for _ in range(2) for result in engine.step()] == ["good"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_placeholders_are_never_sampled(tmp_path: Path, temperature: float) -> None:
    model = make_model("qwen3_vl", tied=False)
    encoder = make_encoder(write_folder(tmp_path, "qwen3_vl", weights=False), model)
    with torch.no_grad():  # Without the rule, hardly anything else would be drawn.
        model.lm_head.weight[IMAGE] = 3 * model.lm_head.weight[VOCABULARY["a"]]
        model.lm_head.weight[VIDEO] = -model.lm_head.weight[IMAGE]
        found = generate(model, encoder, {"g": ask("ab")}, count=8, max_tokens=12, temperature=temperature)["g"]
    sampled = np.concatenate([completion.token_ids for completion in found.completions])
    assert not np.isin(sampled, (IMAGE, VIDEO)).any()
    assert np.isfinite(np.concatenate([completion.logprobs for completion in found.completions])).all()


def test_generated_message_lists_the_tensors_of_media(encoder: PromptEncoder) -> None:
    model = make_model("qwen3_vl")
    with torch.no_grad():
        result = generate(model, encoder, {"g": ask("<image>", image(16, 16))})["g"]
    message, buffers = generated_message(result, str)
    described: dict[str, Any] = {meta.name: (meta.dtype, meta.shape) for meta in message.tensors[4:]}
    assert described == {
        "pixel_values": ("float32", (16, 96)),
        "image_grid_thw": ("int64", (1, 3)),
        "position_ids": ("int32", (3, len(result.prompt_ids))),
    }
    assert [meta.nbytes for meta in message.tensors] == [len(buffer) for buffer in buffers]


def test_media_are_assigned_to_messages_in_order(encoder: PromptEncoder) -> None:
    messages = (ChatMessage(role="u", content="<image>a"), ChatMessage(role="u", content="b<image>"))
    both = Prompt(id="p", messages=messages, media=(image(8, 8, 1), image(8, 16, 2)))
    ids, tensors = encoder.encode(both)
    assert tensors["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 2]]
    between = ids[ids.index(IMAGE) + 1 : len(ids) - 1 - ids[::-1].index(IMAGE) - 1]
    assert [VOCABULARY[c] in between for c in "ab"] == [True, True]


def test_grey_image_is_converted_to_rgb(encoder: PromptEncoder, tmp_path: Path) -> None:
    Image.new("L", (16, 16), 128).save(tmp_path / "grey.png")
    _, tensors = encoder.encode(ask("<image>", Media(kind="image", uri=str(tmp_path / "grey.png"))))
    assert tensors["pixel_values"].shape == (16, 96)

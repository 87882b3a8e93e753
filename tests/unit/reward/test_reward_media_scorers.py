"""Built-in scorers of pixels and latents: values computed by hand, options, and how they treat large clips."""

from __future__ import annotations

import base64
import io
import math
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from property_tests import examples

from starling.common.errors import ConfigError
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText
from starling.reward.score.scorers.batch import BatchScores, MediaArray
from starling.reward.score.scorers.media.font import GLYPHS, MAX_CHARACTERS, draw, read
from starling.reward.score.scorers.media.frames import evenly_spaced
from starling.reward.score.scorers.media.ocr import agreement, edit_distance, quoted
from starling.reward.score.scorers.registry import BUILT_IN_CLASSES, load_scorer

BLACK, WHITE, GREY = (0, 0, 0), (255, 255, 255), (100, 100, 100)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def plain(*colours: tuple[int, int, int], height: int = 4, width: int = 6) -> np.ndarray:
    """Return a clip of plain frames."""
    frames = [np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)) for colour in colours]
    return np.ascontiguousarray(np.stack(frames))


def scored(
    name: str, *arrays: np.ndarray, prompt: str = "", metadata: dict[str, Any] | None = None, **options: Any
) -> BatchScores:
    samples = [(PromptText(prompt, "", metadata or {}), CompletionText(text="", status=Status.OK, num_tokens=0))] * len(
        arrays
    )
    for array in arrays:
        array.flags.writeable = False
    return load_scorer(name, options).score(samples, [MediaArray(array, 16.0) for array in arrays])


def value(name: str, array: np.ndarray, **others: Any) -> float:
    found = scored(name, array, **others)
    assert found.problems == ("",)
    assert found.values[0][0] is not None
    return found.values[0][0]


def problem(name: str, array: np.ndarray, **others: Any) -> str:
    return scored(name, array, **others).problems[0]


def close(number: float) -> Any:
    return pytest.approx(number, rel=1e-5, abs=1e-6)


HALVES = np.concatenate([plain(RED, width=3), plain(BLUE, width=3)], axis=2)
EDGE = np.zeros((1, 5, 5, 3), np.uint8)
EDGE[0, 2, 2] = 10

VALUES: list[tuple[str, np.ndarray, dict[str, Any], float]] = [
    ("brightness", plain(BLACK), {}, 0.0),
    ("brightness", plain(WHITE), {}, 1.0),
    ("brightness", plain(RED), {}, 0.299),
    ("brightness", plain(GREEN, BLUE), {}, (0.587 + 0.114) / 2),
    ("target_colour", plain(RED), {"colour": "#ff0000"}, 1.0),
    ("target_colour", plain((0, 255, 255)), {"colour": "#FF0000"}, 0.0),
    ("target_colour", plain(BLACK), {"colour": "#ff0000"}, 1.0 - 1.0 / math.sqrt(3)),
    ("target_colour", HALVES, {"colour": "#ff0000"}, 1.0 - math.sqrt(2) / math.sqrt(3) / 2),
    ("target_colour", plain(BLUE), {"metadata": {"colour": "#0000ff"}}, 1.0),
    ("colourfulness", plain(GREY), {}, 0.0),
    # Red only: rg = 255, yb = 127.5, no deviation.
    ("colourfulness", plain(RED), {}, 0.3 * math.hypot(255, 127.5)),
    # Red and blue halves: rg is 255 and 0, yb 127.5 and -255.
    ("colourfulness", HALVES, {}, math.hypot(127.5, 191.25) + 0.3 * math.hypot(127.5, -63.75)),
    ("motion", plain(GREY), {}, 0.0),
    ("motion", plain(BLACK, WHITE, BLACK), {}, 1.0),
    ("motion", plain(BLACK, (51, 51, 51), (51, 51, 51)), {}, 0.1),
    ("motion", plain(RED, BLUE), {}, 2 / 3),
    ("smoothness", plain(BLACK, WHITE, BLACK), {}, 0.0),
    ("smoothness", plain(BLACK, (10, 10, 10), (20, 20, 20), (30, 30, 30)), {}, 1.0),
    ("smoothness", plain(BLACK, BLACK, (51, 51, 51)), {}, 0.9),
    ("flicker", plain(BLACK, WHITE), {}, 1.0),
    ("flicker", plain(GREY), {}, 0.0),
    ("flicker", plain(RED, BLUE, RED), {}, 0.299 - 0.114),
    # What moves does not flicker.
    ("flicker", np.concatenate([HALVES, HALVES[:, :, ::-1]]), {}, 0.0),
    ("sharpness", plain(GREY), {}, 0.0),
    # The Laplacian of the nine inner pixels is -40 in the middle, 10 at its four neighbours, 0 in the corners.
    ("sharpness", EDGE, {}, (1600 + 4 * 100) / 9),
    ("first_frame_consistency", plain(RED, RED), {}, 1.0),
    ("first_frame_consistency", plain(BLACK), {}, 1.0),
    ("first_frame_consistency", plain(BLACK, WHITE, BLACK), {}, 0.5),
]


@pytest.mark.parametrize(("name", "clip", "others", "expected"), VALUES)
def test_score_is_the_one_computed_by_hand(
    name: str, clip: np.ndarray, others: dict[str, Any], expected: float
) -> None:
    assert value(name, clip, **others) == close(expected)


def test_scores_of_a_batch_are_those_of_its_clips() -> None:
    found = scored("brightness", plain(BLACK), plain(WHITE, height=9), plain(RED, BLACK))
    assert [values[0] for values in found.values] == [close(0.0), close(1.0), close(0.299 / 2)]


def image(colour: tuple[int, int, int], *, size: tuple[int, int] = (6, 4), format: str = "PNG") -> str:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).save(stream, format=format)
    return base64.b64encode(stream.getvalue()).decode()


def test_frames_are_compared_with_the_image_of_the_prompt() -> None:
    for size in ((6, 4), (60, 40), (3, 2)):
        metadata = {"image": image(WHITE, size=size)}
        assert value("first_frame_consistency", plain(WHITE, BLACK), metadata=metadata) == close(0.5)
    assert value("first_frame_consistency", plain(WHITE), metadata={"image": image(WHITE, format="JPEG")}) == close(1.0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (3, "the metadata's image is a int; send a file of PNG or JPEG in base64"),
        ("%", "the metadata's image cannot be read (Only base64 data is allowed)"),
        (base64.b64encode(b"GIF89a").decode(), "the metadata's image cannot be read (cannot identify image file"),
        (image(RED, format="GIF"), "the metadata's image cannot be read (cannot identify image file"),
        (image(RED, size=(6000, 6000)), "it has 6000 x 6000 pixels, above 33554432"),
        (image(RED)[:60], "the metadata's image cannot be read"),
    ],
)
def test_image_that_cannot_be_read_is_a_problem(metadata: object, expected: str) -> None:
    assert expected in problem("first_frame_consistency", plain(RED), metadata={"image": metadata})


def test_compressibility_is_lower_for_noise_than_for_plain_frames() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    flat = value("jpeg_compressibility", plain(GREY, height=64, width=64))
    assert -0.1 < flat < 0.0
    assert value("jpeg_compressibility", noise) < -0.3
    stream = io.BytesIO()
    Image.fromarray(noise[0]).save(stream, format="JPEG", quality=30)
    assert value("jpeg_compressibility", noise[:1], quality=30) == close(-stream.tell() / noise[0].size)


LATENTS = np.arange(16 * 2 * 2 * 2, dtype=np.float32).reshape(16, 2, 2, 2)


@pytest.mark.parametrize(
    ("latents", "target", "options", "expected"),
    [
        (LATENTS, LATENTS.tolist(), {}, 0.0),
        (np.full((2, 1, 2, 2), 3, np.float32), 1, {}, -4.0),
        (np.full((2, 1, 2, 2), 3, np.float32), [[[[1]]], [[[5]]]], {"distance": "absolute"}, -2.0),
        (np.full((2, 1, 2, 2), 3, np.float32), 0.5, {"distance": "cosine"}, 0.0),
        (np.full((2, 1, 2, 2), 3, np.float32), -0.5, {"distance": "cosine"}, -2.0),
        (np.full((2, 1, 2, 2), 3, np.float32), 0, {"distance": "cosine"}, -1.0),
    ],
)
def test_distance_to_target_of_the_prompt(
    latents: np.ndarray, target: object, options: dict[str, Any], expected: float
) -> None:
    assert value("latent_target", latents, metadata={"latent_target": target}, **options) == close(expected)


def test_distance_to_target_in_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "target.npy", np.full((16, 1, 1, 1), 2.0, np.float16))
    latents = np.full((16, 2, 3, 4), 5.0, np.float32)
    assert value("latent_target", latents, file=str(tmp_path / "target.npy")) == close(-9.0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, "the metadata has no 'latent_target'; add one, or set the option `file`"),
        ({"latent_target": "x"}, "the latent target is no array of numbers"),
        ({"latent_target": [[1], [1, 2]]}, "the latent target is no array of numbers"),
        ({"latent_target": float("inf")}, "the latent target has infinities or NaN"),
        ({"latent_target": [1, 2, 3]}, "latents of [16, 2, 2, 2] have a target of [3]"),
    ],
)
def test_target_that_is_none_is_a_problem(metadata: dict[str, Any], expected: str) -> None:
    assert expected in problem("latent_target", LATENTS, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "clip", "metadata", "expected"),
    [
        ("smoothness", plain(RED, RED), {}, "a clip of 2 frames has no second difference; send three or more"),
        ("sharpness", plain(RED, height=2), {}, "frames of 2 x 6 have no Laplacian; send 3 x 3 or more"),
        ("target_colour", plain(RED), {}, "the colour is None; set the option, or the metadata's, to one such as"),
        ("target_colour", plain(RED), {"colour": "red"}, "the colour is 'red'; set the option"),
    ],
)
def test_clip_that_cannot_be_scored_is_a_problem(
    name: str, clip: np.ndarray, metadata: dict[str, Any], expected: str
) -> None:
    assert expected in problem(name, clip, metadata=metadata)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("motion", {"max_frames": 0}, "max_frames is 0; set an integer from 1 to 4096"),
        ("motion", {"max_side": True}, "max_side is True; set an integer"),
        ("motion", {"speed": 1}, "Scorer 'motion' has no option 'speed'; its options are: max_frames, max_side"),
        ("target_colour", {"colour": "#ff00"}, "the colour is '#ff00'"),
        ("jpeg_compressibility", {"quality": 96}, "quality is 96; set an integer from 1 to 95"),
        ("latent_target", {"distance": "far"}, "distance is 'far'; set one of squared, absolute, cosine"),
        ("latent_target", {"file": "/nowhere.npy"}, "the latent target '/nowhere.npy' cannot be read"),
        ("ocr", {}, "pip install paddleocr paddlepaddle, or set `recogniser` to `bitmap`"),
        ("ocr", {"recogniser": "none:read"}, "Recogniser 'none:read' cannot be imported"),
        ("ocr", {"recogniser": "math:pi"}, "the recogniser 'math:pi' is a float; give a function, or `bitmap`"),
    ],
)
def test_options_are_checked_at_the_start(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_scorer(name, options)
    assert expected in str(raised.value)


@pytest.mark.parametrize("name", [name for name in BUILT_IN_CLASSES if name != "latent_target"])
def test_long_video_costs_no_more_memory_than_a_few_frames(name: str) -> None:
    options: dict[str, Any] = {"ocr": {"recogniser": "bitmap"}, "target_colour": {"colour": "#ff0000"}}.get(name, {})
    clip = np.zeros((100, 240, 320, 3), np.uint8)  # 23 MB, which are 92 MB as float32
    clip[::2] = 200
    scored(name, clip[:3], prompt='"A"', **options)  # imports what it needs
    tracemalloc.start()
    try:
        value(name, clip, prompt='"A"', **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_frames_are_evenly_spaced_from_first_to_last() -> None:
    assert evenly_spaced(3, 5) == [0, 1, 2]
    assert evenly_spaced(9, 3) == [0, 4, 8]
    assert evenly_spaced(10, 4) == [0, 3, 6, 9]
    assert evenly_spaced(10, 1) == [0]
    assert evenly_spaced(-1, 4) == []


def test_large_frames_are_thinned() -> None:
    clip = plain(BLACK, height=10, width=10).copy()
    clip[0, ::2, ::2] = 255
    assert value("brightness", clip, max_side=5) == close(1.0)
    assert value("brightness", clip, max_side=10) == close(0.25)


ALPHABET = "".join(GLYPHS)
LINE = (
    st.text(ALPHABET + " ", min_size=1, max_size=10)
    .map(lambda line: " ".join(line.split()))
    .filter(lambda line: any(character.isalnum() for character in line))
)


@examples(200)
@given(st.lists(LINE, min_size=1, max_size=3), st.integers(1, 4), st.booleans())
def test_drawn_text_is_read_again(lines: list[str], scale: int, is_inverted: bool) -> None:
    frame = draw("\n".join(lines), scale)[0]
    assert read(255 - frame if is_inverted else frame) == "\n".join(lines)


def test_noisy_text_is_read() -> None:
    clean = draw("HELLO 42", 4)[0]
    rng = np.random.default_rng(1)
    noisy = np.clip(clean.astype(float) * 0.6 + 50 + rng.normal(0, 15, clean.shape), 0, 255).astype(np.uint8)
    assert read(noisy) == "HELLO 42"


def test_noise_is_no_long_text_and_plain_frames_are_none() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)
    assert len(read(noise)) <= MAX_CHARACTERS
    assert read(plain(GREY)[0]) == ""
    assert read(plain(BLACK, height=1, width=1)[0]) == ""


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("OPEN", 'a sign that says "open", not "shut"', 1.0),
        ("OPEN 24 H", 'a sign that says "open"', 1.0),
        ("OPEN", "a sign that says “open24”", 4 / 6),
        ("OPEN", 'a sign that says "shut"', 0.0),
        ("SHOT", 'a sign that says "sh ut"', 0.75),
    ],
)
def test_written_text_is_compared_with_the_first_quotation(text: str, prompt: str, expected: float) -> None:
    assert value("ocr", draw(text, 2), prompt=prompt, recogniser="bitmap") == close(expected)


def test_written_text_of_a_clip_is_the_mean_of_its_frames() -> None:
    clip = np.concatenate([draw("AB"), draw("AC")])
    assert value("ocr", clip, prompt='"ab"', recogniser="bitmap") == close(0.75)


def test_prompt_without_quotation_is_a_problem() -> None:
    for prompt in ("a sign", 'a sign "', 'a sign " "'):
        assert "the prompt has no text between double quotes" in problem(
            "ocr", draw("A"), prompt=prompt, recogniser="bitmap"
        )


def test_own_recogniser_is_called_with_each_frame(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def read(frame):\n    return str(frame.shape)\n")
    recogniser = f"{tmp_path}/mine.py:read"
    assert value("ocr", plain(RED, RED), prompt='"(4,6,3)"', recogniser=recogniser) == 1.0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("ab", "ba", 2)],
)
def test_edit_distance(one: str, other: str, expected: int) -> None:
    assert edit_distance(one, other) == expected


TEXT = st.text("abc", max_size=6)


@examples(200)
@given(TEXT, TEXT, TEXT)
def test_edit_distance_is_a_metric(one: str, other: str, third: str) -> None:
    assert edit_distance(one, other) == edit_distance(other, one)
    assert (edit_distance(one, other) == 0) == (one == other)
    assert edit_distance(one, third) <= edit_distance(one, other) + edit_distance(other, third)
    assert abs(len(one) - len(other)) <= edit_distance(one, other) <= max(len(one), len(other))


def test_agreement_is_never_negative() -> None:
    assert agreement("completely other words", "ab") == 0.0
    assert quoted('x "Fine Day" y') == "Fine Day"


@pytest.mark.parametrize("version", [2, 3])
def test_paddleocr_is_called_as_its_version_wants(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """A stand-in of the package, which is not here: how it is started and called, and what it answers."""
    module, seen = ModuleType("paddleocr"), list[Any]()

    class Engine:
        def __init__(self, **arguments: Any) -> None:
            seen.append(arguments)

    def ocr(self: Any, image: Any) -> Any:
        seen.append(image)
        return [[[[0, 0], ("AB", 0.9)], [[0, 1], ("C", 0.8)], [[0, 2], ("x", 0.0)]]]

    def predict(self: Any, image: Any) -> Any:
        seen.append(image)
        return [{"rec_texts": ["AB", "C", "x"], "rec_scores": [0.9, 0.8, 0.0]}]

    if version == 2:
        Engine.ocr = ocr  # type: ignore[attr-defined]
    else:
        Engine.predict = predict  # type: ignore[attr-defined]
    module.PaddleOCR = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddleocr", module)
    assert value("ocr", plain(RED), prompt='a sign "abc"') == 1.0
    arguments, image = seen
    assert arguments == {"lang": "en", **({"use_gpu": False, "show_log": False} if version == 2 else {"device": "cpu"})}
    assert image[0, 0].tolist() == [0, 0, 255], "blue comes first"

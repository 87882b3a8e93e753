"""Images and videos of rows: their columns, and their order in the conversation."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.controller.data.media import MAX_INLINE_BYTES
from starling.controller.data.prompts import load_prompts, make_prompt
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import DataRow


def make(columns: dict[str, Any], **changes: Any) -> Prompt:
    settings = {"image_column": "images", "reference_column": "", "source": "rows.jsonl", **changes}
    return make_prompt(DataRow(columns), 4, DataSettings(**settings))


def content_of(uri: str) -> bytes:
    head, _, body = uri.partition(",")
    assert head == "data:application/octet-stream;base64"
    return base64.b64decode(body)


def test_media_follow_the_order_of_the_markers() -> None:
    prompt = make(
        {"question": "<image> or <video> or <image>?", "images": ["/a", "/b"], "film": "/c"},
        video_column="film",
        video_fps=4.0,
    )
    assert [(media.kind, media.uri, media.fps) for media in prompt.media] == [
        ("image", "/a", 0.0),
        ("video", "/c", 4.0),
        ("image", "/b", 0.0),
    ]
    assert prompt.messages[0].content == "<image> or <video> or <image>?"


def test_media_without_markers_come_before_the_first_user_message() -> None:
    prompt = make({"question": "Which?", "images": ["/a", "/b"]}, system="Be brief.")
    assert [message.content for message in prompt.messages] == ["Be brief.", "<image><image>Which?"]
    assert make({"question": "Which?", "images": None}).messages[0].content == "Which?"


def test_message_content_may_be_parts() -> None:
    parts = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "!"}]
    prompt = make({"question": [{"role": "user", "content": parts}], "images": "/a"})
    assert prompt.messages[0].content == "See <image>!"
    with pytest.raises(ConfigError, match=r"or a content of parts \(text, image, video\)"):
        make({"question": [{"role": "user", "content": [{"type": "audio"}]}], "images": "/a"})


def test_media_column_values() -> None:
    picture = Image.new("RGB", (3, 2), "red")
    file = io.BytesIO()
    picture.save(file, "png")
    png = file.getvalue()
    values = [
        "/a.png",
        "file:///a.png",
        "data:image/png;base64,AA==",
        png,
        {"bytes": png, "path": "x.png"},
        {"bytes": None, "path": "/x.png"},
        picture,
    ]
    uris = [media.uri for media in make({"question": "Which?", "images": values}).media]
    assert uris[:3] == values[:3]
    assert content_of(uris[3]) == content_of(uris[4]) == png
    assert uris[5] == "/x.png"
    assert Image.open(io.BytesIO(content_of(uris[6]))).getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "I", "I;16", "F", "RGBA", "CMYK", "YCbCr", "LAB", "HSV"])
def test_image_of_any_mode_is_accepted(mode: str) -> None:
    (media,) = make({"question": "Which?", "images": Image.new(mode, (3, 2))}).media
    assert Image.open(io.BytesIO(content_of(media.uri))).size == (3, 2)


def test_damaged_decoded_image_is_rejected() -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50.0).save(file, "png")
    cut = Image.open(io.BytesIO(file.getvalue()[:500]))
    with pytest.raises(ConfigError, match=r"column 'images' of row 4 of 'rows.jsonl' holds an image .*: replace it"):
        make({"question": "Which?", "images": cut})


@pytest.mark.parametrize("many", [False, True])
def test_hugging_face_images_are_not_decoded(tmp_path: Path, many: bool) -> None:
    file = io.BytesIO()
    Image.new("CMYK", (3, 2)).save(file, "jpeg")
    value = {"bytes": file.getvalue(), "path": None}
    column = datasets.List(datasets.Image()) if many else datasets.Image()
    rows = {"question": ["a"], "images": [[value]] if many else [value]}
    features = datasets.Features({"question": datasets.Value("string"), "images": column})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "rows")
    settings = DataSettings(source=f"hf:{tmp_path / 'rows'}", image_column="images", reference_column="")
    assert content_of(load_prompts(settings).prompt(0).media[0].uri) == file.getvalue()


def test_hugging_face_folder_images_are_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("CMYK", (3, 2)).save(folder / "a.jpg")
    (folder / "metadata.jsonl").write_text(json.dumps({"file_name": "a.jpg", "question": "Which?"}))
    settings = DataSettings(source=f"hf:{folder}", image_column="image", reference_column="")
    assert content_of(load_prompts(settings).prompt(0).media[0].uri) == (folder / "a.jpg").read_bytes()


def test_unreadable_hugging_face_row_is_rejected(tmp_path: Path) -> None:
    image = {"inner": {"bytes": b"no image", "path": None}}
    features = datasets.Features({"question": datasets.Value("string"), "images": {"inner": datasets.Image()}})
    rows = {"question": ["a"], "images": [image]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"a row of the Hugging Face dataset '.*rows' cannot be read \(.+\): install"):
        load_prompts(DataSettings(source=f"hf:{tmp_path / 'rows'}", image_column="images", reference_column=""))


def test_relative_paths_start_at_the_dataset_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "Which?", "images": "pictures/a.png"}))
    settings = {"image_column": "images", "reference_column": ""}
    prompt = load_prompts(DataSettings(source=str(source), **settings)).prompt(0)
    assert prompt.media[0].uri == str(tmp_path / "pictures/a.png")
    monkeypatch.chdir(tmp_path)
    assert load_prompts(DataSettings(source="rows.jsonl", **settings)).prompt(0).media == prompt.media


def test_rows_with_other_images_are_other_questions(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"question": "Which?", "images": f"/{name}.png"} for name in "abc"]
    source.write_text("\n".join(json.dumps(row) for row in rows))
    prompts = load_prompts(DataSettings(source=str(source), image_column="images", reference_column="", held_out=1))
    assert len(prompts) == 2


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"question": "Why?"}, "has no column 'images', which image_column names"),
        ({"question": "<image> <image>", "images": "/a"}, "has 1 image and its messages contain <image> 2 times"),
        ({"question": "<video>", "images": "/a"}, "has 1 image and its messages contain <image> 0 times"),
        ({"question": "Why?", "images": 7}, "column 'images' of row 4 of 'rows.jsonl' holds 7: give a path"),
        ({"question": "Why?", "images": [""]}, "holds '': give a path"),
        ({"question": "Why?", "images": bytes(MAX_INLINE_BYTES)}, "a prompt holds at most 8388608: give paths"),
    ],
)
def test_media_of_a_row_are_checked(columns: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make(columns)

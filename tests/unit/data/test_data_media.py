"""Images and videos of rows: their columns, and their order in the conversation."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
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


def saved(path: Path, column: Any, values: list[Any], **others: tuple[Any, list[Any]]) -> str:
    """Save a dataset with a column `images`, and others: feature and values. Returns the source."""
    features = {"question": datasets.Value("string"), "images": column} | {name: of for name, (of, _) in others.items()}
    rows = {"question": [f"q{n}" for n in range(len(values))], "images": values}
    rows |= {name: content for name, (_, content) in others.items()}
    # As a file from anywhere: the library would read the images when it writes the rows.
    table = pyarrow.Table.from_pydict(rows, schema=datasets.Features(features).arrow_schema)
    path.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, path / "train.parquet")
    return f"hf:{path}"


def load_images(source: str, **changes: Any) -> list[Prompt]:
    settings = DataSettings(source=source, image_column="images", reference_column="", shuffle=False, **changes)
    prompts = load_prompts(settings)
    return [prompts.prompt(position) for position in range(len(prompts))]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the cache of the library in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    "named", ["{there}/secret", "../secret", "link", "/dev/zero", "{there}/fifo", "set/fifo", "fifo"]
)
def test_hugging_face_images_are_read_only_from_the_folder_of_their_dataset(
    tmp_path: Path, many: bool, named: str
) -> None:
    (tmp_path / "secret").write_bytes(b"the secret key")
    os.mkfifo(tmp_path / "fifo")
    folder = tmp_path / "set"
    value = {"bytes": None, "path": named.format(there=tmp_path)}
    column = datasets.List(datasets.Image()) if many else datasets.Image()
    source = saved(folder, column, [[value] if many else value])
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "fifo")
    with pytest.raises(
        ConfigError, match=r"row 0 of 'hf:.*set' names the image .*, which (is no file of|cannot be read)"
    ):
        load_images(source)


@pytest.mark.usefixtures("own_cache")
def test_hugging_face_images_of_their_dataset_are_read_by_path(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    values = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": str(folder / "in" / "b.png")}]
    source = saved(folder, datasets.Image(), values)
    (folder / "in").mkdir()
    (folder / "a.png").write_bytes(b"one")
    (folder / "in" / "b.png").write_bytes(b"other")
    assert [content_of(prompt.media[0].uri) for prompt in load_images(source)] == [b"one", b"other"]
    (folder / "a.png").write_bytes(b"x" * (MAX_INLINE_BYTES + 1))
    with pytest.raises(ConfigError, match=r"names the image 'a\.png' of more than 8388608 bytes"):
        load_images(source)


class CountingHandler(BaseHTTPRequestHandler):
    """Counts requests, and answers none with a file."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.usefixtures("own_cache")
def test_hugging_face_media_at_any_depth_are_neither_decoded_nor_fetched(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), CountingHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = {"bytes": None, "path": f"http://127.0.0.1:{server.server_port}/x.png"}
    image = {"bytes": b"as it is", "path": None}
    try:
        source = saved(
            tmp_path / "set",
            datasets.Image(),
            [image],
            inner=({"pictures": datasets.List({"picture": datasets.Image()})}, [{"pictures": [{"picture": url}]}]),
            sound=(datasets.Audio(), [url]),
            unused=(datasets.List(datasets.List(datasets.Image())), [[[url]]]),
        )
        (prompt,) = load_images(source, metadata_columns=("inner", "sound"))
    finally:
        server.shutdown()
        server.server_close()
    assert content_of(prompt.media[0].uri) == b"as it is"
    assert prompt.metadata == {"inner": {"pictures": [{"picture": url}]}, "sound": url}
    assert CountingHandler.seen == []


@pytest.mark.usefixtures("own_cache")
def test_hugging_face_json_columns_are_values(tmp_path: Path) -> None:
    rows = [{"question": "a", "m": {"b": 0}}, {"question": "b", "m": {"c": [1, "d"]}}]
    features = datasets.Features({"question": datasets.Value("string"), "m": datasets.Json()})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "rows")
    settings = DataSettings(
        source=f"hf:{tmp_path / 'rows'}", metadata_columns=("m",), reference_column="", shuffle=False
    )
    prompts = load_prompts(settings)
    assert [prompts.prompt(n).metadata["m"] for n in range(2)] == [row["m"] for row in rows]


def test_nested_image_in_the_image_column_is_rejected(tmp_path: Path) -> None:
    image = {"inner": {"bytes": b"no image", "path": None}}
    features = datasets.Features({"question": datasets.Value("string"), "images": {"inner": datasets.Image()}})
    rows = {"question": ["a"], "images": [image]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"column 'images' of row 0 of 'hf:.*rows' holds .*: give a path"):
        load_prompts(DataSettings(source=f"hf:{tmp_path / 'rows'}", image_column="images", reference_column=""))


def test_relative_paths_start_at_the_dataset_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"question": "Which?", "images": "pictures/a.png"}))
    settings = {"image_column": "images", "reference_column": ""}
    prompt = load_prompts(DataSettings(source=str(source), **settings)).prompt(0)
    assert prompt.media[0].uri == str(tmp_path / "pictures/a.png")
    monkeypatch.chdir(tmp_path)
    assert load_prompts(DataSettings(source="rows.jsonl", **settings)).prompt(0).media == prompt.media


@pytest.mark.parametrize("path", ["~no-such-user/a.png", "~\0/a.png"])
def test_path_of_no_user_is_left_to_the_rollouts(path: str) -> None:
    assert make({"question": "?", "images": path}).media[0].uri.endswith(path)


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

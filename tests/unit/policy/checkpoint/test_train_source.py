"""Model folders in S3 and elsewhere: fetched whole, checked, and removed after the model is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest, write_digests
from starling.policy.train.checkpoint.source import whole_model
from starling.policy.train.model.load import load_model

CREDENTIALS = {"key": "testing", "secret": "testing"}
URL = "s3://models/tiny"


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    """Return the folder of a small model, in several files and with digests."""
    folder = tmp_path / "whole"
    tiny().save_pretrained(folder, max_shard_size="20KB")
    (folder / "notes.md").write_text("has a digest, too")
    write_digests(folder)
    return folder


@pytest.fixture
def options(endpoint: str, model: Path) -> Iterator[dict[str, Any]]:
    """Return the options of a store that has the model."""
    import s3fs

    options = {"endpoint_url": endpoint, **CREDENTIALS}
    store = s3fs.S3FileSystem(**options)
    store.mkdir("models")
    for file in model.iterdir():
        store.put_file(str(file), f"models/tiny/{file.name}")
    yield options
    store.rm("models", recursive=True)


@pytest.fixture
def local(model: Path, tmp_path: Path) -> Path:
    """Return a folder without weights."""
    folder = tmp_path / "local"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "starling-digests.json"))
    return folder


def test_model_of_s3_is_that_of_its_folder(options: dict[str, Any], model: Path, local: Path, tmp_path: Path) -> None:
    place = tmp_path / ".weights-policy-0"
    place.mkdir()
    (place / "model.safetensors").write_text("of a process that was killed")
    with whole_model(local, URL, options, place) as folder:
        assert folder == place
        assert model_digest(folder) == model_digest(model)
        loaded = load_model(folder).state_dict()
    assert not place.exists()
    expected = load_model(model).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_without_url_the_folder_itself_is_read(local: Path, tmp_path: Path) -> None:
    with whole_model(local, "", {}, tmp_path / "place") as folder:
        assert folder == local


def test_folder_of_this_machine_may_be_the_source(model: Path, local: Path, tmp_path: Path) -> None:
    with whole_model(local, str(model), {}, tmp_path / "place") as folder:
        assert load_model(folder).num_parameters() > 0


def _upload(file: Path, options: dict[str, Any], data: bytes | None = None) -> None:
    import s3fs

    store = s3fs.S3FileSystem(**options)
    store.pipe_file(f"models/tiny/{file.name}", file.read_bytes() if data is None else data)
    store.invalidate_cache()


def refusal(local: Path, options: dict[str, Any], place: Path, url: str = URL) -> str:
    """Return why the model at `url` is refused; nothing is left behind."""
    with pytest.raises(ConfigError) as caught, whole_model(local, url, options, place):
        pass
    assert not place.exists()
    return str(caught.value)


def test_model_without_weights_or_configuration_is_refused(
    options: dict[str, Any], model: Path, local: Path, tmp_path: Path
) -> None:
    assert "has no config.json; give the folder of a whole" in refusal(
        local, options, tmp_path / "place", "s3://models/no"
    )
    assert "has no weights; give the folder" in refusal(local, {}, tmp_path / "place", str(local))


def test_model_of_another_configuration_is_refused(options: dict[str, Any], local: Path, tmp_path: Path) -> None:
    (local / "config.json").write_text("{}")
    text = refusal(local, options, tmp_path / "place")
    assert f"{URL}/config.json differs from {local / 'config.json'}; policy.weights_from and model.path must be" in text


def test_damaged_file_is_refused(options: dict[str, Any], model: Path, local: Path, tmp_path: Path) -> None:
    weights = min(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    _upload(weights, options, bytes(data))
    assert f"{URL}/{weights.name} does not match its digest" in refusal(local, options, tmp_path / "place")


def test_unreachable_store_is_one_sentence(options: dict[str, Any], local: Path, tmp_path: Path) -> None:
    impatient = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 1}}}
    text = refusal(local, {**options, **impatient}, tmp_path / "place")
    assert f"{URL} cannot be listed (" in text
